"""Every refusal is reached by a kernel that breaks its rule; the twin without the mistake runs."""

from __future__ import annotations

import ast
import inspect
import warnings
from pathlib import Path
from types import TracebackType

import pytest

import nkisim
import nkisim.isa as nisa
import nkisim.language as nl
from harness import out, run, tile
from nkisim import errors
from nkisim.ranks import simulate_ranks
from refusals import memory
from registry import REFUSALS, Refusal

PACKAGE = Path(nkisim.__file__).parent
# where the laws of instructions are; the target's are in test_launch.py, and statement.py has `refuse` itself
FOLDERS = ("isa", "language", "collectives")
SHARED = ("core/access", "core/gather", "memory/views", "memory/indexing", "memory/patterns")
FILES = [*(p for f in FOLDERS for p in PACKAGE.glob(f"{f}/*.py")), *(PACKAGE / f"{name}.py" for name in SHARED)]
ELSEWHERE = {"isa/target.py", "isa/statement.py"}
# rows of several instructions
GROUPS = {
    "random numbers", "registers", "scalars", "grids", "two cores", "one core", "ranks", "views", "creation",
    "language", "memory",
}  # fmt: skip
# two ranks of one core each, instead of so many cores
RANKS = -2
Site = tuple[str, int]
quiet = pytest.mark.filterwarnings("ignore::nkisim.errors.NkiSimWarning")


def name_of(row: Refusal) -> str:
    return f"{REFUSALS.index(row)}-{row.op}-{row.law.__name__}"


def broken(row: Refusal, bad: bool, reported: str = "") -> None:
    """Run a row with its mistake or without; what is only reported to fail is refused by the policy strict."""
    reported = reported or ("raise" if row.law is errors.ReportedFault else "warn")
    cores = {"two cores": 2, "ranks": RANKS}.get(row.op, 1)

    def kernel() -> object:
        result = row.body(bad)
        if row.how == "kernel":
            return result
        if bad and isinstance(result, nl.NkiTensor):
            # a view is judged when an instruction takes it
            nisa.dma_copy(dst=result, src=result)
        return out(tile()) if cores == 1 else None

    if row.how == "host":
        row.body(bad)
    elif cores == RANKS:
        simulate_ranks(kernel, 2, nkisim.Policy(nki=row.nki))([(), ()])
    else:
        run(kernel, lnc=cores, nki=row.nki, reported=reported)


def site(path: str, line: int) -> Site:
    return Path(path).relative_to(PACKAGE).as_posix(), line


def raised_at(trace: TracebackType | None) -> Site:
    """Return the line that refused: the innermost one, or the caller of `refuse`."""
    sites = []
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_name != "refuse" and code.co_filename.startswith(str(PACKAGE)):
            sites.append(site(code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    return sites[-1]


@quiet
@pytest.mark.parametrize("row", REFUSALS, ids=name_of)
def test_the_mistake_is_refused_by_name_and_its_twin_passes(row: Refusal) -> None:
    broken(row, False)
    with pytest.raises(row.law) as caught:
        broken(row, True)
    assert type(caught.value) is row.law
    if row.how == "call":
        assert caught.value.op.startswith(row.op) or row.op in GROUPS
    if row.how == "kernel" and row.law not in (errors.SbufFull, errors.PsumFull, errors.BadOutput):
        assert caught.value.line is None or caught.value.line[0].endswith(".py")


@pytest.mark.parametrize("row", [row for row in REFUSALS if row.law is errors.ReportedFault], ids=name_of)
def test_a_report_warns_once_by_default(row: Refusal) -> None:
    for bad in (False, True):
        with warnings.catch_warnings(record=True) as recorded:
            warnings.simplefilter("always")
            broken(row, bad, "warn")
        reported = [str(w.message) for w in recorded if w.category is errors.Reported]
        assert len(reported) == bad
        assert all("ask a device" in text for text in reported)


def refusing_lines() -> set[Site]:
    """Return every line of the instructions that refuses: a call of refuse, or a raise."""
    result = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            called = isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "refuse"
            if called or (isinstance(node, ast.Raise) and node.exc is not None):
                result.add(site(str(path), node.lineno))  # type: ignore[attr-defined]
    return {(path, line) for path, line in result if path not in ELSEWHERE}


@quiet
def test_no_refusal_is_left_out() -> None:
    reached = set()
    for row in REFUSALS:
        with pytest.raises(errors.LawError) as caught:
            broken(row, True)
        reached.add(raised_at(caught.value.__traceback__))
    missing = sorted(refusing_lines() - reached)
    assert not missing, missing


def test_every_law_has_a_fault_and_a_twin() -> None:
    laws = {c for c in vars(errors).values() if inspect.isclass(c) and issubclass(c, errors.LawError)}
    assert laws - {row.law for row in REFUSALS} == {errors.LawError}


def test_messages_say_what_where_and_what_is_allowed() -> None:
    with pytest.raises(errors.UnwrittenRead) as caught:
        run(lambda: memory.unwritten_tile(True))
    text = str(caught.value)
    assert "dma_copy: src reads 128 of 1024 elements of sbuf." in text
    assert "allocated at" in text
    assert "refusals/memory.py" in text
