"""Bits and simulated times of every kernel are those of recorded.json.

`python -m tests.nki_kernels.test_recorded [TEXT]` writes the file again, for the cases whose name contains TEXT.
Operands come from integers, so that no function of a library is between a seed and the bits.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nkisim
from model.nki.table import KERNELS
from nki_kernels.layer.pack_weights import pack
from nkisim.timeline.schedule import schedule
from tests.nki_kernels.attention import inputs, test_prompt
from tests.nki_kernels.attention.inputs import Dims, normal
from tests.nki_kernels.layer import test_layers
from tests.nki_kernels.layer.inputs import AttentionDims, draw_attention, draw_mlp

FILE = Path(__file__).with_name("recorded.json")
# for the sums of floats on another processor
TOLERANCE = 1.001
RNG = np.random.default_rng


def verify(*dims: Any) -> tuple[Any, ...]:
    """With True after the dtype, of a block draft."""
    x = inputs.draw(Dims(*dims[:7]))
    return x.operands(limit=x.positions[:, -1:].copy() if dims[7:] == (True,) else None)


<<<<<<< HEAD
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
=======
def prompt(dims: tuple[Any, ...], *rows: int) -> tuple[Any, ...]:
    return test_prompt.operands(test_prompt.draw_prompt(*dims), *rows, dims[2])


def append(kv_heads: int, count: int, dim: int, dtype: str) -> tuple[Any, ...]:
    x = inputs.draw(Dims(1, kv_heads, kv_heads, count, 1024, dim, dtype), first=[1050 - count])
    (keys, values), table = inputs.pooled(x.keys, x.values)
    return *x.new, keys, values, x.positions, table


def attention(*dims: Any) -> tuple[Any, ...]:
    """With other angles: cosines are a library's."""
    operands, shape = draw_attention(AttentionDims(*dims[:6]), dims[6]).operands(), (*dims[:2], 64)
    return *operands[:6], normal(RNG(1), "fp32", *shape), normal(RNG(2), "fp32", *shape), *operands[8:]


def layers(count: int, *dims: Any) -> tuple[Any, ...]:
    x, tensors, _, _, *rest = test_layers.draw(AttentionDims(*dims[:6]), dims[6], count).arguments()
    return x, tensors, *attention(*dims)[6:8], *rest


def mlp(*dims: Any) -> tuple[Any, ...]:
    return draw_mlp(*dims).operands()
>>>>>>> 7338d9a5f03d3f17071d419eca7df460c5b97fd1


def product(rows: int, depth: int, features: int, dtype: str, first: int = 0) -> tuple[Any, ...]:
    weight = normal(RNG(3), dtype, features, depth, size=depth**-0.5)
    return normal(RNG(4), dtype, rows, depth), pack(weight), first


<<<<<<< HEAD
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
=======
def ints(low: int, high: int, *shape: int) -> Any:
    return RNG(5).integers(low, high, shape).astype(np.int32)


def noise(rows: int, columns: int, start: int) -> tuple[Any, ...]:
    return ints(-(2**31), 2**31, rows, 2), ints(0, 2**24, rows, 1), np.array([[start]], np.int32), columns, 0


def sample(rows: int, columns: int, dtype: str) -> tuple[Any, ...]:
    logits, floor = normal(RNG(6), dtype, rows, columns, size=5), np.where(ints(0, 2, rows, 1), -1e24, 2)
    temperature, start = (ints(0, 3, rows, 1) * 0.5).astype(np.float32), np.array([[7]], np.int32)
    return logits, normal(RNG(7), "fp32", rows, columns, size=2), temperature, floor.astype(np.float32), start


def above(rows: int, columns: int, count: int, dtype: str) -> tuple[Any, ...]:
    column = np.ones((rows, 1), np.float32)
    thresholds = normal(RNG(8), "fp32", rows, count, size=5)
    return normal(RNG(9), dtype, rows, columns, size=5), column, -9 * column, -5 * column, thresholds


def accept(shards: int, batch: int, count: int) -> tuple[Any, ...]:
    values, ids = ints(0, 4, shards, batch, count).astype(np.float32), ints(0, 3, shards, batch, count)
    steps = (ints(0, 3, batch, count - 1), ints(0, 99, batch, 1), ints(0, count + 1, batch, 1))
    return values, ids, *(steps if count > 1 else (None, steps[1], None))


