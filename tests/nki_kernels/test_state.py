"""What kernels carry is declared: every attribute that any file assigns has its line in a class's `__init__`."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

import nki_kernels


def undeclared(sources: Iterable[str]) -> set[str]:
    """Attributes that are assigned somewhere and declared in no `__init__`."""
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]

    def assigned(part: Iterable[ast.AST]) -> set[str]:
        return {n.attr for n in part if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}

    inits = [n for node in nodes if getattr(node, "name", "") == "__init__" for n in ast.walk(node)]
    return assigned(nodes) - assigned(inits)


def test_every_attribute_is_declared() -> None:
    assert not undeclared(path.read_text() for path in Path(nki_kernels.__file__).parent.rglob("*.py"))
    # negative control
    declared = "class Pack:\n    def __init__(self):\n        self.limit = None\n"
    assert undeclared([declared, "def load(pack):\n    pack.limit = pack.zero = 0\n"]) == {"zero"}
