"""Recipes: a file of a bundle is named by everything that makes it, and by nothing else.

A recipe is a hash over values (the plan of a graph, the identity of a checkpoint) and over the source files whose code
makes the file. The rest changes no byte of it: the command line, reports, the engine that will run it.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trnspec.bundle.manifest import canonical_hash, sha256_of

ROOT = Path(__file__).resolve().parent.parent
# code that runs while a step is traced; folders are read to the bottom
TRACED_BY = (
    "compile/graph", "model/asks.py", "model/attention.py", "model/backing.py", "trnspec/bundle/border.py",
    "trnspec/bundle/hlo.py", "model/cache.py", "model/config.py", "model/drafters", "model/dtypes.py",
    "model/filters.py", "model/nki/fused_layer.py",
    "model/graph_io.py", "model/halves.py", "model/kernels.py", "model/nki/backing.py", "model/nki/custom_calls.py",
    "model/nki/filter_floor.py", "model/nki/kernels.py", "model/nki/launches.py", "model/ops.py", "model/packing.py",
    "model/parallel.py", "model/qwen3.py", "model/rank_model.py", "model/rope.py",
    "model/rough_filters.py", "model/sampling.py", "model/scores.py", "model/speculative.py",
    "model/threefry.py", "model/window.py", "nki_kernels/layer/pack_weights.py", "nki_kernels/limits.py",
)  # fmt: skip
TRACED_WITH = ("torch", "torchax", "jax", "jaxlib")
# code that reads, cuts, packs and writes weights
CUT_BY = (
    "compile/bundle/cutting.py", "compile/bundle/shard_writer.py", "trnspec/bundle/blocks.py",
    "trnspec/bundle/checkpoint.py", "model/cut.py", "trnspec/bundle/shards.py", "model/weights.py",
    "model/drafters", "model/dtypes.py", "model/packing.py", "model/parallel.py", "nki_kernels/layer/pack_weights.py",
)  # fmt: skip
CUT_WITH = ("torch",)


def graph_recipe(*values: Any) -> str:
    """The recipe of a graph that is traced from these JSON values."""
    return canonical_hash([*values, _versions(TRACED_WITH), sources(TRACED_BY)])


def shard_recipe(*values: Any) -> str:
    """The recipe of a rank's weights that are cut as these JSON values say."""
    return canonical_hash([*values, _versions(CUT_WITH), sources(CUT_BY)])


def sources(entries: Iterable[str]) -> dict[str, str]:
    """Path -> digest of every Python file that the entries name, a folder with all that is below it."""
    found: dict[str, str] = {}
    for entry in entries:
        path = ROOT / entry
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            found[file.relative_to(ROOT).as_posix()] = sha256_of(file)
    return found


@functools.cache
def _versions(packages: tuple[str, ...]) -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in packages}
