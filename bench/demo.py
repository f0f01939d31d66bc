"""Prompts of the demo pair, and bundles of its target with each of its drafters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from compile.build import build
from compile.spec import BuildSpec
from model.errors import UserError

DEMO = Path(__file__).resolve().parent.parent / "demo"
TARGET = DEMO / "target"
ENTROPIES = ("structured", "open")
# drafter: its kind and the folder of its model, none for a host-side drafter
DRAFTERS = {
    "chain": ("chain", "draft"), "parallel": ("parallel", "draft_parallel"), "dflash": ("dflash", "draft_dflash"),
    "dspark": ("dflash", "draft_dspark"), "eagle3": ("eagle3", "draft_eagle3"), "ngram": ("ngram", ""),
}  # fmt: skip


class Prompt(NamedTuple):
    """`entropy` is structured or open for the demo's prompts, the file's name for prompts of a file."""

    name: str
    entropy: str
    text: str


def prompts(every: int = 1) -> list[Prompt]:
    """Every n-th prompt of demo/prompts.json."""
    listed = json.loads((DEMO / "prompts.json").read_text(encoding="utf-8"))["prompts"]
    return [Prompt(p["name"], p["entropy"], p["text"]) for p in listed[::every]]


def prompts_of(file: Path | None) -> list[Prompt]:
    """One prompt per line of a file, or the demo's prompts without a file."""
    if file is None:
        return prompts()
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError:
        raise UserError(f"{file} is not UTF-8 text; write one prompt per line") from None
    if not lines:
        raise UserError(f"{file} holds no prompt; write one prompt per line")
    return [Prompt(f"line {number}", file.stem, line) for number, line in enumerate(lines, 1)]


def bundle(out: Path, drafter: str, k: int, **sizes: Any) -> Path:
    """Build a bundle of the demo target unless `out` has it; k 0 is the target without a drafter."""
    kind, folder = DRAFTERS[drafter] if k else ("none", "")
    options: dict[str, Any] = {"target": str(TARGET), "tp": 1, "batch": 1, "max_len": 256, "dtype": "fp32"}
    options |= {"kernels": "reference"} | sizes
    if folder:
        options["draft"] = str(DEMO / folder)
    return build(BuildSpec(drafter=kind, k=str(k), out=str(out), **options))
