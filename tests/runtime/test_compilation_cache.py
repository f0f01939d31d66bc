"""JAX's compilation cache: a second process compiles no graph and emits the same tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.model.family import graphs

_RUN = """
import json, sys
from pathlib import Path
from jax import monitoring
from trnspec.bundle.opening import read_bundle
from trnspec.engine.config import engine_config
from trnspec.engine.engine import Engine
from trnspec.engine.request import Params, Request
from trnspec.runtime.xla import XlaRunner

heard = []
monitoring.register_event_listener(lambda event, **_: heard.append(event))
bundle = read_bundle(Path(sys.argv[1]))
runner = XlaRunner(bundle)
(result,) = Engine(runner, engine_config(bundle)).run([Request((5, 6, 7), Params(0.8, seed=3), 24)])
counts = [heard.count(f"/jax/compilation_cache/{event}") for event in ("cache_hits", "cache_misses")]
print(json.dumps([result.ids, *counts, len(runner.loaded)]))
"""


@pytest.mark.slow
def test_a_second_process_compiles_nothing_and_a_damaged_cache_is_not_used(family: Path, tmp_path: Path) -> None:
    bundle = graphs(family).bundle.path

    def run(**variables: str) -> tuple[list[int], int, int, int]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")} | variables
        command = [sys.executable, "-c", _RUN, str(bundle)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        ids, hits, misses, count = json.loads(done.stdout)
        return ids, hits, misses, count

    plain, *counts, _ = run(JAX_ENABLE_COMPILATION_CACHE="false")
    assert counts == [0, 0], "nothing is stored without a cache"
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    first, hits, misses, count = run(**cache)
    assert hits == 0 < count <= misses
    second, hits, misses, count = run(**cache)
    assert misses == 0 < count <= hits
    for file in tmp_path.iterdir():
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    third, hits, *_ = run(**cache)
    assert hits == 0
    assert plain == first == second == third
