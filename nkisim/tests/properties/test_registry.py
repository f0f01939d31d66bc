"""Nothing is left out: every function that moves data has a property test."""

from __future__ import annotations

import json

import pytest

from nkisim import coverage
from registry import COVERED

# they move no data: loops, the launch grid, questions; the tests in laws/ and the manual's
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
    result: set[str] = set()
    for path in coverage.SIGNATURES.values():
        signatures = json.loads(path.read_text())
        implemented = coverage.report(signatures)["implemented"]
        result |= {n for n in signatures["modules"][module]["functions"] if f"{module}.{n}" in implemented}
    return {PREFIX[module] + n for n in result - NO_DATA[module]}


@pytest.mark.parametrize(("module", "minimum"), [("nki.isa", 40), ("nki.language", 80), ("nki.collectives", 11)])
def test_every_function_has_a_property_test(module: str, minimum: int) -> None:
    assert functions(module) - set(COVERED) == set()
    assert len(functions(module)) >= minimum


def test_no_property_test_names_a_function_that_does_not_exist() -> None:
    assert set(COVERED) - set().union(*(functions(m) for m in PREFIX)) == set()