# (operands, their dims): the odd shapes come first; those after None need several tiles, chunks or blocks and are slow
TABLE: dict[str, tuple[Callable[..., tuple[Any, ...]], list[Any]]] = {
    "verify_attention": (verify, [
        (3, 2, 1, 5, 300, 64, "fp32", False), (2, 4, 2, 6, 200, 128, "bf16", True), None, (1, 6, 6, 7, 1024, 64),
        (5, 2, 1, 8, 3000, 128, "bf16"), (2, 4, 1, 32, 2048, 128, "bf16"), (9, 8, 8, 1, 1024, 64, "bf16")]),
    "append_rows": (append, [(3, 130, 64, "fp32"), (2, 640, 128, "bf16"), None, (1, 16, 64, "bf16")]),
    "prompt_attention": (prompt, [
        ((3, 3, 1024, 64, "fp32"), 17, 128), None, ((2, 1, 3072, 128, "fp32"), 2301, 384),
        ((2, 1, 5120, 128, "bf16"), 4600, 384)]),
    "decode_attention": (attention, [
        (2, 3, 384, 3, 1, 200, "bf16"), None, (9, 14, 256, 18, 3, 1024, "fp32"), (4, 8, 2048, 6, 1, 1500, "bf16"),
        (3, 11, 4096, 2, 1, 1024, "bf16"), (1, 3, 2048, 6, 1, 1024, "bf16"), (3, 2, 2048, 4, 1, 1024, "bf16")]),
    "decode_layers": (layers, [
        (2, 2, 2, 256, 2, 1, 140, "bf16"), None, (2, 5, 4, 256, 4, 2, 2048, "bf16"), (1, 2, 3, 256, 2, 1, 3072, "fp32"),
        (2, 1, 3, 2048, 6, 1, 1024, "bf16")]),
    "decode_mlp": (mlp, [
        (3, 384, 250, "fp32"), None, (33, 640, 800, "bf16"), (37, 4096, 400, "bf16"), (128, 512, 256, "fp32"),
        (12, 1024, 1100, "bf16")]),
    "prompt_mlp": (mlp, [
        (130, 256, 96, "bf16"), None, (257, 256, 5200, "fp32"), (700, 256, 160, "bf16"), (257, 4096, 64, "bf16")]),
    "prompt_product": (product, [
        (130, 384, 250, "fp32"), (200, 256, 1280, "bf16", 1), None, (257, 4096, 64, "fp32"), (700, 256, 1280, "bf16")]),
    "gumbel_noise": (noise, [(5, 333, 7), None, (128, 61, 151875), (3, 4747, 9495)]),
    "coupled_sample": (sample, [(5, 333, "bf16"), None, (32, 4748, "fp32"), (128, 61, "bf16")]),
    "weights_above": (above, [(5, 333, 7, "fp32"), None, (32, 4748, 15, "bf16")]),
    "accept_drafts": (accept, [(3, 5, 7), None, (128, 32, 16), (5, 9, 1)]),
}  # fmt: skip
CASES = {
    f"{kernel} {dims}{' slow' * (None in listed[:n])} lnc{lnc}": (kernel, partial(build, *dims), lnc)
    for kernel, (build, listed) in TABLE.items()
    for n, dims in enumerate(listed)
    if dims
    for lnc in (1, 2)
}
>>>>>>> 7338d9a5f03d3f17071d419eca7df460c5b97fd1


def digest(found: Any) -> str:
    """sha256 of the bits of all arrays in nested tuples and lists."""
    of = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, np.ndarray):
            of.update(f"{part.dtype}{part.shape}".encode() + np.ascontiguousarray(part).tobytes())
        for item in part if isinstance(part, (tuple, list)) else ():
            add(item)

    add(found)
    return of.hexdigest()[:32]


def measure(name: str) -> list[Any]:
    """sha256 of the results and of all operands after the launch, and the simulated microseconds."""
    kernel, build, lnc = CASES[name]
    operands = build()
    run = nkisim.run(KERNELS[kernel][lnc], operands, policy=nkisim.Policy(recording=True))
    return [digest((run.outputs, operands)), round(schedule(run.recording.events, band=False).latency_ns / 1e3, 2)]


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if "slow" in n else n for n in CASES])
def test_recorded(name: str) -> None:
    bits, us = json.loads(FILE.read_text(encoding="utf-8"))[name]
    found = measure(name)
    assert found[0] == bits
    assert found[1] <= TOLERANCE * us + 0.01


def test_two_cores_have_the_bits_of_one() -> None:
    """But for kernels whose result has an axis of cores."""
    recorded, by_core = json.loads(FILE.read_text(encoding="utf-8")), ("coupled_sample", "weights_above")
    assert list(recorded) == list(CASES)
    for name in recorded:
        one, two = (recorded[f"{name[:-1]}{lnc}"][0] for lnc in (1, 2))
        assert (one == two) != name.startswith(by_core)


def main(text: str = "") -> None:
    """Write recorded.json."""
    recorded = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    for name in CASES:
        if text in name:
            recorded[name] = measure(name)
            print(name, *recorded[name], flush=True)
    lines = ",\n".join(f'"{name}": {json.dumps(recorded[name])}' for name in CASES)
    FILE.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
