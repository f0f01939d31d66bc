"""`python -m tests.compile.run_slices FILE`: attention over slices, as the executed graph of 8 ranks and as defined.

Two kv heads, each shared by four ranks. The definition has no collectives: one process computes every slice and adds
them in ascending order; XLA compiles it for one device. A process of its own because the number of CPU devices is
chosen once in a process. The results go to FILE, an npz.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch
from torch import Tensor

from compile.graph.torchax_seam import interop
from compile.graph.trace import TracedOps
from model import sequence
from model.attention import append
from model.cache import Cache, Placement
from model.ops import Ops
from model.serving.pjrt import SAME_BITS, compile_hlo

RANKS, SLICES, LENGTH = 8, 4, 1024
# rows that see one slice alone, that cross from a slice into the next one, and that see all
FIRST = np.array([[60], [382], [900]], np.int32)
HEADS, COUNT, DIM = 2, 5, 16
Merge = Callable[[Tensor], Tensor]


def inputs(seed: int = 0) -> list[np.ndarray]:
    """Queries, new keys and values, caches of every rank; positions and the rank's number."""
    rng = np.random.default_rng(seed)
    batch = len(FIRST)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    # the ranks of a kv head make the same new keys and values
    new = [normal(RANKS // SLICES, batch, 1, COUNT, DIM).repeat(SLICES, 0) for _ in "kv"]
    caches = [normal(RANKS, batch, 1, LENGTH // SLICES, DIM) for _ in "kv"]
    positions = np.tile(FIRST + np.arange(COUNT, dtype=np.int32), (RANKS, 1, 1))
    numbers = np.arange(RANKS, dtype=np.int32)[:, None]
    return [3 * normal(RANKS, batch, HEADS, COUNT, DIM), *new, *caches, positions, numbers]


def of_rank(ops: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Any:
    """What a rank runs."""
    keys, values, positions, number = rest
    return sequence.verify_attention(ops, q, (k, v), Cache(keys, values), _rows(positions, number % SLICES))


def _rows(positions: Tensor, slice_1: Tensor) -> Placement:
    keys_S = torch.arange(LENGTH, dtype=torch.int32, device=positions.device)
    return sequence.sliced(Placement(positions, keys_S), slice_1, SLICES)


def executed(given: list[np.ndarray]) -> list[np.ndarray]:
    """Outputs and caches of every rank, by the graph that each of them runs."""
    ops = TracedOps(SLICES, world=RANKS)

    def run(arrays: list[Any]) -> Any:
        return jax.tree.leaves(interop.call_torch(lambda *a: of_rank(ops, *a), *arrays))

    module: Any = jax.jit(run).lower([jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for a in given]).compiler_ir("hlo")
    devices = jax.devices("cpu")[:RANKS]
    mesh = jax.sharding.Mesh(np.array(devices), ("rank",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rank"))
    joined = [
        jax.make_array_from_single_device_arrays(
            (RANKS * a.shape[1], *a.shape[2:]), split, [jax.device_put(p, d) for p, d in zip(a, devices, strict=True)]
        )
        for a in given
    ]
    results = compile_hlo(module.as_serialized_hlo_module_proto(), devices).execute_sharded(joined)
    return [np.stack([np.asarray(p) for p in parts]) for parts in results.disassemble_into_single_device_arrays()]


def definition(merge: Merge, shift: int, given: list[np.ndarray]) -> np.ndarray:
    """(ranks, B, H, N, D): every slice in one process. `shift` reads a cache as another slice than it is."""

    def run(arrays: list[Any]) -> Any:
        return interop.call_torch(lambda *a: defined(TracedOps(1), merge, shift, a), *arrays)

    return np.asarray(jax.jit(run, compiler_options=SAME_BITS)(given))


def defined(ops: Ops, merge: Merge, shift: int, given: Sequence[Tensor]) -> Tensor:
    """The definition in torch, on the operations of one rank."""
    q, k, v, keys, values, positions, _ = given
    out = []
    for first in range(0, RANKS, SLICES):
        queries = torch.cat([q[first + m] for m in range(SLICES)], 1)
        parts = []
        for m in range(SLICES):
            rows, rank = _rows(positions[0], torch.full_like(positions[0, 0, :1], m)), first + m
            assert rows.places_BN is not None
            cache = append(ops, (k[rank], v[rank]), Cache(keys[rank], values[rank]), rows, rows.places_BN)
            seen = _rows(positions[0], torch.full_like(positions[0, 0, :1], (m + shift) % SLICES))
            parts.append(sequence.attended(queries, cache, seen))
        out += merge(torch.stack(parts)).split(HEADS, 1)
    return torch.stack(out)


def _backwards(parts: Tensor) -> Tensor:
    return sequence.merge(parts.flip(0))


def _unweighted(parts: Tensor) -> Tensor:
    return parts[..., :-1].sum(0) / parts.shape[0]


def main(file: str) -> None:
    """Everything that the test compares."""
    jax.config.update("jax_num_cpu_devices", RANKS)
    given = inputs()
    out, keys, values = executed(given)
    fewer = [
        a[:, :1, :, :2] if i < 3 else a[:, :1] if i < 5 else a[:, :1, :2] if i == 5 else a for i, a in enumerate(given)
    ]
    np.savez(
        file,
        out=out,
        keys=keys,
        values=values,
        defined=definition(sequence.merge, 0, given),
        backwards=definition(_backwards, 0, given),
        unweighted=definition(_unweighted, 0, given),
        shifted=definition(sequence.merge, 1, given),
        fewer=executed(fewer)[0],
    )


if __name__ == "__main__":
    main(sys.argv[1])
