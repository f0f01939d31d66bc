"""`python -m tests.compile.run_sharded FOLDER`: a tiny pair on 8 ranks, split in several ways.

Prints a JSON object: the tokens and target steps of each run. Saves the caches of every rank to FOLDER/{run}.npz. A
process of its own because the number of CPU devices is chosen once in a process.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np

from tests import executables
from tests.compile.tiny import spec
from tests.engine.ahead import ids_ahead
from tests.model.family import AsTheyRun, caches, untraced
from trnspec.bundle.opening import read_bundle
from trnspec.bundle.spec import BundleSpec
from trnspec.engine.async_engine import AsyncEngine
from trnspec.engine.config import engine_config
from trnspec.engine.engine import Engine
from trnspec.engine.request import Params, Request
from trnspec.engine.slots import Slot
from trnspec.runtime.xla import XlaRunner

RANKS, K = 8, 2
BUNDLES: dict[str, dict[str, Any]] = {
    "one": {"tp": 1, "k": 1, "batch": 1},
    "two": {"tp": 2},
    "pairs": {"draft_tp": 2},
    "fours": {"draft_tp": 4},
}


def requests() -> list[Request]:
    """Greedy and sampled; their rows are in all four blocks, and cross from one into the next.

    All filter, so that XLA compiles one kind of step; test_tensor_parallel.py has the other on ranks.
    """
    ids = np.random.default_rng(3).integers(1, 64, (3, 500)).tolist()
    return [
        Request(tuple(ids[0][:381]), Params(0.0, top_k=3), 12),
        Request(tuple(ids[1][:300]), Params(1.0, top_p=0.95, seed=5), 8),
        Request(tuple(ids[2][:490]), Params(0.8, top_k=9, top_p=0.9, seed=2**40), 30),
    ]


def rotate(graphs: XlaRunner, prefix: str, size: int) -> None:
    """Give each rank the weights of the next one of its group."""
    for name in [n for n in graphs._weights if n.startswith(prefix)]:
        shards = _shards(graphs._weights[name])
        order = [r // size * size + (r + 1) % size for r in range(len(shards))]
        graphs._weights[name] = graphs._put([shards[r] for r in order])


def _shards(array: Any) -> list[np.ndarray]:
    return [np.asarray(s.data) for s in sorted(array.addressable_shards, key=lambda s: s.device.id)]


def run(folder: Path, name: str, graphs: XlaRunner) -> dict[str, Any]:
    engine, held = Engine(graphs, engine_config(graphs.bundle)), dict[int, list[int]]()
    seat = engine.slots.seat

    def noted(*given: Any) -> Slot:
        slot = seat(*given)
        held[slot.index] = list(slot.blocks)
        return slot

    with mock.patch.object(engine.slots, "seat", noted):
        results = engine.run(requests())
    pools = {n: pool.reshape(graphs.tp, -1, *pool.shape[1:]) for n, pool in caches(graphs).items()}
    np.savez(folder / f"{name}.npz", **{n: in_slots(pool, held) for n, pool in pools.items()})
    return {"ids": [r.ids for r in results], "steps": [r.steps for r in results], "reason": results[-1].reason}


def in_slots(pool: np.ndarray, held: dict[int, list[int]]) -> np.ndarray:
    """(ranks, B, G, S, D) the blocks of each slot side by side; block 0, of zeros, where it has none."""
    longest = max(map(len, held.values()))
    tables = [held[slot] + [0] * (longest - len(held[slot])) for slot in sorted(held)]
    return np.stack([np.concatenate([pool[:, block] for block in table], 2) for table in tables], 1)


def main(folder: Path) -> None:
    """Every bundle, and one of them with the wrong weights."""
    jax.config.update("jax_num_cpu_devices", RANKS)
    executables.share_with_parent()
    # no request fits a smaller bucket
    BundleSpec.buckets = property(lambda self: (self.max_len,))  # type: ignore[assignment]
    found = {}
    for name, changes in BUNDLES.items():
        # a prompt is one chunk
        sizes = {"tp": RANKS, "max_len": 512, "k": K, "chunks": ()} | changes
        graphs = AsTheyRun(read_bundle(untraced(spec(folder, name, **sizes))))
        found[name] = run(folder, name, graphs)
        if name == "fours":
            ahead, followed = ids_ahead(AsyncEngine(graphs, engine_config(graphs.bundle)), requests())
            found["ahead"] = {"ids": ahead, "followed": followed}
        if name == "pairs":
            rotate(graphs, "draft_model", 2)
            found["rotated"] = run(folder, "rotated", graphs)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
