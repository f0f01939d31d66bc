"""What graph code may not say, by its source: torch_xla lowers it wrong, or Trainium's compiler does not take it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from compile.recipes import ROOT

# what runs on the host: NumPy's bits, launches served at once, JAX primitives, the command
_HOST = ("dtypes.py", "generate.py", "table.py", "custom_calls.py")
GRAPH_CODE = [*(f for f in (ROOT / "model").rglob("*.py") if f.name not in _HOST), ROOT / "compile/nxd/module.py"]


def faults(node: ast.AST) -> Iterator[str]:
    """One word for each thing that no graph may be made of; a method `graph` is the host's."""
    if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.LShift | ast.RShift):
        left = node.left if isinstance(node, ast.BinOp) else node.target
        # of Python's integers: a literal, or a digit of a comprehension over literals
        if not isinstance(left, ast.Constant) and ast.unparse(left) != "digit":
            yield "shift"
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        given = [*node.args, *(k.value for k in node.keywords)]
        if node.func.attr == "view" and any(ast.unparse(a).startswith("torch.") for a in given):
            yield "view(dtype)"
        if node.func.attr.endswith("_shift") and any(isinstance(a, ast.Constant) for a in given):
            yield "shift by a number"
        if node.func.attr in ("cond", "while_loop", "item", "tolist", "nonzero"):
            yield node.func.attr
    elif isinstance(node, ast.If | ast.IfExp | ast.While) and ".any()" in ast.unparse(node.test):
        yield "branch"
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.FunctionDef) and child.name == "graph"):
            yield from faults(child)


def test_no_graph_code_holds_what_the_device_cannot_take() -> None:
    actual = {file.name: list(faults(ast.parse(file.read_text(encoding="utf-8")))) for file in GRAPH_CODE}
    assert {name: words for name, words in actual.items() if words} == {}


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("x = (x << r) | (x >> 3)", "shift"), ("x <<= 3", "shift"), ("keys = x.view(torch.int32)", "view(dtype)"),
        ("keys = x.view(dtype=torch.int32)", "view(dtype)"), ("n = x.item()", "item"),
        ("x = torch.bitwise_left_shift(x, 3)", "shift by a number"), ("y = ops.cond(p, a, b)", "cond"),
        ("y = a if noisy.any() else b", "branch"),
    ],
)  # fmt: skip
def test_each_fault_is_seen(line: str, word: str) -> None:
    assert word in list(faults(ast.parse(line)))
    assert list(faults(ast.parse("x = (1 << 24) * y.view(3, 4)"))) == []
