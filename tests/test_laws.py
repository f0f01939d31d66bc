"""tests/LAWS.md names tests that exist, each law's home in the fast set."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "tests/LAWS.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and "::" in line
]


def marks(node_id: str) -> set[str]:
    """The marks of a test function by its decorators and its module; KeyError if there is no such function."""
    path, name = node_id.split("::")
    module = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    functions = {n.name: n for n in module.body if isinstance(n, ast.FunctionDef)}
    # marks of single cases are in `parametrize`
    of_function = (re.match(r"pytest\.mark\.(\w+)", ast.unparse(d)) for d in functions[name].decorator_list)
    of_module = (ast.unparse(n) for n in module.body if isinstance(n, ast.Assign) and "pytestmark" in ast.unparse(n))
    return {m[1] for m in of_function if m} | {m for n in of_module for m in re.findall(r"pytest\.mark\.(\w+)", n)}


@pytest.mark.parametrize("row", ROWS, ids=[row[0][:40] for row in ROWS])
def test_a_law_has_a_fast_home_and_its_second_look_exists(row: list[str]) -> None:
    law, home, second, fault = row
    assert law
    assert fault
    assert "slow" not in marks(home.strip("`"))
    for node_id in re.findall(r"`([^`]+::[^`]+)`", second):
        marks(node_id)


def test_there_are_laws() -> None:
    assert len(ROWS) >= 15
    with pytest.raises(KeyError):
        marks("tests/test_laws.py::test_none")
