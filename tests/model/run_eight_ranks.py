"""`python -m tests.model.run_eight_ranks FOLDER`: a pair on 8 ranks, split both ways; its tokens as JSON.

A process of its own because the number of CPU devices is chosen once in a process.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax

from compile.build import build
from model.bundle.opening import read_bundle
from model.serving.engine import Engine
from model.serving.overlap import OverlappedEngine
from model.serving.ready import shape_of
from model.serving.request import Params, Request
from model.serving.runtime import Graphs
from tests.compile.tiny import spec
from tests.model.ahead import ids_ahead

RANKS = 8
# in the first tile of 128 positions, across its end, and behind it; all filter, so that XLA compiles one kind of step
REQUESTS = [
    Request(tuple(7 * n % 61 for n in range(100)), Params(0.0, top_k=3), 24),
    Request(tuple(5 * n % 61 for n in range(110)), Params(1.0, top_p=0.95, seed=5), 40),
    Request(tuple(3 * n % 61 for n in range(140)), Params(0.8, top_k=40, top_p=0.9, seed=6), 24),
]


def graphs(folder: Path, name: str, **changes: Any) -> Graphs:
    """The compiled graphs of the folder's pair."""
    return Graphs(read_bundle(build(spec(folder, name, max_len=256, **changes))))


def main(folder: Path) -> None:
    """The draft on 4 ranks: target and draft then have two slices of each kv head's positions."""
    jax.config.update("jax_num_cpu_devices", RANKS)
    g = graphs(folder, "eight", tp=RANKS, draft_tp=4, kv_shard="sequence", k=2, batch=2)
    results = Engine(g, shape_of(g.bundle)).run(REQUESTS)
    ahead, followed = ids_ahead(OverlappedEngine(g, shape_of(g.bundle)), REQUESTS)
    slices = [g.bundle.spec.max_len // t.shape[2] for t in g.bundle.plan.state if ".kv." in t.name]
    print(json.dumps({"ids": [r.ids for r in results], "slices": slices, "ahead": ahead, "followed": followed}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
