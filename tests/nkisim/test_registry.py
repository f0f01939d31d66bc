"""Nothing is left out: every instruction has a property test, every law a fault and its allowed twin."""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path

import pytest

from nkisim import coverage, errors
from tests.nkisim.covered import COVERED
from tests.nkisim.faults import CASES, LAUNCHES

for _module in Path(__file__).parent.glob("*_*.py"):
    if _module.stem.startswith(("test_properties", "faults_")):
        importlib.import_module(f"tests.nkisim.{_module.stem}")

# they move no data: loops, the launch grid, questions; test_launch.py, test_two_cores.py and the manual's
# examples check what they do
NO_DATA = {
    "nki.isa": {"get_nc_version", "get_nc_sub_version"},
    "nki.collectives": set(),
    "nki.language": {
        "affine_range", "sequential_range", "static_range", "dynamic_range", "fori_loop", "while_loop", "ds",
        "no_reorder", "program_id", "num_programs", "program_ndim", "device_print", "is_hbm", "is_on_chip",
        "is_psum", "is_sbuf",
    },
}  # fmt: skip
PREFIX = {"nki.isa": "", "nki.language": "nl.", "nki.collectives": "ncc."}


def functions(module: str) -> set[str]:
    """The functions of a module that exist on trn2, from the list of what is implemented, as tests name them."""
    signatures = json.loads(coverage.SIGNATURES.read_text())
    implemented = coverage.report(signatures)["implemented"]
    found = {n for n in signatures["modules"][module]["functions"] if f"{module}.{n}" in implemented}
    return {PREFIX[module] + n for n in found - NO_DATA[module]}


@pytest.mark.parametrize(("module", "least"), [("nki.isa", 40), ("nki.language", 80), ("nki.collectives", 11)])
def test_every_function_has_a_property_test(module: str, least: int) -> None:
    assert functions(module) - set(COVERED) == set()
    assert len(functions(module)) >= least


def test_no_property_test_names_a_function_that_does_not_exist() -> None:
    assert set(COVERED) - set().union(*(functions(m) for m in PREFIX)) == set()


def test_every_law_has_a_fault_and_a_twin() -> None:
    laws = {c for c in vars(errors).values() if inspect.isclass(c) and issubclass(c, errors.LawError)}
    planted = {law for law, _ in (CASES | LAUNCHES).values()}
    assert laws - planted == {errors.LawError}
