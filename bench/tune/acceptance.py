"""How many drafts of a step a workload accepts: read from recorded steps or from a table by position."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from model.errors import UserError

_EXPECTED = (
    'JSON lines {"drafted": k, "accepted": n}, or {"tables": [{"name", "draft", "lengths" or "unconditional"}]} '
    "as bench.acceptance and bench.serving write it"
)


@dataclass(frozen=True)
class Acceptance:
    """One workload with one draft; shares[i] is the share of steps that accept draft i + 1 and all before it.

    `draft` is "" when the file doesn't say it; `steps` is 0 when their number is unknown.
    """

    name: str
    draft: str
    shares: tuple[float, ...]
    source: str
    steps: int = 0

    def tokens(self, k: int) -> float:
        """Expected tokens of a step with k drafts.

        Past the last recorded position each draft is accepted as often as on average within the record:
        an extrapolation, `reach` says from where.
        """
        known, last = self.shares[:k], self.shares[-1]
        more = range(1, k - len(self.shares) + 1)
        return 1.0 + sum(known) + sum(last * self.rate**i for i in more)

    @property
    def reach(self) -> int:
        """The last position that was recorded."""
        return len(self.shares)

    @property
    def rate(self) -> float:
        """The one acceptance rate that gives the recorded tokens a step at the full reach."""
        return rate_for(1.0 + sum(self.shares), self.reach)


def tokens(rate: float, k: int) -> float:
    """Expected tokens of one pass over k drafts that are accepted independently with one rate."""
    return sum(rate**i for i in range(k + 1))


def at_rate(rate: float, reach: int, name: str = "", draft: str = "") -> Acceptance:
    """A workload whose drafts are accepted independently with one rate."""
    if not 0.0 <= rate < 1.0:
        raise UserError(f"the acceptance rate is {rate}; give a number from 0 to below 1")
    shares = tuple(rate**i for i in range(1, reach + 1))
    return Acceptance(name or f"rate {rate:.3f}", draft, shares, "assumed: one rate at every position")


def rate_for(length: float, k: int) -> float:
    """The acceptance rate whose expected tokens a step over k drafts are `length`, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens(middle, k) < length else (low, middle)
    return (low + high) / 2


def from_lengths(name: str, draft: str, lengths: Sequence[float], source: str) -> Acceptance:
    """Acceptance from tokens a step for k = 1, 2, ...: each further draft's share is the tokens that it adds."""
    shares = tuple(b - a for a, b in pairwise((1.0, *lengths)))
    return _checked(Acceptance(name, draft, shares, source))


def from_steps(name: str, draft: str, steps: Iterable[tuple[int, int]], source: str) -> Acceptance:
    """Acceptance from (drafted, accepted) of each step.

    A step near the end of an answer may draft less: a position's rate is taken over the steps that drafted it and
    accepted all before it, and a share is the product of the rates up to it.
    """
    drawn = [(d, a) for d, a in steps if d > 0]
    if not drawn:
        raise UserError(f"{source} has no step with drafts for {name!r}; record with speculation on")
    share, shares = 1.0, []
    for position in range(1, max(d for d, _ in drawn) + 1):
        reached = [a >= position for d, a in drawn if d >= position and a >= position - 1]
        share *= sum(reached) / len(reached) if reached else 0.0
        shares.append(share)
    return _checked(Acceptance(name, draft, tuple(shares), source, len(drawn)))


def read(path: Path) -> list[Acceptance]:
    """The workloads of a file of either kind; UserError when it is neither."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (byte {error.start}); expected {_EXPECTED}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); give a file of {_EXPECTED}") from None
    try:
        return _read_object(path, json.loads(text))
    except json.JSONDecodeError:
        pass
    try:
        return _read_rows(path, [json.loads(line) for line in text.splitlines() if line.strip()])
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not JSON ({error}); expected {_EXPECTED}") from None


def _read_object(path: Path, value: Any) -> list[Acceptance]:
    if isinstance(value, list):
        return _read_rows(path, value)
    if isinstance(value, dict) and "tables" in value:
        return [_table(path, value, table) for table in value["tables"]]
    return _read_rows(path, [value])


def _table(path: Path, file: dict[str, Any], table: dict[str, Any]) -> Acceptance:
    name, draft = table.get("name", path.stem), _short(table.get("draft"))
    source = table.get("source", file.get("source", f"file {path.name}"))
    if "lengths" in table:
        return from_lengths(name, draft, table["lengths"], source)
    if "unconditional" in table:
        return _checked(Acceptance(name, draft, tuple(table["unconditional"]), source, table.get("steps", 0)))
    raise UserError(f"table {name!r} of {path} has neither lengths nor unconditional; expected {_EXPECTED}")


def _read_rows(path: Path, rows: list[Any]) -> list[Acceptance]:
    groups: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for row in rows:
        if not isinstance(row, dict) or not {"drafted", "accepted"} <= row.keys():
            raise UserError(f"{path} holds {str(row)[:60]}; expected {_EXPECTED}")
        drafted, accepted = int(row["drafted"]), int(row["accepted"])
        if not 0 <= accepted <= drafted:
            raise UserError(f"{path} says {accepted} of {drafted} drafts accepted; record it again")
        key = str(row.get("workload", path.stem)), _short(row.get("draft"))
        groups.setdefault(key, []).append((drafted, accepted))
    if not groups:
        raise UserError(f"{path} is empty; expected {_EXPECTED}")
    return [from_steps(name, draft, steps, f"recorded {path.name}") for (name, draft), steps in groups.items()]


def _short(draft: Any) -> str:
    """1.7B of Qwen/Qwen3-1.7B, draft of demo/draft, "" of ""."""
    return Path(str(draft or "")).name.removeprefix("Qwen3-")


def _checked(found: Acceptance) -> Acceptance:
    falling = all(a >= b - 1e-9 for a, b in pairwise((1.0, *found.shares)))
    if not found.shares or not falling or found.shares[-1] < 0:
        shown = ", ".join(f"{s:.3f}" for s in found.shares)
        raise UserError(
            f"the shares of {found.name!r} are [{shown}]; a position's share of all steps lies in 0 to 1 and "
            "can't exceed the one before it, so give unconditional shares"
        )
    return found
