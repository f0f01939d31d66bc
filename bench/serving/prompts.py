"""The load's prompts: the published pod's, the article's two, a set of our own, the demo's, random ones, a file's."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

from bench import demo
from model.errors import UserError

# by set: its source and its prompts
_SETS: dict[str, Any] = json.loads(Path(__file__).with_name("prompts.json").read_text(encoding="utf-8"))


class Prompt(NamedTuple):
    """`tier` is the entropy of the answer: low, middle or high, or structured or open for the demo's."""

    name: str
    tier: str
    text: str


def prompt_sets(names: str, seed: int) -> list[Prompt]:
    """The prompts of one or more sets, named with commas, in an order by the seed; any other name is a file's."""
    chosen: list[Prompt] = []
    for name in names.split(","):
        if name == "demo":
            chosen += [Prompt(*p) for p in demo.prompts()]
        elif name == "random":
            chosen += _random(seed)
        elif name in _SETS:
            chosen += [Prompt(p["name"], p["tier"], p["text"]) for p in _SETS[name]["prompts"]]
        else:
            chosen += _of_file(Path(name))
    random.Random(seed).shuffle(chosen)
    return chosen


def uneven(rng: random.Random, tokens: int) -> int:
    """Tokens of an answer, from half to one and a half times so many."""
    return rng.randint(tokens - tokens // 2, tokens + tokens // 2)


def _random(seed: int) -> list[Prompt]:
    """Texts of 40 ids that nothing foretells, so that few drafts are accepted."""
    rng, tokenizer = random.Random(seed), demo.tokenizer()
    texts = (tokenizer.decode(rng.choices(range(tokenizer.get_vocab_size()), k=40)) for _ in range(60))
    return [Prompt(f"random {number}", "random", text) for number, text in enumerate(texts)]


def _of_file(file: Path) -> list[Prompt]:
    """A prompt a line."""
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        sets = ", ".join(["demo", "random", *_SETS])
        raise UserError(
            f"{file} is no set of prompts ({sets}) and not a readable file ({type(error).__name__}); name one of them"
        ) from None
    if not lines:
        raise UserError(f"{file} holds no prompt; write one a line")
    return [Prompt(f"line {number}", file.stem, line) for number, line in enumerate(lines, 1)]
