"""What kernels carry is declared: every attribute that any file assigns has its line in a class's `__init__`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import nki_kernels

FILES = sorted(Path(nki_kernels.__file__).parent.rglob("*.py"))


def assigned(tree: ast.AST) -> Iterator[str]:
    """The names of the attributes that code assigns."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def undeclared(sources: list[str]) -> set[str]:
    """Attributes that are assigned somewhere and declared in no `__init__`."""
    trees = [ast.parse(source) for source in sources]
    inits = [node for tree in trees for node in ast.walk(tree) if getattr(node, "name", "") == "__init__"]
    return {name for tree in trees for name in assigned(tree)} - {name for init in inits for name in assigned(init)}


def test_every_attribute_is_declared() -> None:
    assert len(FILES) > 20
    assert not undeclared([path.read_text() for path in FILES])


def test_one_that_is_hung_on_an_object_is_caught() -> None:
    """Negative control."""
    declared = "class Pack:\n    def __init__(self):\n        self.limit = None\n"
    assert not undeclared([declared, "def load(pack):\n    pack.limit = 3\n"])
    assert undeclared([declared, "def load(pack):\n    pack.zero = 0\n"]) == {"zero"}
