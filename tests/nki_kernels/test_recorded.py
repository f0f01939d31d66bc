"""Bits and simulated times of every kernel are those of recorded.json.

`python -m tests.nki_kernels.test_recorded [TEXT]` writes the file again, for the cases whose name contains TEXT.
Operands come from integers, so that no function of a library is between a seed and the bits.
"""

from __future__ import annotations

import hashlib
import json
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nkisim
from model.nki.table import KERNELS
from nki_kernels.layer.pack_weights import pack, pack_gate_up, pack_out, pack_qkv
from nkisim.ranks import simulate_ranks
from nkisim.timeline.schedule import schedule

FILE = Path(__file__).with_name("recorded.json")
DTYPES = {"fp32": np.float32, "bf16": ml_dtypes.bfloat16}
# a tenth of a percent for the sums of floats on another processor
WITHIN = 1.001


class Numbers:
    """Numbers of one case."""

    def __init__(self, case: str, dtype: str) -> None:
        self.rng, self.dtype = np.random.default_rng(zlib.crc32(case.encode())), DTYPES[dtype]

    def floats(self, *shape: int, scale: float = 1.0, dtype: Any = None) -> Any:
        """Multiples of 2**-16 in [-scale, scale)."""
        return (self.rng.integers(-(2**16), 2**16, shape) * (scale / 2**16)).astype(dtype or self.dtype)

    def ints(self, low: int, high: int, *shape: int) -> Any:
        return self.rng.integers(low, high, shape).astype(np.int32)

    def pools(self, kv: int, dim: int, batch: int, slots: int) -> tuple[Any, Any, Any]:
        """Pools of keys and values, and a block table; page 0 is zero."""
        per = slots // 128
        pools = [self.floats(batch * per + 3, kv, 128, dim) for _ in range(2)]
        for pool in pools:
            pool[0] = 0
        table = 1 + self.rng.permutation(batch * per + 2)[: batch * per].reshape(batch, per).astype(np.int32)
        return pools[0], pools[1], table

    def positions(self, batch: int, count: int, slots: int) -> Any:
        """Consecutive rows of each sequence; those of the first end at the last slot."""
        first = self.ints(0, slots - count + 1, batch, 1)
        first[0] = slots - count
        return (first + np.arange(count)).astype(np.int32)


