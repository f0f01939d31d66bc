"""Every refusal is reached by a kernel that breaks its rule; the twin without the mistake runs."""

from __future__ import annotations

import ast
from pathlib import Path
from types import TracebackType

import pytest

import nkisim
from nkisim import errors
from nkisim.ranks import simulate_ranks
from tests.nkisim import (
    faults_engines,
    faults_memory,
    refusals_ranks,
    refusals_tensor_dma,
    refusals_vector,
    refusals_views,
)
from tests.nkisim.faults import CASES
from tests.nkisim.harness import out, run, tile
from tests.nkisim.refusals import REFUSALS, Body, Refusal

PACKAGE = Path(nkisim.__file__).parent
# where the laws of instructions are; the target's are in test_launch.py
SHARED = ("rules", "lanes", "plan", "transfer", "access", "gather", "views", "indexing", "patterns", "instruction")
FOLDERS = ("isa", "language", "collectives")
FILES = [*(p for f in FOLDERS for p in PACKAGE.glob(f"{f}/*.py")), *(PACKAGE / f"{name}.py" for name in SHARED)]
ELSEWHERE = {"target.py"}
# rows of several instructions
GROUPS = {"random numbers", "registers", "two cores", "one core", "ranks", "views", "creation", "language"}
# two ranks of one core each, instead of so many cores
RANKS = -2
Site = tuple[str, int]


def broken(body: Body, bad: bool, cores: int) -> None:
    def kernel() -> object:
        body(bad)
        return out(tile()) if cores == 1 else None

    if cores == RANKS:
        simulate_ranks(kernel, 2)([(), ()])
    else:
        run(kernel, lnc=cores)


def cores_of(row: Refusal) -> int:
    return {"two cores": 2, "ranks": RANKS}.get(row.op, 1)


def raised_at(trace: TracebackType | None) -> Site:
    """Return the line that refused: the innermost one, or the caller of `refuse`."""
    sites = []
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_name != "refuse":
            sites.append((Path(code.co_filename).name, trace.tb_lineno))
        trace = trace.tb_next
    return sites[-1]


@pytest.mark.filterwarnings("ignore::nkisim.errors.NkiSimWarning")
@pytest.mark.parametrize("row", REFUSALS, ids=[f"{i}-{r.op}-{r.law.__name__}" for i, r in enumerate(REFUSALS)])
def test_rule(row: Refusal) -> None:
    broken(row.body, False, cores_of(row))
    with pytest.raises(row.law) as caught:
        broken(row.body, True, cores_of(row))
    assert type(caught.value) is row.law
    assert caught.value.op.startswith(row.op) or row.op in GROUPS


def refusing_lines() -> set[Site]:
    """Return every line of the instructions that refuses: a call of refuse, or a raise."""
    found = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            called = isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "refuse"
            if (called or (isinstance(node, ast.Raise) and node.exc is not None)) and path.name not in ELSEWHERE:
                found.add((path.name, node.lineno))
    return found


@pytest.mark.filterwarnings("ignore::nkisim.errors.NkiSimWarning")
def test_no_refusal_is_left_out() -> None:
    reached = set()
    launches = [lambda r=r: broken(r.body, True, cores_of(r)) for r in REFUSALS]
    launches += [lambda body=body: run(lambda: body(True)) for _, body in CASES.values()]
    for launch in launches:
        with pytest.raises(errors.LawError) as caught:
            launch()
        reached.add(raised_at(caught.value.__traceback__))
    missing = sorted(refusing_lines() - reached)
    assert not missing, missing


def test_the_tables_are_read() -> None:
    assert {faults_engines.two_psum_inputs, faults_memory.unwritten_tile} <= {body for _, body in CASES.values()}
    assert refusals_vector.NEWER.keys() <= {r.op for r in REFUSALS}
    assert refusals_tensor_dma.ONE_CORE[0] is errors.BadLaunch
    assert refusals_views.cube.__module__ in {r.body.__module__ for r in REFUSALS}
    assert refusals_ranks.me.__module__ in {r.body.__module__ for r in REFUSALS}
