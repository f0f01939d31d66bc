"""`python -m bench.attention_path`: where each microsecond of verify_attention goes at S = 1024, on one core and two.

The first table is the critical path by stage, and what of it is data; the rest are fixed costs of instructions that
wait for each other. The second has the same launch with one law lifted: what that law costs in all. The bound and its
parts are those of `bench.attention_bound`.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import nkisim
from bench.attention_bound import SHARD, bound_ns
from bench.kernels.cases import CASES
from bench.tune.text import markdown
from model.errors import run_cli
from nkisim.event import Event
from nkisim.timeline.chip import Chip
from nkisim.timeline.costs.dma import is_store
from nkisim.timeline.schedule import Schedule, schedule
from nkisim.timeline.trn2 import TRN2

CASE = f"verify_attention_kernel/B4-H2-G1-S{SHARD.slots}-N8-D128-bf16"
CORES = (1, 2)
# small enough to count as nothing
_NOTHING = 1e-3
LIFTED: tuple[tuple[str, dict[str, float]], ...] = (
    ("as it is", {}),
    ("Tensor Engine always at full clock", {"tensor_throttle_share": 1.0}),
    ("Vector Engine two columns a cycle", {"vector_base_elements": 2.0}),
    ("Scalar Engine at twice the clock", {"scalar_ghz": 2.4}),
    ("no semaphores", {"semaphore_ns": _NOTHING, "dma_semaphore_ns": _NOTHING}),
    ("no time for bytes", {"dma_bytes_per_ns": 1e6, "hbm_bytes_per_ns": 1e6}),
)


def events(cores: int) -> Sequence[Event]:
    """The launch's events on so many cores."""
    name = CASE + f"-lnc{cores}" * (cores > 1)
    case = next(case for case in CASES if case.full_name == name)
    policy = nkisim.Policy(recording=True, numerics=False)
    launch: Sequence[Event] = nkisim.run(case.kernel[cores], case.arguments(), policy=policy).recording.events
    return launch


@cache
def _functions(path: str) -> tuple[tuple[int, int, str], ...]:
    """First and last line and name of each function of a file."""
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return tuple((node.lineno, node.end_lineno or node.lineno, node.name) for node in nodes)


def stage(event: Event) -> str:
    """The engine and the function of the kernel that an event is of; transfers are loads or stores."""
    if event.engine == "dma":
        return "store" if is_store(event) else "load"
    path, line = event.line
    return f"{next(name for first, last, name in _functions(path) if first <= line <= last)}, {event.engine}"


def path_us(launch: Sequence[Event], timed: Schedule) -> dict[str, tuple[float, float]]:
    """Microseconds of the critical path by stage, and which of them are data, in the order of the path."""
    stages: dict[str, tuple[float, float]] = {}
    for event, parts in timed.critical:
        whole, data = stages.get(stage(launch[event]), (0.0, 0.0))
        whole += sum(ns for _, ns in parts) / 1e3
        data += sum(ns for cause, ns in parts if cause.endswith("data")) / 1e3
        stages[stage(launch[event])] = whole, data
    return stages


def without(**laws: float) -> Chip:
    """The chip with other values for some constants."""
    values: dict[str, Any] = {
        name: replace(getattr(TRN2, name), value=value, low=None, high=None) for name, value in laws.items()
    }
    return replace(TRN2, **values)


def main() -> None:
    """Print both tables."""
    launches = [events(cores) for cores in CORES]
    timed = [schedule(launch, band=False) for launch in launches]
    paths = [path_us(launch, one) for launch, one in zip(launches, timed, strict=True)]
    names = list(dict.fromkeys(name for path in paths for name in path))
    lines = [[name, *(f"{x:.2f}" for path in paths for x in path.get(name, (0.0, 0.0)))] for name in names]
    totals = [f"{x:.2f}" for path in paths for x in map(sum, zip(*path.values(), strict=True))]
    lines += [["all", *totals]]
    bounds = [f"{bound_ns(SHARD, cores) / 1e3:.2f}" for cores in CORES]
    lines += [["the bound", bounds[0], "", bounds[1], ""]]
    print("All simulated, us:\n\n" + markdown(["stage", "one core", "data", "two cores", "data"], lines))
    lifted = [
        [text, *(f"{schedule(launch, without(**laws), band=False).latency_ns / 1e3:.2f}" for launch in launches)]
        for text, laws in LIFTED
    ]
    print("\n" + markdown(["law", "one core", "two cores"], lifted))


if __name__ == "__main__":
    run_cli(main)
