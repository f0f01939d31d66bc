"""Recipes: the hash of everything that a file of a bundle is made of: values, the code that makes it, its packages."""

import importlib.metadata
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trnspec.bundle.manifest import sha256_of

ROOT = Path(__file__).resolve().parent.parent
# code that traces a graph; a NEFF's recipe has the graph's digest, so an edit that changes no graph compiles none
TRACED_BY = ("compile/graph", "model", "nki_kernels", "trnspec/bundle")
TRACED_WITH = ("torch", "torchax", "jax", "jaxlib")
# code that reads, cuts, packs and writes weights
CUT_BY = (
    "compile/bundle/cutting.py", "trnspec/bundle/checkpoint.py", "trnspec/bundle/shards.py", "model/weights.py",
    "model/dtypes.py", "model/fp8.py", "model/parallel.py", "model/drafters", "model/nki/fused_layer.py",
    "nki_kernels/layer/pack_weights.py",
)  # fmt: skip


def trace_code() -> list[Any]:
    """The part of a graph's recipe that all graphs of a build have."""
    return [versions(TRACED_WITH), sources(TRACED_BY)]


def cut_code() -> list[Any]:
    """The part of a shard's recipe that all shards of a build have."""
    return [versions(["torch"]), sources(CUT_BY)]


def sources(entries: Iterable[str]) -> dict[str, str]:
    """Path -> digest of every Python file that the entries name; a folder names all files below it."""
    files = (file for entry in entries for file in (ROOT / entry, *(ROOT / entry).rglob("*.py")) if file.is_file())
    return {file.relative_to(ROOT).as_posix(): sha256_of(file) for file in files}


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Package -> its installed version."""
    return {name: importlib.metadata.version(name) for name in packages}
