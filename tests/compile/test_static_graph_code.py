"""What graph code may not say: torch_xla lowers it wrong, or Trainium's compiler does not take it.

The real tracer is asked by `make xla-check`; this reads the source, and so runs always.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from compile.recipes import ROOT, TRACED_BY, sources

# what is traced in torch; the kernels' launches and JAX's own primitives are not
_OTHER = ("model/nki/custom_calls.py", "model/dtypes.py")
_OF_MODEL = sorted(f for f in sources(TRACED_BY) if f.startswith("model/") and f not in _OTHER)
# a step's host asks this of numpy arrays, to pick the graph
HOST = ("graph",)
GRAPH_CODE = [*_OF_MODEL, "compile/neuron/module.py"]


def faults(source: str) -> Iterator[str]:
    """One word for each thing that no graph may be made of."""
    for node in _of_graphs(ast.parse(source)):
        if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.LShift | ast.RShift):
            if not _number(node.left if isinstance(node, ast.BinOp) else node.target):
                yield "shift"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            given = [*node.args, *(k.value for k in node.keywords)]
            dtype = [a for a in given if isinstance(a, ast.Attribute) and ast.unparse(a).startswith("torch.")]
            if node.func.attr == "view" and dtype:
                yield "view(dtype)"
            if node.func.attr.endswith("_shift") and any(isinstance(a, ast.Constant) for a in given):
                yield "shift by a number"
            if node.func.attr in ("cond", "while_loop", "item", "tolist", "nonzero"):
                yield node.func.attr
        elif isinstance(node, ast.If | ast.IfExp | ast.While):
            asked = [n for n in ast.walk(node.test) if isinstance(n, ast.Call) and ast.unparse(n.func).endswith(".any")]
            if asked:
                yield "branch"


def _of_graphs(node: ast.AST) -> Iterator[ast.AST]:
    """Every node but those of the host's own functions."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.FunctionDef) and child.name in HOST):
            yield from _of_graphs(child)


def _number(node: ast.expr) -> bool:
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


def test_the_list_is_of_files_that_exist() -> None:
    assert all((Path(ROOT) / file).is_file() for file in GRAPH_CODE)
    assert "model/threefry.py" in GRAPH_CODE
