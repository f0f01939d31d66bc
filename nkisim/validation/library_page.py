"""The page of the vendor's kernels: coverage, error, bands and order by family, every row, and the refused ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nkisim.timeline.schedule import schedule
from validation.library import Recorded
from validation.outcome import Outcome, Summary, half_width, summary

HEAD = """# The vendor's kernels

Written by `python -m validation --library CHECKOUT --out validation/library.md`, CHECKOUT being one of
github.com/aws-neuron/nki-library. Its kernels run unmodified at the shapes of `library_rows.json`, at which AWS
measured them on trn2; three of them (`argsort_unstable`, `permute_routed_tokens`, `build_all_to_all_v_metadata`) are
in versions after d2ad3a5 (2026-04-13) only. Constants were fitted to these rows. Measured times are of one profiled
execution, so simulated ones have a profiled launch in them.
"""
# measured times below this are mostly launch
SMALL_US = 40.0


def library_page(outcomes: Sequence[Outcome], refused: Sequence[Recorded], recorded: Sequence[Recorded]) -> str:
    """The page as Markdown."""
    ordinary = sum(r.policy == "default" and r.events is not None for r in recorded)
    ran = f"{len(outcomes)} of {len(recorded)} rows run"
    parts = [
        HEAD,
        f"{ran}: {ordinary} by the default policy, {len(outcomes) - ordinary} by the vendor's.\n",
        families(outcomes),
        every_row(outcomes),
    ]
    if refused:
        lines = [f"* `{r.row.id}`: {r.refused}" for r in refused]
        parts.append("\nNot run:\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def families(outcomes: Sequence[Outcome]) -> str:
    """A line for each kernel, and for all rows and for those that are not mostly launch."""
    groups: dict[str, list[Outcome]] = {}
    for o in outcomes:
        groups.setdefault(o.row.group, []).append(o)
    listed: list[tuple[str, Sequence[Outcome]]] = sorted(groups.items())
    listed += [(f"of {SMALL_US:.0f} us and more", [o for o in outcomes if o.row.us >= SMALL_US]), ("all", outcomes)]
    lines = [
        "| kernel | rows | geometric mean error | in the likely band | its half width | in the possible band "
        "| its half width | pairs in order |",
        "|---|" + "---:|" * 7,
    ]
    lines += [_family(name, part, summary(part)) for name, part in listed if part]
    return "\n".join(lines) + "\n"


def _family(name: str, part: Sequence[Outcome], s: Summary) -> str:
    likely = half_width((o.likely_low, o.likely_high) for o in part)
    possible = half_width((o.low, o.high) for o in part)
    bands = f"{s.likely} | {likely:.0%} | {s.inside} | {possible:.0%}"
    return f"| {name} | {s.rows} | {s.error:.1%} | {bands} | {s.ordered} of {s.pairs} |"


def every_row(outcomes: Sequence[Outcome]) -> str:
    """A line for each row: both orders, and the band."""
    columns: tuple[tuple[str, Callable[[Outcome], str]], ...] = (
        ("row", lambda o: o.row.name),
        ("measured us", lambda o: f"{o.row.us:.1f}"),
        ("simulated us", lambda o: f"{o.us:.1f}"),
        ("in program order", lambda o: f"{o.program:.1f}"),
        ("reordered", lambda o: f"{o.pipelined:.1f}"),
        ("likely", lambda o: f"{o.likely_low:.1f} to {o.likely_high:.1f}{'' if o.likely else ' **no**'}"),
        ("possible", lambda o: f"{o.low:.1f} to {o.high:.1f}{'' if o.inside else ' **no**'}"),
        ("ratio", lambda o: f"{o.ratio:.2f}"),
    )
    lines = [f"| {' | '.join(name for name, _ in columns)} |", "|---|" + "---|" * (len(columns) - 1)]
    lines += [f"| {' | '.join(cell(o) for _, cell in columns)} |" for o in outcomes]
    return "\n".join(lines)


def unmeasured(recorded: Sequence[Recorded]) -> str:
    """A line for each call that nobody measured: its simulated time, without a launch."""
    lines = ["| call | us (simulated) |", "|---|---:|"]
    for r in recorded:
        us = r.refused if r.events is None else f"{schedule(r.events, band=False).latency_ns / 1e3:.1f}"
        lines.append(f"| {r.row.id} | {us} |")
    return "\n".join(lines)
