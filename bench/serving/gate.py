"""The gate: at temperature 0 both endpoints must give the same tokens, or no speedup is printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.serving.sample import Sample

_SHOWN = 120


@dataclass(frozen=True)
class Divergence:
    """Where two answers to one prompt part: the unit is a token where ids were compared, else a character."""

    case: str
    variants: tuple[str, str]
    unit: str
    position: int
    before: str
    continuations: tuple[str, str]

    @property
    def sentence(self) -> str:
        a, b = self.variants
        return (
            f"{self.case}: {a} and {b} part at {self.unit} {self.position}, after {self.before!r}: "
            f"{a} goes on {self.continuations[0]!r}, {b} {self.continuations[1]!r}"
        )


@dataclass(frozen=True)
class Verdict:
    """What the comparison found. `passed` is None when nothing could be compared."""

    passed: bool | None
    compared: int
    prompts: int
    unit: str
    divergences: tuple[Divergence, ...]
    missing: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"sentence": self.sentence}

    @property
    def sentence(self) -> str:
        if self.passed is None:
            return "Nothing was compared: one endpoint alone was measured."
        if self.missing:
            return f"No answer to compare for {', '.join(self.missing)}; no speedup is shown."
        if self.divergences:
            itself = sum(d.variants[0] == d.variants[1] for d in self.divergences)
            also = f", {itself} of them of the baseline with itself" if itself else ""
            return (
                f"The answers differ at temperature 0 ({len(self.divergences)} of {self.compared} comparisons{also}); "
                "no speedup is shown."
            )
        what = "Token-identical" if self.unit == "token" else "Identical text and token counts"
        return f"{what} at temperature 0: {self.compared} comparisons over {self.prompts} prompts."


def compare(samples: Sequence[Sample]) -> Verdict:
    """Compare every answer made at temperature 0 with the first baseline answer to its prompt.

    A baseline that differs from itself is found as well: then the server is not deterministic, and
    speculation is not what made the difference.
    """
    cases = list(dict.fromkeys(s.case for s in samples))
    found: list[Divergence] = []
    missing, compared, units = [], 0, set()
    for case in cases:
        answers = sorted((s for s in samples if s.case == case and not s.error), key=lambda s: s.variant)
        if {"baseline", "speculative"} - {s.variant for s in answers}:
            missing.append(case)
            continue
        first, *others = answers
        for other in others:
            compared += 1
            units.add(_unit(first, other))
            if parting := divergence(first, other):
                found.append(parting)
    if {s.variant for s in samples} < {"baseline", "speculative"}:
        return Verdict(None, 0, len(cases), "text", ())
    passed = not found and not missing and compared > 0
    unit = "token" if units == {"token"} else "character"
    return Verdict(passed, compared, len(cases), unit, tuple(found), tuple(missing))


def shared(first: Sequence[object], other: Sequence[object]) -> int:
    """The length of the longest common beginning."""
    pairs = enumerate(zip(first, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(other)))


def _unit(first: Sample, other: Sample) -> str:
    return "token" if first.token_ids and other.token_ids else "character"


def divergence(first: Sample, other: Sample) -> Divergence | None:
    """The first place where two answers differ, with what was before it and both continuations."""
    unit = _unit(first, other)
    same = shared(first.text, other.text)
    position = shared(first.token_ids or (), other.token_ids or ()) if unit == "token" else same
    if unit == "token" and first.token_ids == other.token_ids:
        return None
    if unit == "character" and first.text == other.text:
        if first.tokens == other.tokens:
            return None
        # the same text from another number of tokens: equal to the eye, not token-identical
        unit, position = "token", min(first.tokens or 0, other.tokens or 0)
    return Divergence(
        first.case,
        (first.variant, other.variant),
        unit,
        position,
        first.text[max(0, same - 60) : same],
        (first.text[same : same + _SHOWN], other.text[same : same + _SHOWN]),
    )
