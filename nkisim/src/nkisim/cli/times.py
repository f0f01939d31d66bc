"""Simulated times as a file, and the difference of two such files as a table for a pull request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nkisim
from nkisim.cli.launches import Launch
from nkisim.command import read_json
from nkisim.timeline.compiler_model import COMPILER, ORDER, CompilerModel
from nkisim.timeline.drawing import clock
from nkisim.timeline.schedule import Schedule, schedule

FORMAT = "nkisim-times-1"
FIGURES = (
    "latency_ns", "low_ns", "high_ns", "likely_low_ns", "likely_high_ns", "order", "program_order_ns", "launch_ns",
    "profiled_launch_ns", "host_dispatch_ns", "roofline_ns", "roofline_share", "bound", "hbm_bytes",
)  # fmt: skip


def row(launch: Launch, numerics: bool = True, compiler: CompilerModel = COMPILER) -> dict[str, Any]:
    """One launch's times and its bound."""
    events = launch.run(recording=True, numerics=numerics).recording.events
    return {"kernel": launch.name, "instructions": len(events), **figures(schedule(events, compiler=compiler))}


def figures(result: Schedule) -> dict[str, Any]:
    """The numbers of a schedule that a file keeps, in nanoseconds."""
    same = {name: getattr(result, name) for name in FIGURES}
    return {**same, "reordered_ns": result.pipelined_ns, "critical_ns": result.waits_ns}


def to_json(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The content of a times file; no time of a row includes a launch; the times of a launch are in the row too."""
    about = {"format": FORMAT, "source": "simulated", "launch": "not included", "nkisim": nkisim.__version__}
    return {**about, "chip": "trn2", "times": list(rows)}


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a times file.

    Raises:
        ValueError: the file is not one.
    """
    data = read_json(path, "write it with nkisim time ... --json")
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f"{path} is no file of times ({FORMAT}); write it with nkisim time ... --json")
    rows: list[dict[str, Any]] = data["times"]
    return rows


def text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Times for people."""
    blocks = []
    for r in rows:
        path = ", ".join(f"{cause} {ns / r['latency_ns']:.0%}" for cause, ns in _largest(r["critical_ns"]))
        blocks.append(
            f"{r['kernel']}\n"
            f"  {clock(r['latency_ns'])} simulated on trn2 ({ORDER[r['order']]}), without a launch: likely "
            f"{clock(r['likely_low_ns'])} to {clock(r['likely_high_ns'])}, possible {clock(r['low_ns'])} to "
            f"{clock(r['high_ns'])}\n"
            f"  as written {clock(r['program_order_ns'])}, reordered {clock(r['reordered_ns'])}\n"
            f"  a launch adds {clock(r['profiled_launch_ns'])} in a profile, {clock(r['launch_ns'])} once for a "
            f"graph, and {clock(r['host_dispatch_ns'])} on the host\n"
            f"  {r['roofline_share']:.0%} of the roofline ({r['bound']}), {r['hbm_bytes'] / 2**20:,.2f} MiB of HBM "
            f"traffic, {r['instructions']:,} instructions\n"
            f"  critical path: {path}"
        )
    return "\n".join(blocks)


def _largest(critical: Mapping[str, float], count: int = 4) -> list[tuple[str, float]]:
    return sorted(critical.items(), key=lambda item: -item[1])[:count]


def difference(base: Sequence[Mapping[str, Any]], head: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each kernel of the two files: its latency before and after, and whether the old band holds the new one."""
    old, new = ({r["kernel"]: r for r in rows} for rows in (base, head))
    rows: list[dict[str, Any]] = []
    for name in dict.fromkeys([*old, *new]):
        a, b = old.get(name), new.get(name)
        r: dict[str, Any] = {"kernel": name, "base_ns": a and a["latency_ns"], "head_ns": b and b["latency_ns"]}
        if a and b:
            change = b["latency_ns"] / a["latency_ns"] - 1
            r |= {"change": change, "inside_band": a["low_ns"] <= b["latency_ns"] <= a["high_ns"]}
        rows.append(r)
    return rows


def verdict(r: Mapping[str, Any]) -> str:
    """The outcome of one kernel, in a few words."""
    if r["base_ns"] is None:
        return "new"
    if r["head_ns"] is None:
        return "gone"
    if r["base_ns"] == r["head_ns"]:
        return "same"
    side = "slower" if r["change"] > 0 else "faster"
    return f"{r['change']:+.1%}, {side}{', inside of the band' if r['inside_band'] else ''}"


def _cells(r: Mapping[str, Any]) -> tuple[str, str, str, str]:
    before, after = (clock(r[key]) if r[key] is not None else "" for key in ("base_ns", "head_ns"))
    return r["kernel"], before, after, verdict(r)


def difference_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The difference as a comment on a pull request."""
    changed = sum(verdict(r) != "same" for r in rows)
    lines = [
        f"### Kernel latency: {changed} of {len(rows)} changed",
        "",
        "| kernel | base | head | change |",
        "|---|---:|---:|---|",
        *("| `{}` | {} | {} | {} |".format(*_cells(r)) for r in rows),
        "",
        f"Simulated by nkisim {nkisim.__version__} for trn2, not measured, without a launch. A change inside of the "
        "band may not show on a chip.",
    ]
    return "\n".join(lines)


def difference_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """The difference for a terminal."""
    lines = [f"{name}: {a or 'absent'} -> {b or 'absent'} ({word})" for name, a, b, word in map(_cells, rows)]
    return "\n".join([*lines, "simulated on trn2, without a launch"])
