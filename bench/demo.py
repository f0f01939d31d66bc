"""The demo pair as every benchmark uses it: its prompts, its tokenizer, a bundle with any of its drafters."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from compile.build import build
from compile.spec import BuildSpec
from model.config import load_config
from trnspec.engine.request import Params, Request

DEMO = Path(__file__).resolve().parent.parent / "demo"
TARGET = DEMO / "target"
ENTROPIES = ("structured", "open")
# the folder of each drafter's model; none where the host drafts
MODELS = {"chain": "draft", "parallel": "draft_parallel", "dflash": "draft_dflash", "dspark": "draft_dspark",
          "eagle3": "draft_eagle3", "ngram": ""}  # fmt: skip
# a drafter that is a kind of another name
KINDS = {"dspark": "dflash"}


class Prompt(NamedTuple):
    """One of demo/prompts.json; entropy is structured or open."""

    name: str
    entropy: str
    text: str


def prompts(every: int = 1) -> list[Prompt]:
    """Every n-th prompt."""
    listed = json.loads((DEMO / "prompts.json").read_text(encoding="utf-8"))["prompts"]
    return [Prompt(p["name"], p["entropy"], p["text"]) for p in listed[::every]]


def tokenizer() -> Tokenizer:
    """The pair's tokenizer."""
    return Tokenizer.from_file(str(TARGET / "tokenizer.json"))


def request(prompt: Prompt, params: Params, tokens: int) -> Request:
    """A request that ends with the text or at its limit of new tokens."""
    ids = tuple(tokenizer().encode(prompt.text).ids)
    return Request(ids, params, tokens, load_config(str(TARGET)).eos_token_ids)


def spec(out: Path, drafter: str, k: int, model: str = "", **sizes: Any) -> BuildSpec:
    """A build of the demo target with a drafter, by default with its own model; with k 0 the target alone."""
    folder = model or MODELS.get(drafter, "")
    about: dict[str, Any] = {"target": str(TARGET), "tp": 1, "batch": 1, "max_len": 256, "dtype": "fp32"} | sizes
    if k and folder:
        about["draft"] = str(DEMO / folder)
    kind = KINDS.get(drafter, drafter) if k else "none"
    return BuildSpec(drafter=kind, k=str(k), out=str(out), **about)


def bundle(out: Path, drafter: str, k: int, model: str = "", **sizes: Any) -> Path:
    """The folder of that build, built if it is not there."""
    return build(spec(out, drafter, k, model, **sizes))


def count(least: int = 1) -> Callable[[str], int]:
    """A reader of an option that is a count."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} was given; give a whole number of at least {least}")
        return int(text)

    return read
