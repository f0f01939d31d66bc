"""Each graph of a bundle is traced once in a session: `compile.build` takes it from a folder that the workers share."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import compile.build
from compile.graph.trace import lower_graph
from model.bundle.graph_spec import GraphSpec
from model.bundle.spec import BundleSpec


@pytest.fixture(autouse=True, scope="session")
def _graphs_are_traced_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A test that changes what is traced calls `lower_graph` of compile.graph.trace itself."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "traces"
    folder.mkdir(exist_ok=True)

    def traced(spec: BundleSpec, graph: GraphSpec) -> bytes:
        file = folder / hashlib.sha256(repr((spec, graph)).encode()).hexdigest()
        if not file.exists():
            made: Path = file.with_suffix(f".{os.getpid()}")
            made.write_bytes(lower_graph(spec, graph))
            made.replace(file)
        return file.read_bytes()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile.build, "lower_graph", traced)
        yield
