"""What graph code may not say: torch_xla lowers it wrong, or Trainium's compiler does not take it. This reads source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# what runs on the host: NumPy's bits, launches served at once, JAX's own primitives, the command
_HOST = ("dtypes.py", "generate.py", "simulated.py", "custom_calls.py", "on_device.py")
_MODEL = sorted(f for f in (ROOT / "model").rglob("*.py") if f.name not in _HOST)
GRAPH_CODE = [f.relative_to(ROOT).as_posix() for f in (*_MODEL, ROOT / "compile/nxd/module.py")]
# methods by which a host picks a graph
HOST_METHODS = ("graph",)


def faults(source: str) -> Iterator[str]:
    """One word for each thing that no graph may be made of."""
    for node in _of_graphs(ast.parse(source)):
        if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.LShift | ast.RShift):
            if not _is_number(node.left if isinstance(node, ast.BinOp) else node.target):
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


def _of_graphs(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.FunctionDef) and child.name in HOST_METHODS):
            yield from _of_graphs(child)


def _is_number(node: ast.expr) -> bool:
    """A literal, or `digit` of a comprehension over literals: the shift is Python's."""
    return isinstance(node, ast.Constant) or (isinstance(node, ast.Name) and node.id == "digit")


@pytest.mark.parametrize("file", GRAPH_CODE)
def test_no_graph_code_holds_what_the_device_cannot_take(file: str) -> None:
    assert list(faults((ROOT / file).read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("x = (x << r) | (x >> 3)", "shift"),
        ("keys = x.view(torch.int32)", "view(dtype)"),
        ("keys = x.view(dtype=torch.int32)", "view(dtype)"),
        ("x <<= 3", "shift"),
        ("x = torch.bitwise_left_shift(x, 3)", "shift by a number"),
        ("y = ops.cond(p, a, b)", "cond"),
        ("y = a if noisy.any() else b", "branch"),
        ("n = x.item()", "item"),
    ],
)
def test_each_fault_is_seen(line: str, word: str) -> None:
    assert word in list(faults(line))
    assert list(faults("x = (1 << 24) * y.view(3, 4)")) == []
