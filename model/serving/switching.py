"""When to speculate: a table of expected gains, what the steps so far say, and the decision for the next one.

A decision is a function of (table, beliefs, pause) alone. It cannot change a token: whatever it says, what is emitted
is the target's own draw. docs/switching.md derives the rules.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from model.errors import UserError

TABLE_FILE = "tuning.json"
FORMAT = 1
# what a step weighs after one more: after twenty more, about a third
_KEPT = 0.95
# what is known of a request before a pause weighs no more than so many drafts after it
_REMEMBERED = 3.0
# an unknown request is taken to accept as often as a middling draft does, on the evidence of two drafts
_PRIOR_HITS, _PRIOR_MISSES = 1.4, 0.6
# steps that a new request, or a batch after a pause, is given to show what it accepts
TRIAL = 4
FIRST_PAUSE, LONGEST_PAUSE = 16, 1024
# an estimate that is wrong by chance stops nothing: a loss below this share is borne
_PATIENCE = 0.04
# a probe may cost this share of the pause before it
_PROBE_SHARE = 0.125


def expected_tokens(alpha: float, k: int) -> float:
    """Tokens that a step emits on average if each draft is accepted with chance alpha until the first miss.

    Leviathan et al. 2023, equation 1: 1 + alpha + ... + alpha^k.
    """
    return sum(alpha**i for i in range(k + 1))


@dataclass(frozen=True)
class Curve:
    """Gain over the target alone by acceptance rate, for one count of active sequences and one k."""

    batch: int
    k: int
    alphas: tuple[float, ...]
    gains: tuple[float, ...]

    def gain(self, alpha: float) -> float:
        """The gain at alpha, on straight lines between the table's rows."""
        at = bisect_left(self.alphas, alpha)
        if at == 0 or at == len(self.alphas):
            return self.gains[min(at, len(self.gains) - 1)]
        low, high = self.alphas[at - 1], self.alphas[at]
        share = (alpha - low) / (high - low)
        return (1 - share) * self.gains[at - 1] + share * self.gains[at]


@dataclass(frozen=True)
class Table:
    """A tuner's table; `refresh` is what it costs to bring one draft cache up to date, in steps of the target alone.

    Without that figure a stale draft cache stays stale.
    """

    curves: tuple[Curve, ...]
    source: str
    refresh: float | None = None

    def best(self, active: int, alpha: float, most: int) -> tuple[int, float]:
        """The k of at least 1 and at most `most` with the largest gain, and that gain; (0, gain at no acceptance)."""
        sizes = sorted({c.batch for c in self.curves})
        size = sizes[min(bisect_left(sizes, active), len(sizes) - 1)]
        curves = [c for c in self.curves if c.batch == size]
        usable = [(c.gain(alpha), c.k) for c in curves if c.k <= most]
        if not usable:
            return 0, min(c.gain(0.0) for c in curves)
        gain, k = max(usable)
        return k, gain

    def on_graph(self, k: int) -> Table:
        """The table for a fused graph of k drafts, whose step costs the same however few of them it may accept.

        A smaller k gains at most what its fewer tokens leave of the gain of k. UserError without rows for k.
        """
        own = {c.batch: c for c in self.curves if c.k == k}
        if {c.batch for c in self.curves} != own.keys():
            raise UserError(
                f"the tuning table has no rows of k {k} for some batch, which this bundle drafts; tune for k {k}"
            )
        curves = tuple(_capped(c, own[c.batch]) for c in self.curves if c.k <= k)
        return replace(self, curves=curves)

    def on_graphs(self, ks: tuple[int, ...]) -> dict[int, Table]:
        """The table for each graph of a bundle; a k without rows is never chosen. UserError if that is every k."""
        batches = {c.batch for c in self.curves}
        known = [k for k in ks if {c.batch for c in self.curves if c.k == k} == batches]
        return {k: self.on_graph(k) for k in known or ks[-1:]}


def _capped(curve: Curve, whole: Curve) -> Curve:
    def cap(alpha: float) -> float:
        return whole.gain(alpha) * expected_tokens(alpha, curve.k) / expected_tokens(alpha, whole.k)

    return replace(curve, gains=tuple(min(g, cap(a)) for a, g in zip(curve.alphas, curve.gains, strict=True)))


def parse_table(content: bytes, file: str) -> Table:
    """The table that a tuning file's bytes hold; UserError, naming the file, if they hold none."""
    try:
        raw = json.loads(content)
        if (version := raw["format"]) != FORMAT:
            raise UserError(f"{file} is a tuning table of format {version}, this version reads {FORMAT}; tune again")
        refresh = raw.get("refresh")
        table = Table(_curves(raw["rows"]), str(raw["source"]), None if refresh is None else float(refresh))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is not a tuning table ({type(error).__name__}: {error}); tune again") from error
    if not table.curves:
        raise UserError(f"{file} has no rows; tune again")
    return table


