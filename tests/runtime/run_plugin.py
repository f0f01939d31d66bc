"""Bundles on a PJRT plugin, in a process that finds it: `python -m tests.runtime.run_plugin WORK BUNDLE [FILE]`.

`ids` prints facts of some requests; `store` writes the executable of a prompt's graph, and `load` runs it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from jaxlib import xla_client

from model.graph_io import zeros_of
from tests.compile.run_requests import REQUESTS
from trnspec.bundle.opening import open_bundle
from trnspec.engine.config import engine_config
from trnspec.engine.engine import Engine
from trnspec.runtime import xla
from trnspec.runtime.xla import XlaRunner


def ids(held: XlaRunner) -> dict[str, Any]:
    """The ids of the requests, how many caches a run took in place, and what the plugin's compiler is told."""
    key = _smallest(held)
    held.prepare(key)
    before = [held._state[t.name] for t in held.bundle.plan.by_key[key].state]
    held.launch(key, zeros_of(held.graph(key).inputs))
    return {
        "ids": [r.ids for r in Engine(held, engine_config(held.bundle)).run(REQUESTS)],
        "caches": [len(before), sum(array.is_deleted() for array in before)],
        "told": {name: os.environ.get(name) for name in ("NEURON_CC_FLAGS", "NEURON_LOGICAL_NC_CONFIG")},
        "devices": [held._devices[0].platform, len(held._devices)],
        "version": held._devices[0].client.platform_version,
    }


def store(held: XlaRunner, file: Path) -> dict[str, Any]:
    """Write a compiled graph."""
    key = _smallest(held)
    held.prepare(key)
    return {"bytes": file.write_bytes(held._executables[key].serialize())}


def load(held: XlaRunner, file: Path) -> dict[str, Any]:
    """The ids of the requests, where that graph is not compiled."""
    listed = xla_client.DeviceList(tuple(held._devices))
    loaded = held._devices[0].client.deserialize_executable(file.read_bytes(), listed, None)
    held._executables[_smallest(held)] = loaded
    held.loaded.add(_smallest(held))
    compiled, real = [], xla.compile_hlo

    def compile_hlo(*arguments: Any) -> Any:
        compiled.append(arguments[2].file)
        return real(*arguments)

    xla.compile_hlo = compile_hlo
    return {"ids": [r.ids for r in Engine(held, engine_config(held.bundle)).run(REQUESTS)], "compiled": compiled}


def _smallest(held: XlaRunner) -> Any:
    return next(g.key for g in held.bundle.graphs if g.key.is_prefill)


if __name__ == "__main__":
    work, folder, *files = sys.argv[1:]
    graphs = XlaRunner(open_bundle(Path(folder)), "neuron")
    print(json.dumps({"ids": ids, "store": store, "load": load}[work](graphs, *map(Path, files))))  # type: ignore[operator]
