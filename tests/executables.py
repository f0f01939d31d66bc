"""Traces and compiled graphs of the test session on disk, shared by its workers: each graph is made once.

A trace is named by its spec and graph, an executable by the digest of everything that compiling reads: the proto, the
weights' form, the options, the number of devices, the compiler's version and the code of the seam. Only tests use
this: a bundle has no executables. A test that changes what is traced calls `compile.graph.trace.lower_graph`, and one
that changes how a graph is compiled `COMPILE`.

Tests compile with the options of `tests/quick.py`. A module whose subject is the bits of the released code has the mark
`released_code`, and then the options are the product's.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import os
from pathlib import Path
from typing import Any

import jaxlib
import pytest

import compile.build
from compile.graph.trace import lower_graph
from model.graph_spec import GraphSpec
from tests.quick import FOLDER, MODE, options
from trnspec.bundle.spec import BundleSpec
from trnspec.runtime import apart, columns, pjrt, products, quicker, sums

COMPILE, RELEASED = pjrt.compile_hlo, pjrt.SAME_BITS
_CODE = "".join(inspect.getsource(module) for module in (pjrt, apart, columns, products, quicker, sums))


def _written(file: Path, content: bytes) -> None:
    temporary = file.with_suffix(f".{os.getpid()}")
    temporary.write_bytes(content)
    temporary.replace(file)


def share(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Let every graph of this process be traced and compiled once, into the folder."""
    folder.mkdir(exist_ok=True)
    patch.setenv(FOLDER, str(folder))

    def traced(spec: BundleSpec, graph: GraphSpec) -> bytes:
        # the models' names are for people
        unnamed = dataclasses.replace(spec, target="", draft="")
        file = folder / hashlib.sha256(repr((unnamed, graph)).encode()).hexdigest()
        if not file.exists():
            _written(file, lower_graph(spec, graph))
        return file.read_bytes()

    def compile_hlo(proto: bytes, devices: list[Any], graph: GraphSpec | None = None, platform: str = "cpu") -> Any:
        if platform != "cpu":
            return COMPILE(proto, devices, graph, platform)
        read = [repr(graph), [d.id for d in devices], sorted((pjrt.SAME_BITS | pjrt.OF_STEPS).items())]
        read += [jaxlib.__version__, _CODE]
        file = folder / hashlib.sha256(proto + repr(read).encode()).hexdigest()
        if file.exists():
            return pjrt.loaded(file.read_bytes(), devices)
        made = COMPILE(proto, devices, graph)
        _written(file, made.serialize())
        return made

    patch.setattr(
        compile.build, "lower_graphs", lambda spec, graphs: ((graph, traced(spec, graph)) for graph in graphs)
    )
    patch.setattr(pjrt, "compile_hlo", compile_hlo)


def compile_quickly(patch: pytest.MonkeyPatch) -> None:
    """Compile what follows with the tests' options, here and in processes that are started."""
    patch.setenv(MODE, "1")
    _take_options(patch)


def share_with_parent() -> None:
    """The same in a process that a test has started, for the rest of its life."""
    patch = pytest.MonkeyPatch()
    share(Path(os.environ[FOLDER]), patch)
    _take_options(patch)


def _take_options(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pjrt, "SAME_BITS", RELEASED | options())
    if options():
        # where LLVM optimizes nothing, the products that XLA writes itself have other bits
        patch.setattr(pjrt, "OF_STEPS", {})
