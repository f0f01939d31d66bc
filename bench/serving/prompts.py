"""The prompts: the published pod's, the article's two, a synthetic set in entropy tiers, or a file's."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from bench.serving.client import Prompt
from model.errors import UserError

_SETS: dict[str, Any] = json.loads(Path(__file__).with_name("prompts.json").read_text(encoding="utf-8"))
TIERS = ("low", "middle", "high")


def prompt_sets(names: str, seed: int) -> list[Prompt]:
    """The prompts of one or more sets, named with commas; the seed draws the synthetic set's words."""
    chosen = []
    for name in names.split(","):
        if name not in _SETS:
            raise UserError(f"there is no prompt set {name!r}; choose from {', '.join(_SETS)}")
        chosen += [_prompt(_SETS[name], case, seed) for case in _SETS[name]["cases"]]
    return chosen


def _prompt(made: dict[str, Any], case: dict[str, Any], seed: int) -> Prompt:
    if "line" in case:
        line = case["line"] + "\n"
        text = made["instruction"] + line * case["lines"] + line[: case["cut"]]
    elif "instruction" in made:
        text = made["instruction"] + case["text"]
    else:
        rng = random.Random(f"{seed} {case['name']}")
        text = case["text"]
        if "words" in made:
            words = ", ".join(rng.sample(made["words"], 6))
            text = text.replace("{words}", words).replace("{number}", str(rng.randrange(500, 5000)))
    return Prompt(case["name"], text, case["tier"], made["source"])


def read_prompts(path: Path) -> list[Prompt]:
    """A file's prompts: JSON lines with text, and name and tier if wanted; any other line is a text."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as text ({type(error).__name__}); give a UTF-8 file") from error
    prompts = [_from_line(line, number, path) for number, line in enumerate(lines, 1)]
    if not prompts:
        raise UserError(f"{path} holds no prompt; write one a line")
    if len({p.name for p in prompts}) < len(prompts):
        raise UserError(f"{path} gives two prompts the same name; rename one")
    return prompts


def _from_line(line: str, number: int, path: Path) -> Prompt:
    if not line.lstrip().startswith("{"):
        return Prompt(f"line_{number}", line, source=path.name)
    try:
        raw = json.loads(line)
        return Prompt(
            str(raw.get("name", f"line_{number}")), str(raw["text"]), str(raw.get("tier", "unclassified")), path.name
        )
    except (ValueError, KeyError) as error:
        raise UserError(f'{path}, line {number}: not a prompt ({error}); write {{"text": "..."}}') from error
