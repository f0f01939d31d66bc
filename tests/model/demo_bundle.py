"""Bundles of the demo pair, built once per session and shared by its workers."""

from __future__ import annotations

import json
from pathlib import Path

from filelock import FileLock

from compile.build import build
from compile.spec import BuildSpec, Recipe
from tests.last_few import last_few
from trnspec.bundle.opening import read_bundle
from trnspec.runtime.xla import XlaRunner

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = [p["text"] for p in json.loads((ROOT / "demo/prompts.json").read_text(encoding="utf-8"))["prompts"]]


@last_few
def graphs(base: Path, draft: str = "draft", **changes: object) -> XlaRunner:
    """The compiled graphs of a demo bundle, by default k 7, batch 4, length 256, fp32."""
    target, folder = str(ROOT / "demo/target"), str(ROOT / "demo" / draft)
    name = "-".join([draft, *(f"{k}{v}" for k, v in changes.items())])
    recipe = Recipe(**{n: changes.pop(n) for n in ("blocks", "chunks") if n in changes})  # type: ignore[arg-type]
    values = {"tp": 1, "batch": 4, "max_len": 256, "dtype": "fp32", "kernels": "reference", "recipe": recipe} | changes
    spec = BuildSpec(target, folder, out=str(base / name), **values | {"k": str(changes.get("k", 7))})  # type: ignore[arg-type]
    with FileLock(str(base / name) + ".lock"):
        build(spec)
    return XlaRunner(read_bundle(base / name))
