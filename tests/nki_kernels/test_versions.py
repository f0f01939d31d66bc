"""Every kernel is in README, table, tests and benchmark, and runs unmodified in both versions of NKI."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

import nki_kernels
from bench.kernels.cases import CASES
from model.nki.table import KERNELS
from nkisim.lint import lint
from tests.nki_kernels import test_recorded, test_refusals

PACKAGE = Path(nki_kernels.__file__).parent
README = (PACKAGE / "README.md").read_text(encoding="utf-8")
# launched by the device check only: tests/compile/test_device_check.py
PROBES = {"psum_chains_kernel", "sum_over_ranks_kernel"}


def rows() -> dict[str, list[str]]:
    """The cells of the README's table, by kernel."""
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in README.splitlines() if line.startswith("| `")]
    return {row[0].strip("`"): row for row in cells}


def jitted() -> dict[str, Path]:
    """The functions of the package with the decorator nki.jit, and their files."""
    files = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and any(ast.unparse(d) == "nki.jit" for d in node.decorator_list):
                files[node.name] = path
    return files


def test_no_kernel_is_missing() -> None:
    names = {f"{name}_kernel" for name in KERNELS}
    assert set(jitted()) == names | PROBES
    assert set(rows()) == set(KERNELS) == set(test_refusals.GOOD)
    assert {case.kernel.fn.__name__ for case in CASES} == names
    assert {bad[0] for bad in test_refusals.BAD} == set(KERNELS)
    # bits on one core and on two
    recorded = {(kernel, lnc) for kernel, _, lnc in test_recorded.CASES.values()}
    assert recorded == {(name, lnc) for name in KERNELS for lnc in (1, 2)}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_has_a_card_a_law_and_a_file(name: str) -> None:
    _, law, _, _, file = rows()[name]
    kernel = KERNELS[name]
    assert kernel.fn.__name__ == f"{name}_kernel"
    assert jitted()[f"{name}_kernel"] == PACKAGE / file.strip("`")
    module = importlib.import_module(kernel.fn.__module__)
    assert callable(getattr(module, name))
    assert all(word in (module.__doc__ or "") for word in ("Layouts:", "Cost:", "Launched by"))
    for path, function in re.findall(r"`(\w+\.law)\.(\w+)`", law):
        assert callable(getattr(importlib.import_module(f"nki_kernels.{path}"), function))


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_has_the_same_bits_where_python_traces_it(name: str) -> None:
    # the first case of each kernel is small
    case = next(case for case, (kernel, *_) in test_recorded.CASES.items() if kernel == name)
    assert test_recorded.measure(case, "0.7")[0] == test_recorded.recorded()[case][0]


@pytest.mark.parametrize("version", ["0.6", "0.7"])
def test_the_linter_accepts_the_package(version: str) -> None:
    assert lint([PACKAGE], version) == ([], len(KERNELS) + len(PROBES))


def undeclared(sources: Iterable[str]) -> set[str]:
    """Attributes that are assigned somewhere and declared in no `__init__`."""
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]

    def assigned(part: Iterable[ast.AST]) -> set[str]:
        return {n.attr for n in part if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}

    inits = [n for node in nodes if getattr(node, "name", "") == "__init__" for n in ast.walk(node)]
    return assigned(nodes) - assigned(inits)


def test_every_attribute_is_declared() -> None:
    """Every attribute is declared in a class's `__init__`, whichever file assigns it."""
    assert not undeclared(path.read_text() for path in PACKAGE.rglob("*.py"))
    # negative control
    declared = "class Pack:\n    def __init__(self):\n        self.limit = None\n"
    assert undeclared([declared, "def load(pack):\n    pack.limit = pack.zero = 0\n"]) == {"zero"}
