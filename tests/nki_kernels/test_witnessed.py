"""Every instruction that a kernel of ours uses is one that nkisim's witness compares with AWS's simulator."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import nki_kernels

PACKAGE = Path(nki_kernels.__file__).parent
PAGE = Path(__file__).parents[2] / "nkisim/docs/witness.md"


def instructions(text: str) -> set[str]:
    """The functions of `nisa` that a source calls."""
    calls = (node.func for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    of_nisa = (f for f in calls if isinstance(f, ast.Attribute) and isinstance(f.value, ast.Name))
    return {f.attr for f in of_nisa if f.value.id == "nisa"}  # type: ignore[attr-defined]


def test_the_witness_compares_every_instruction_that_kernels_use() -> None:
    files = list(PACKAGE.rglob("*.py"))
    used = set().union(*(instructions(file.read_text(encoding="utf-8")) for file in files))
    compared = set(re.findall(r"^\| `(\w+)` \|", PAGE.read_text(encoding="utf-8"), re.M))
    assert len(used) > 15
    assert used - compared == set()
    # calls through a different name would not be seen
    assert not [file for file in files if re.search(r"from nki\.isa import|import nki\.isa$", file.read_text())]


def test_an_instruction_that_the_page_lacks_is_seen() -> None:
    assert instructions("import nki.isa as nisa\nnisa.dma_copy(dst=nisa.iota)\nnisa.nope()") == {"dma_copy", "nope"}
