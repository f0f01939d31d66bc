"""Accepted drafts by position: published and assumed records for Qwen3-32B, and tables from files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from model.errors import UserError

_EXPECTED = '{"tables": [{"name", "draft", "unconditional"}]} as bench.tune.trace and bench.serving write it'


@dataclass(frozen=True)
class Acceptance:
    """Acceptance of a drafter on a workload: `shares[i]` of all steps accept the first i + 1 drafts.

    `drafter` is "" for any drafter. If tokens per step are known at a single k, `only_k` is this k.
    """

    workload: str
    drafter: str
    shares: tuple[float, ...]
    source: str
    assumed: bool = False
    only_k: int = 0

    def tokens(self, k: int) -> float:
        """Expected tokens per step with k drafts; beyond the last share each draft is accepted at the mean rate."""
        more = range(1, k - len(self.shares) + 1)
        return 1.0 + sum(self.shares[:k]) + sum(self.shares[-1] * self.rate**i for i in more)

    @property
    def rate(self) -> float:
        """The acceptance rate, constant over positions, that gives as many tokens per step; by bisection."""
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            less = sum(middle**i for i in range(1, len(self.shares) + 1)) < sum(self.shares)
            low, high = (middle, high) if less else (low, middle)
        return (low + high) / 2


def at_rate(rate: float, workload: str = "") -> Acceptance:
    """Any drafter whose drafts are accepted independently with one rate: an assumption."""
    return Acceptance(workload, "", tuple(rate**i for i in range(1, 17)), "one assumed rate", assumed=True)


def from_tokens(workload: str, drafter: str, tokens: Sequence[float], source: str) -> Acceptance:
    """From tokens per step at k = 1, 2, ...: a draft's share is the difference to k - 1."""
    return Acceptance(workload, drafter, tuple(b - a for a, b in pairwise((1.0, *tokens))), source)


def from_one(workload: str, drafter: str, k: int, tokens: float, source: str, assumed: bool = True) -> Acceptance:
    """From tokens per step at one k."""
    return Acceptance(workload, drafter, ((tokens - 1) / k,) * k, source, assumed, only_k=k)


# one H100, bf16, greedy, one request at a time; neither the spread nor the number of runs is given
_RUIZT = "tomasruizt, vLLM on one H100, greedy, one request at a time"
_DEEPSPEC = "Qwen3-14B in DeepSpec's table 1 (T 1, 7 drafts); none is published for the 32B"
_DEEPSPEC_14B = {"MT-Bench": (2.62, 3.10, 3.70), "HumanEval": (4.14, 4.59, 5.43), "GSM8K": (5.24, 5.41, 6.21)}
MT_BENCH = from_tokens("MT-Bench", "chain 1.7B", (1.77, 2.35, 2.80, 3.15, 3.40, 3.58), _RUIZT)
INSTRUCT_CODER = from_tokens("InstructCoder", "chain 1.7B", (1.72, 2.24, 2.57, 2.85, 3.06, 3.17), _RUIZT)
SMALL = tuple(
    Acceptance(known.workload, "chain 0.6B", at_rate(0.4 * known.rate).shares[:6], "AWS's article, 60 % less", True)
    for known in (MT_BENCH, INSTRUCT_CODER)
)
KNOWN = (
    MT_BENCH,
    INSTRUCT_CODER,
    *SMALL,
    from_tokens("MT-Bench", "EAGLE-3", (1.68, 2.07, 2.28, 2.39, 2.44, 2.46), f"RedHatAI's head; {_RUIZT}"),
    from_one("MT-Bench", "parallel 0.6B", 15, 4.02, "PARD-2 with Qwen3-8B (arXiv 2605.08632)"),
    from_one("ShareGPT", "DFlash", 15, 2.46, "card of chutesai/Qwen3-32B-FP8-DFLASH, 8 requests", assumed=False),
    *(
        from_one(workload, drafter, 7, tokens, _DEEPSPEC)
        for workload, row in _DEEPSPEC_14B.items()
        for drafter, tokens in zip(("EAGLE-3", "DFlash", "DFlash with a Markov head"), row, strict=True)
    ),
    from_one("edits", "n-gram", 7, 2.0, "gains of 2 to 4 are reported for suffix and n-gram look-up"),
)


def read(path: Path, drafter: str | None = None) -> list[Acceptance]:
    """Read the tables of a file, for `drafter` if it is given; UserError for a file of another form."""
    try:
        file = json.loads(path.read_text(encoding="utf-8"))
        return [_table(table, path.name, drafter) for table in file["tables"] if table["unconditional"]]
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); give a file {_EXPECTED}") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is not {_EXPECTED} ({type(error).__name__}: {str(error)[:80]})") from None


def _table(table: dict[str, Any], source: str, drafter: str | None) -> Acceptance:
    shares = tuple(map(float, table["unconditional"]))
    if not all(1 >= a >= b >= 0 for a, b in pairwise((1.0, *shares))):
        raise ValueError(f"{table['name']!r} has shares that do not fall from at most 1; give shares of all steps")
    return Acceptance(str(table["name"]), str(table["draft"]) if drafter is None else drafter, shares, source)