def _curves(rows: Sequence[dict[str, Any]]) -> tuple[Curve, ...]:
    points: dict[tuple[int, int], dict[float, float]] = {}
    for row in rows:
        alpha, gain = float(row["alpha"]), float(row["gain"])
        if not (0 <= alpha <= 1 and 0 < gain < math.inf and row["batch"] >= 1 and row["k"] >= 1):
            raise ValueError(f"row {row}")
        points.setdefault((int(row["batch"]), int(row["k"])), {})[alpha] = gain
    return tuple(
        Curve(batch, k, tuple(sorted(curve)), tuple(curve[a] for a in sorted(curve)))
        for (batch, k), curve in sorted(points.items())
    )


def find_table(bundle: Path, file: Path | None) -> Table | None:
    """The table of `file`, else that in the bundle's folder, else None."""
    path = file or bundle / TABLE_FILE
    if not path.is_file():
        if file is None:
            return None
        wrong = "is a folder, and the table is a file" if path.is_dir() else "does not exist"
        raise UserError(f"{path} {wrong}; make it with bench.step_costs --bundle {bundle} --out FILE")
    return parse_table(path.read_bytes(), str(path))


@dataclass(frozen=True)
class Belief:
    """What the steps of one request say of its drafts; old steps weigh less.

    `most` is the largest k that the request allows; `stale` says that the draft's cache lacks tokens.
    """

    most: int
    hits: float = 0.0
    misses: float = 0.0
    tried: int = 0
    stale: bool = False

    @property
    def alpha(self) -> float:
        """The chance that the next draft is accepted: the mean of a Beta posterior."""
        hits, misses = self.hits + _PRIOR_HITS, self.misses + _PRIOR_MISSES
        return hits / (hits + misses)

    def refreshed(self) -> Belief:
        """The belief when the draft's cache was brought up to date: much may have changed since the last step."""
        weight = min(1.0, _REMEMBERED / max(self.hits + self.misses, 1e-9))
        return replace(self, hits=weight * self.hits, misses=weight * self.misses, stale=False)

    def after(self, drafted: int, accepted: int) -> Belief:
        """The belief after a speculative step. Drafts from a stale cache say nothing of fresh ones."""
        if drafted < 1 or self.stale:
            return replace(self, tried=self.tried + 1)
        hits, misses = _KEPT * self.hits + accepted, _KEPT * self.misses + (accepted < drafted)
        return replace(self, hits=hits, misses=misses, tried=self.tried + 1)


@dataclass(frozen=True)
class Pause:
    """How long the batch has been told not to speculate: steps left, the whole length, steps left of a probe."""

    left: int = 0
    length: int = 0
    probe: int = 0


@dataclass(frozen=True)
class Decision:
    """The next step: the k of each request (empty: the target alone), whose draft caches to refresh first.

    `k` is that of the graph, by default of the smallest one that holds the limits.
    """

    limits: tuple[int, ...] = ()
    refresh: tuple[bool, ...] = ()
    pause: Pause = Pause()
    k: int | None = None


def decide_graph(tables: Mapping[int, Table], beliefs: tuple[Belief, ...], pause: Pause) -> Decision:
    """`decide` for a bundle of several graphs, by their k: with the one on which the requests gain the most."""

    def gain(k: int) -> float:
        return sum(tables[k].best(len(beliefs), b.alpha, b.most)[1] for b in beliefs)

    k = max(tables, key=gain)
    decision = decide(tables[k], beliefs, pause)
    return replace(decision, k=k) if decision.limits else decision


def decide(table: Table, beliefs: tuple[Belief, ...], pause: Pause) -> Decision:
    """Whether the batch speculates next, and with which k each request does.

    A fused step serves all requests or none, so the batch speculates while its requests' gains add up to more than
    their count. A new request gets a trial, a pause ends with a probe, and each pause is twice the one before it.
    """
    chosen = [table.best(len(beliefs), b.alpha, b.most) for b in beliefs]
    limits = tuple(k for k, _ in chosen)
    refreshed = tuple(b.stale and b.most > 0 and table.refresh is not None for b in beliefs)
    if pause.probe:
        return Decision(limits, refreshed, replace(pause, probe=pause.probe - 1))
    if sum(gain for _, gain in chosen) >= len(beliefs) * (1 - _PATIENCE):
        return Decision(limits, refreshed, Pause())
    if any(b.tried < TRIAL and b.most for b in beliefs):
        return Decision(limits, (False,) * len(beliefs), pause)
    if pause.left > 1:
        return Decision(pause=replace(pause, left=pause.left - 1))
    if pause.left:
        return Decision(limits, refreshed, Pause(0, pause.length, TRIAL - 1))
    length = min(LONGEST_PAUSE, 2 * pause.length) or first_pause(table, beliefs)
    return Decision(pause=Pause(length, length))


def first_pause(table: Table, beliefs: tuple[Belief, ...]) -> int:
    """Steps before the first probe: enough that the probe stays a small share of them."""
    slowdown = 1 / table.best(len(beliefs), 0.0, 1 << 30)[1]
    cost = TRIAL * max(0.0, slowdown - 1) + len(beliefs) * (table.refresh or 0.0)
    return max(FIRST_PAUSE, math.ceil(cost / _PROBE_SHARE))
