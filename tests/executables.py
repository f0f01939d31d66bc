"""Traces and compiled graphs on disk, shared by the workers of a test session and the processes that they start.

A trace is named by its spec and graph. Executables are in JAX's persistent cache, as with JAX_COMPILATION_CACHE_DIR.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from pathlib import Path

import jax
import pytest

import compile.build
from compile.graph.trace import lower_graph
from model.graph_spec import GraphSpec
from trnspec.bundle.spec import BundleSpec

_CACHE = {
    "jax_compilation_cache_dir": "",
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


def share(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Trace and compile each graph once in a session; a test of tracing calls `lower_graph` itself."""
    folder.mkdir(exist_ok=True)
    for option, value in (_CACHE | {"jax_compilation_cache_dir": str(folder / "xla")}).items():
        jax.config.update(option, value)
        patch.setenv(option.upper(), str(value))

    def traced(spec: BundleSpec, graph: GraphSpec) -> bytes:
        # the models' names do not change a graph
        unnamed = dataclasses.replace(spec, target="", draft="")
        file = folder / hashlib.sha256(repr((unnamed, graph)).encode()).hexdigest()
        if not file.exists():
            temporary = file.with_suffix(f".{os.getpid()}")
            temporary.write_bytes(lower_graph(spec, graph))
            temporary.replace(file)
        return file.read_bytes()

    patch.setattr(compile.build, "lower_graphs", lambda spec, graphs: ((g, traced(spec, g)) for g in graphs))
