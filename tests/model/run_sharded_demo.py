"""`python -m tests.model.run_sharded_demo FOLDER`: the demo pair on 8 ranks, split both ways; its tokens as JSON.

A process of its own because the number of CPU devices is chosen once in a process.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax

from model.serving.engine import Engine
from model.serving.overlap import OverlappedEngine
from model.serving.ready import shape_of
from model.serving.request import Params, Request
from model.serving.runtime import Graphs
from tests.model.ahead import ids_ahead
from tests.model.demo_bundle import PROMPTS, graphs, request

RANKS = 8
TEXT = " ".join(PROMPTS)


def requests(g: Graphs) -> list[Request]:
    """Prompts in the first tile of 128 positions, across its end, and behind it: greedy, sampled, filtered."""
    return [
        request(g, TEXT[:400], count=24),
        request(g, TEXT[400:700], Params(1.0, seed=5), 40),
        request(g, TEXT[200:640], Params(0.8, top_k=40, top_p=0.9, seed=6), 24),
    ]


def main(folder: Path) -> None:
    """The draft on 4 ranks: target and draft then have two slices of each kv head's positions."""
    jax.config.update("jax_num_cpu_devices", RANKS)
    changes: dict[str, Any] = {"tp": RANKS, "draft_tp": 4, "kv_shard": "sequence", "k": 3, "batch": 2}
    g = graphs(folder, **changes)
    results = Engine(g, shape_of(g.bundle)).run(requests(g))
    ahead, followed = ids_ahead(OverlappedEngine(g, shape_of(g.bundle)), requests(g))
    slices = [g.bundle.spec.max_len // t.shape[2] for t in g.bundle.plan.state if ".kv." in t.name]
    print(json.dumps({"ids": [r.ids for r in results], "slices": slices, "ahead": ahead, "followed": followed}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
