"""The study as markdown tables; every time in them is simulated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from bench.tune.choose import CORES_PER_CHIP

Found = dict[str, Any]
_MOST = 8


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A markdown table."""
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *("| " + " | ".join(cells) + " |" for cells in rows)])


def place(row: Found) -> str:
    """As in 1.7B tp 8, target tp 32, batch 4."""
    return f"{row['draft']} tp {row['draft_tp']}, target tp {row['tp']}, batch {row['batch']}"


def chips(row: Found) -> str:
    """As in 32 ranks of 2 cores: 8 chips."""
    return f"{row['tp']} ranks of {row['lnc']} cores: {row['tp'] * row['lnc'] / CORES_PER_CHIP:g} chips"


def ms(row: Found) -> str:
    """Nominal and band."""
    return f"{row['ms']:.2f} [{row['ms_low']:.2f}, {row['ms_high']:.2f}]"


def times(row: Found) -> str:
    """Gain and band."""
    return f"{row['gain']:.2f}x [{row['gain_low']:.2f}, {row['gain_high']:.2f}]"


def choices(found: Found) -> tuple[list[str], list[list[str]]]:
    """The best of all candidates per workload."""
    heads = ["workload", "goal", "choice", "k", "ms per token (simulated)", "gain (simulated)", "tokens/s and chip"]
    return heads, [
        [r["workload"], r["goal"], place(r), str(r["k"]), ms(r), times(r), f"{r['tokens_per_second_per_chip']:.0f}"]
        for r in found["choices"]
    ]


def candidates(found: Found) -> tuple[list[str], list[list[str]]]:
    """Every setup at its best k."""
    heads = ["workload", "setup", "target alone, ms", "best k", "ms per token (simulated)", "gain (simulated)",
             "tokens/s and chip"]  # fmt: skip
    return heads, [
        [r["workload"], place(r), f"{r['off_ms']:.2f}", str(r["k"]) if r["k"] else "off", ms(r), times(r),
         f"{r['tokens_per_second_per_chip']:.0f}"]
        for r in found["candidates"]
    ]  # fmt: skip


def stops(found: Found) -> tuple[list[str], list[list[str]]]:
    """When speculation should be off."""
    heads = ["setup", "off below this acceptance rate (simulated)", "ends of the band"]
    return heads, [
        [place(r), f"{r['off_below']:.2f}", " to ".join(f"{v:.2f}" for v in r["off_below_ends"])]
        for r in found["stops"]
    ]


def assumption(row: Found) -> tuple[str, list[str], str]:
    """An assumption's name in words, its two ends and their unit; long nanoseconds as microseconds."""
    unit, ends = row["unit"], row["ends"]
    if unit == "ns" and max(ends) >= 1000:
        unit, ends = "us", [v / 1000 for v in ends]
    name = row["assumption"].removesuffix(f"_{row['unit']}").replace("_", " ")
    return name, [f"{v:,.4g}" if v < 1e4 else f"{v:,.0f}" for v in ends], unit


def span(row: Found) -> str:
    """As in collective start, 1 to 10 us; a unit of many words is left to the table."""
    name, ends, unit = assumption(row)
    return f"{name}, {' to '.join(ends)} {unit if len(unit) < 7 else ''}".rstrip()


def sensitivity(found: Found) -> tuple[list[str], list[list[str]]]:
    """The assumptions that move the time most."""
    heads = ["assumption", "from", "to", "ms per token (simulated)", "gain (simulated)", "best k"]
    rows = [r for r in found["sensitivity"] if r["swing_ms"] > 1e-3][:_MOST]
    return heads, [
        [name, *(f"{end} {unit}".strip() for end in ends),
         *(" to ".join(f"{v:.2f}" for v in r[key]) for key in ("ms", "gain")), " to ".join(map(str, r["k"]))]
        for r in rows for name, ends, unit in [assumption(r)]
    ]  # fmt: skip


def h100(found: Found) -> tuple[list[str], list[list[str]]]:
    """The published series and the fitted model."""
    heads = ["k", "tokens a step, published", "fitted", "error", "speed-up, published", "fitted", "error"]
    return heads, [
        [str(r["k"]), f"{r['length_published']:.2f}", f"{r['length_fitted']:.2f}", f"{r['length_error']:+.1%}",
         f"{r['speedup_published']:.2f}", f"{r['speedup_fitted']:.2f}", f"{r['speedup_error']:+.1%}"]
        for r in found["h100"]["rows"]
    ]  # fmt: skip


def others(found: Found) -> tuple[list[str], list[list[str]]]:
    """What a draft without a published table would have to reach."""
    heads = ["workload", "draft", "rate that makes it equal", "rate of the other draft",
             "k, ms at that same rate (simulated)", "k, ms at a rate 60 % lower (simulated)"]  # fmt: skip
    return heads, [
        [r["workload"], r["draft"], f"{r['needed_rate']:.3f}", f"{r['rate']:.3f}",
         *(f"{r[key]['k']}, {ms(r[key])}" for key in ("same_rate", "rate_60_percent_lower"))]
        for r in found["other_drafts"]
    ]  # fmt: skip


def h100_sentence(found: Found) -> str:
    """What the fit says in one sentence."""
    h = found["h100"]
    return (
        f"One acceptance rate ({h['rate']:.3f}) and one cost ratio ({h['cost_ratio']:.3f}; the separately published "
        f"pass times give {h['cost_ratio_published']:.3f}) fit all twelve published points within {h['worst']:.1%}."
    )


def sensitivity_title(found: Found) -> str:
    """What sensitivity was made for."""
    return f"{found['sensitivity'][0]['workload']}, {place(found['setup'])}: one assumption moved at a time"


SECTIONS = (
    ("Best choice", choices), ("Every setup at its best k", candidates), ("When speculation should be off", stops),
    ("Which assumption matters most", sensitivity), ("The other draft", others), ("Published H100 series", h100),
)  # fmt: skip


def tables(found: Found) -> str:
    """All sections that have rows."""
    parts = []
    for title, make in SECTIONS:
        heads, rows = make(found)
        if rows:
            parts.append(f"## {title}\n\n{markdown(heads, rows)}")
    return "\n\n".join([*parts, h100_sentence(found)])
