"""The summary as lines for a terminal."""

from __future__ import annotations

from typing import Any


def milliseconds(estimate: list[float] | None, digits: int = 2) -> str:
    """A figure in milliseconds with its interval, or a dash."""
    if estimate is None:
        return "-"
    value, low, high = (1e3 * v for v in estimate)
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def times(estimate: list[float] | None) -> str:
    """A ratio with its interval, or a dash."""
    return "-" if estimate is None else "{:.2f}x [{:.2f}, {:.2f}]".format(*estimate)


def table(summary: dict[str, Any]) -> str:
    """Medians by prompt and endpoint, the speedups if the gate allows them, and what the gate found."""
    lines = ["| prompt | variant | n | errors | ITL p50 ms | TTFT p50 ms | E2E p50 ms | tokens/s | acceptance length |"]
    lines.append("|" + "---|" * 9)
    for row in summary["rows"]:
        figures = [milliseconds(row.get(name, {}).get("p50")) for name in ("itl_s", "ttft_s", "e2e_s")]
        length = f"{row['acceptance']['length']:.2f}" if "acceptance" in row else "-"
        cells = [row["case"], row["variant"], row["requests"], row["errors"], *figures]
        lines.append("| " + " | ".join(map(str, [*cells, f"{row['tokens_per_second']:.1f}", length])) + " |")
    for speedup in summary["speedup"]:
        lines.append(
            f"{speedup['case']}: baseline over speculative, p50: ITL {times(speedup.get('itl_s'))}, "
            f"E2E {times(speedup.get('e2e_s'))}, TTFT {times(speedup.get('ttft_s'))}"
        )
    kinds = sorted({kind for row in summary["rows"] for kind in row["error_kinds"]})
    lines += [f"error: {kind}" for kind in kinds[:5]]
    lines += summary["notes"] + [summary["gate"]["sentence"]]
    lines += [_sentence(d) for d in summary["gate"]["divergences"][:1]]
    return "\n".join(lines)


def _sentence(found: dict[str, Any]) -> str:
    (a, b), (left, right) = found["variants"], found["continuations"]
    return (
        f"first divergence, {found['case']}: at {found['unit']} {found['position']}, after {found['before']!r}\n"
        f"  {a}: {left!r}\n  {b}: {right!r}"
    )
