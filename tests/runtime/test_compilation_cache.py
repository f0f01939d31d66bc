"""Graphs that JAX keeps between two processes: the second one compiles none of them, and its ids are the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.model.family import graphs

_RUN = """
import contextlib, json, sys
from pathlib import Path
from jax import monitoring
from trnspec.bundle.opening import read_bundle
from trnspec.engine.engine import Engine
from trnspec.engine.ready import shape_of
from trnspec.engine.request import Params, Request
from trnspec.runtime.xla import Graphs

heard = []
monitoring.register_event_listener(lambda event, **_: heard.append(event))
bundle = read_bundle(Path(sys.argv[1]))
graphs = Graphs(bundle)
with graphs.compiled_apart() if "apart" in sys.argv else contextlib.nullcontext():
    (result,) = Engine(graphs, shape_of(bundle)).run([Request((5, 6, 7), Params(0.8, seed=3), 24)])
counts = [heard.count(f"/jax/compilation_cache/{event}") for event in ("cache_hits", "cache_misses")]
print(json.dumps([result.ids, *counts, len(graphs._executables)]))
"""


@pytest.fixture(scope="module")
def bundle(family: Path) -> Path:
    return graphs(family, max_len=256).bundle.path


def _ids_hits_and_misses(bundle: Path, *options: str, **variables: str) -> tuple[list[int], int, int, int]:
    """The ids, JAX's counts, and the number of graphs that ran."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")} | variables
    command = [sys.executable, "-c", _RUN, str(bundle), *options]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    ids, hits, misses, count = json.loads(ran.stdout)
    return ids, hits, misses, count


def test_a_second_process_takes_the_graphs_of_the_first(bundle: Path, tmp_path: Path) -> None:
    folder = tmp_path / "compiled"
    plain, *counts, _ = _ids_hits_and_misses(bundle)
    assert counts == [0, 0], "nothing is kept unless it is asked for"
    kept = {"JAX_COMPILATION_CACHE_DIR": str(folder), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    first, hits, misses, count = _ids_hits_and_misses(bundle, **kept)
    assert hits == 0 < count <= misses
    second, hits, misses, count = _ids_hits_and_misses(bundle, **kept)
    assert misses == 0 < count <= hits
    assert plain == first == second


def test_a_compiler_apart_leaves_its_graphs_where_the_process_takes_them(bundle: Path, tmp_path: Path) -> None:
    kept = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    # what it has compiled it hands over
    first, hits, misses, count = _ids_hits_and_misses(bundle, "apart", **kept)
    assert hits == misses == 0 < count <= len(list(tmp_path.iterdir()))
    second, hits, misses, _ = _ids_hits_and_misses(bundle, "apart", **kept)
    assert (second, hits, misses) == (first, count, 0)
    assert _ids_hits_and_misses(bundle, "apart") == (first, 0, 0, count)


def test_a_folder_that_cannot_be_keeps_nothing(bundle: Path) -> None:
    plain, nowhere = _ids_hits_and_misses(bundle), {"JAX_COMPILATION_CACHE_DIR": f"{os.devnull}/compiled"}
    assert _ids_hits_and_misses(bundle, **nowhere) == plain
    assert _ids_hits_and_misses(bundle, "apart", **nowhere) == plain


def test_a_damaged_file_is_compiled_anew(bundle: Path, tmp_path: Path) -> None:
    kept = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    first, *_ = _ids_hits_and_misses(bundle, **kept)
    files = list(tmp_path.iterdir())
    for file in files:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    second, hits, *_ = _ids_hits_and_misses(bundle, **kept)
    assert (second, hits) == (first, 0)
