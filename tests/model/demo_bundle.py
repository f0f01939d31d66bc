"""Bundles of the demo pair for the tests, built once a session and shared by its workers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from filelock import FileLock

from compile.build import build
from compile.spec import BuildSpec
from model.bundle.manifest import read_bundle
from model.serving.ready import shape_of
from model.serving.request import Params, Request
from model.serving.runtime import Graphs
from model.serving.text import load_tokenizer
from tests.last_few import last_few

ROOT = Path(__file__).resolve().parents[2]
GREEDY = Params()
PROMPTS = [p["text"] for p in json.loads((ROOT / "demo/prompts.json").read_text(encoding="utf-8"))["prompts"]]


@last_few
def graphs(base: Path, draft: str = "draft", **changes: object) -> Graphs:
    """The compiled graphs of a demo bundle, by default k 7, batch 4, length 256, fp32."""
    target = str(ROOT / "demo/target")
    folder = str(ROOT / "demo" / draft)
    name = "-".join([draft, *(f"{k}{v}" for k, v in changes.items())])
    spec = BuildSpec(
        target=target, draft=folder, checkpoint=target, draft_checkpoint=folder, tp=1, k=7, batch=4,
        max_len=256, dtype="fp32", out=str(base / name),
    )  # fmt: skip
    spec = dataclasses.replace(spec, **changes)  # type: ignore[arg-type]
    spec.check()
    with FileLock(str(base / name) + ".lock"):
        build(spec)
    return Graphs(read_bundle(base / name))


def request(graphs: Graphs, text: str, params: Params = GREEDY, count: int = 40, **more: object) -> Request:
    """A request for a prompt in the demo tokenizer."""
    ids = tuple(load_tokenizer(graphs.bundle.path).encode(text).ids)
    return Request(ids, params, count, graphs.bundle.config("target").eos_token_ids, **more)  # type: ignore[arg-type]


__all__ = ["PROMPTS", "ROOT", "graphs", "request", "shape_of"]