def verify_attention(n: Numbers, B: int, H: int, G: int, N: int, D: int, S: int, block: int = 0) -> tuple[Any, ...]:
    q, new = n.floats(B, H, N, D, scale=3), [n.floats(B, G, N, D) for _ in range(2)]
    keys, values, table = n.pools(G, D, B, S)
    positions = n.positions(B, N, S)
    if B > 2:
        table[-1, positions[-1, -1] // 128] = 0
    rest = (positions[:, -1:].copy(),) if block else ()
    return q, *new, keys, values, positions, table, *rest


def append_rows(n: Numbers, G: int, C: int, D: int, S: int) -> tuple[Any, ...]:
    keys, values, table = n.pools(G, D, 1, S)
    table[0, 2] = 0
    positions = (S - C + 30 + np.arange(C, dtype=np.int32))[None]
    return n.floats(1, G, C, D), n.floats(1, G, C, D), keys, values, positions, table


def prompt_attention(n: Numbers, H: int, G: int, C: int, D: int, S: int, start: int) -> tuple[Any, ...]:
    keys, values, table = n.pools(G, D, 1, S)
    return n.floats(1, H, C, D, scale=3), keys, values, np.array([[start]], np.int32), table


def _attention(n: Numbers, E: int, H: int, G: int) -> tuple[Any, ...]:
    """gamma, k_norm, q_norm, QKV and output."""
    q, k, v, out = (n.floats(o, i, scale=i**-0.5) for o, i in ((H * 128, E), (G * 128, E), (G * 128, E), (E, H * 128)))
    return n.floats(E) + n.dtype(1), n.floats(128), n.floats(128), pack_qkv(q, k, v, 128), pack_out(out, 128)


def _mlp(n: Numbers, E: int, I: int) -> tuple[Any, ...]:  # noqa: E741
    """gamma, gate and up, down."""
    gate, up, down = n.floats(I, E, scale=E**-0.5), n.floats(I, E, scale=E**-0.5), n.floats(E, I, scale=0.1)
    return n.floats(E) + n.dtype(1), pack_gate_up(gate, up), pack(down)


def _angles(n: Numbers, batch: int, count: int) -> tuple[Any, Any]:
    return n.floats(batch, count, 64, dtype=np.float32), n.floats(batch, count, 64, dtype=np.float32)


def decode_attention(n: Numbers, B: int, N: int, E: int, H: int, G: int, S: int) -> tuple[Any, ...]:
    keys, values, table = n.pools(G, 128, B, S)
    return (
        n.floats(B * N, E, scale=3), *_attention(n, E, H, G), *_angles(n, B, N), keys, values,
        n.positions(B, N, S), table,
    )  # fmt: skip


def decode_mlp(n: Numbers, R: int, E: int, I: int) -> tuple[Any, ...]:  # noqa: E741
    return n.floats(R, E, scale=3), *_mlp(n, E, I)


def decode_layers(n: Numbers, L: int, B: int, N: int, E: int, H: int, G: int, I: int, S: int, ranks: int = 0) -> Any:  # noqa: E741
    layers, table = [], None
    for _ in range(L):
        keys, values, table = n.pools(G, 128, B, S)
        layers.append((*_attention(n, E, H, G), *_mlp(n, E, I), keys, values))
    groups = (tuple(range(ranks)),) if ranks else None
    return n.floats(B * N, E, scale=3), tuple(layers), *_angles(n, B, N), n.positions(B, N, S), table, groups


def prompt_product(n: Numbers, C: int, K: int, M: int, first: int = 0) -> tuple[Any, ...]:
    return n.floats(C, K), pack(n.floats(M, K, scale=K**-0.5)), first


def gumbel_noise(n: Numbers, R: int, V: int, start: int) -> tuple[Any, ...]:
    seeds, positions = n.ints(-(2**31), 2**31, R, 2), n.ints(0, 2**24, R, 1)
    return seeds, positions, np.array([[start]], np.int32), V, 0


def coupled_sample(n: Numbers, R: int, V: int, start: int) -> tuple[Any, ...]:
    logits, noise = n.floats(R, V, scale=9), n.floats(R, V, scale=4, dtype=np.float32)
    temperature = (n.ints(0, 3, R, 1) * 0.5).astype(np.float32)
    floor = np.where(n.ints(0, 2, R, 1) > 0, -1e24, logits.astype(np.float32).max(1, keepdims=True) - 2)
    return logits, noise, temperature, floor.astype(np.float32), np.array([[start]], np.int32)


def weights_above(n: Numbers, R: int, V: int, J: int) -> tuple[Any, ...]:
    column = np.ones((R, 1), np.float32)
    return n.floats(R, V, scale=9), column, -9 * column, -5 * column, n.floats(R, J, scale=9, dtype=np.float32)


def accept_drafts(n: Numbers, M: int, B: int, N: int) -> tuple[Any, ...]:
    values, ids = n.ints(0, 4, M, B, N).astype(np.float32), n.ints(0, 3, M, B, N)
    if N == 1:
        return values, ids, None, n.ints(0, 99, B, 1), None
    return values, ids, n.ints(0, 3, B, N - 1), n.ints(0, 99, B, 1), n.ints(0, N + 1, B, 1)


# odd shapes first, then pages of several chunks, single kv groups, all partitions
ROWS: list[tuple[Callable[..., Any], str, tuple[int, ...], tuple[Any, ...]]] = [
    (verify_attention, "fp32", (1, 2), ((3, 4, 2, 5, 64, 1024), (1, 6, 6, 7, 64, 1024), (2, 2, 1, 3, 128, 2048, 1))),
    (verify_attention, "bf16", (1, 2), ((5, 2, 1, 8, 128, 3072), (2, 4, 1, 32, 128, 1024), (4, 4, 2, 16, 64, 1024, 1),
                                        (1, 1, 1, 1, 128, 1024), (9, 8, 8, 1, 64, 1024))),
    (append_rows, "fp32", (1, 2), ((3, 130, 64, 512),)),
    (append_rows, "bf16", (1, 2), ((2, 640, 128, 1024), (1, 16, 64, 1024))),
    (prompt_attention, "fp32", (1, 2), ((3, 3, 128, 64, 1024, 0), (2, 1, 384, 128, 3072, 2301))),
    (prompt_attention, "bf16", (1, 2), ((6, 3, 256, 64, 1024, 517), (2, 1, 384, 128, 5120, 4600))),
    (decode_attention, "fp32", (1, 2), ((3, 5, 384, 3, 1, 1024), (9, 14, 256, 18, 3, 1024))),
    (decode_attention, "bf16", (1, 2), ((2, 3, 256, 4, 2, 2048), (4, 8, 2048, 6, 1, 1024), (1, 7, 256, 16, 2, 1024),
                                        (3, 11, 4096, 2, 1, 1024), (1, 3, 2048, 6, 1, 1024), (3, 2, 2048, 4, 1, 1024))),
    (decode_mlp, "fp32", (1, 2), ((3, 384, 250), (128, 512, 256))),
    (decode_mlp, "bf16", (1, 2), ((33, 640, 800), (5, 256, 192), (37, 4096, 400), (12, 1024, 1100))),
    (decode_layers, "fp32", (1, 2), ((2, 3, 5, 384, 3, 1, 224, 1024), (1, 2, 3, 256, 2, 1, 96, 3072))),
    (decode_layers, "bf16", (1, 2), ((2, 5, 4, 256, 4, 2, 224, 2048), (3, 1, 2, 256, 2, 1, 160, 1024),
                                     (2, 2, 3, 2048, 6, 1, 800, 1024), (2, 3, 2, 256, 2, 1, 160, 1024, 2), (2, 1, 3, 2048, 6, 1, 160, 1024))),
    (decode_mlp, "fp32", (2,), ((7, 1024, 800),)),
]  # fmt: skip
ROWS += [
    (prompt_product, "fp32", (1, 2), ((130, 384, 250), (257, 4096, 64))),
    (prompt_product, "bf16", (1, 2), ((700, 256, 1280), (1, 384, 96), (130, 256, 1280, 1))),
    (gumbel_noise, "fp32", (1, 2), ((5, 333, 7), (128, 61, 151875), (3, 4747, 9495))),
    (coupled_sample, "fp32", (1, 2), ((5, 333, 7), (32, 4748, 14244))),
    (coupled_sample, "bf16", (1, 2), ((3, 4747, 9495), (128, 61, 0))),
    (weights_above, "fp32", (1, 2), ((5, 333, 7), (32, 4748, 15))),
    (weights_above, "bf16", (1, 2), ((3, 4747, 5),)),
    (accept_drafts, "fp32", (1, 2), ((3, 5, 7), (128, 32, 16), (5, 9, 1))),
]  # fmt: skip


def prompt_mlp(n: Numbers, C: int, E: int, I: int) -> tuple[Any, ...]:  # noqa: E741
    return decode_mlp(n, C, E, I)


ROWS += [
    (prompt_mlp, "fp32", (1, 2), ((130, 384, 250), (257, 256, 5200))),
    (prompt_mlp, "bf16", (1, 2), ((700, 256, 160), (1, 256, 96), (257, 4096, 64))),
]


@dataclass(frozen=True)
class Case:
    """A kernel, its dims, its dtype and its cores."""

    operands: Callable[..., Any]
    dims: tuple[int, ...]
    dtype: str
    lnc: int

    def __str__(self) -> str:
        return f"{self.operands.__name__} {'-'.join(map(str, self.dims))} {self.dtype} lnc{self.lnc}"

    def arguments(self, rank: int = 0) -> Any:
        # the same on one core and on two
        return self.operands(Numbers(f"{self.operands.__name__}{self.dims}{rank}", self.dtype), *self.dims)

    def run(self) -> tuple[str, float]:
        """sha256 of the results and of all operands after the launch, and the simulated microseconds."""
        kernel, arguments, world = KERNELS[self.operands.__name__][self.lnc], [self.arguments()], 0
        if self.operands is decode_layers and len(self.dims) == 9:
            world = self.dims[8]
            arguments += [self.arguments(rank) for rank in range(1, world)]
            # every rank has the same rows, at the same places
            arguments = [(arguments[0][0], a[1], *arguments[0][2:]) for a in arguments]
        timing = nkisim.Policy(recording=True, numerics=False, ranks=world)
        events = nkisim.run(kernel, self.arguments(), policy=timing).recording.events
        outputs = simulate_ranks(kernel, world)(arguments) if world else nkisim.simulate(kernel)(*arguments[0])
        return digest((outputs, arguments)), round(schedule(events, band=False).latency_ns / 1e3, 3)


def digest(found: Any) -> str:
    """sha256 of the bits of all arrays in nested tuples and lists."""
    of = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, np.ndarray):
            of.update(f"{part.dtype}{part.shape}".encode() + np.ascontiguousarray(part).tobytes())
        elif isinstance(part, (tuple, list)):
            for item in part:
                add(item)

    add(found)
    return of.hexdigest()[:32]


CASES = {
    str(case): case
    for operands, dtype, cores, shapes in ROWS
    for dims in shapes
    for lnc in cores
    for case in [Case(operands, dims, dtype, lnc)]
}


@pytest.mark.parametrize("name", CASES)
def test_recorded(name: str) -> None:
    bits, us = CASES[name].run()
    before = json.loads(FILE.read_text())[name]
    assert bits == before[0]
    assert us <= WITHIN * before[1]


def main(text: str = "") -> None:
    """Write recorded.json."""
    kept = json.loads(FILE.read_text()) if FILE.exists() else {}
    for name, case in CASES.items():
        if text in name:
            kept[name] = case.run()
            print(name, *kept[name], flush=True)
    FILE.write_text(json.dumps({name: kept[name] for name in CASES if name in kept}, indent=0) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
