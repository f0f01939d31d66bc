"""Bits and simulated times of every kernel are those of recorded.json.

`python -m tests.nki_kernels.test_recorded [TEXT]` rewrites the cases whose name contains TEXT. Operands are made from
integers, so that their bits depend on no library function.
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
from nki_kernels.attention.paged_kv import PAGE
from nki_kernels.layer.pack_weights import pack
from nki_kernels.limits import SPARE_PAGES
from nkisim.timeline.schedule import schedule
from tests.nki_kernels.attention import inputs, test_prompt
from tests.nki_kernels.attention.inputs import Dims, normal
from tests.nki_kernels.layer import test_layers
from tests.nki_kernels.layer.inputs import AttentionDims, draw_attention, draw_mlp

FILE = Path(__file__).with_name("recorded.json")
# for float sums of the scheduler on another processor
TOLERANCE = 1.001
RNG = np.random.default_rng


def verify(*dims: Any) -> tuple[Any, ...]:
    """With True after the dtype: a block draft."""
    x = inputs.draw(Dims(*dims[:7]))
    return x.operands(limit=x.positions[:, -1:].copy() if dims[7:] == (True,) else None)


def prompt(dims: tuple[Any, ...], *rows: int) -> tuple[Any, ...]:
    return test_prompt.operands(test_prompt.draw_prompt(*dims), *rows, dims[2])


def append(kv_heads: int, count: int, dim: int, dtype: str) -> tuple[Any, ...]:
    x = inputs.draw(Dims(1, kv_heads, kv_heads, count, 1024, dim, dtype), first=[1050 - count])
    (keys, values), table = inputs.pooled(x.keys, x.values)
    return *x.new, keys, values, x.positions, table


def attention(*dims: Any) -> tuple[Any, ...]:
    """With random angles: cosines would be a library's."""
    operands, shape = draw_attention(AttentionDims(*dims[:6]), dims[6]).operands(), (*dims[:2], 64)
    return *operands[:6], normal(RNG(1), "fp32", *shape), normal(RNG(2), "fp32", *shape), *operands[8:]


def layers(count: int, *dims: Any) -> tuple[Any, ...]:
    x, tensors, _, _, *rest = test_layers.draw(AttentionDims(*dims[:6]), dims[6], count).arguments()
    return x, tensors, *attention(*dims)[6:8], *rest


def mlp(*dims: Any) -> tuple[Any, ...]:
    return draw_mlp(*dims).operands()


def product(rows: int, depth: int, features: int, dtype: str, first: int = 0) -> tuple[Any, ...]:
    weight = normal(RNG(3), dtype, features, depth, size=depth**-0.5)
    return normal(RNG(4), dtype, rows, depth), pack(weight), first


def qkv(*dims: Any) -> tuple[Any, ...]:
    x, *weights, _, cos, sin, keys = attention(*dims)[:9]
    return x, *weights, cos, sin, keys.shape[1]


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


# (operands, their dims): odd shapes first; cases after None have several tiles, chunks or blocks and are slow
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
    "prompt_qkv": (qkv, [
        (3, 5, 384, 3, 1, 60, "bf16"), None, (1, 300, 256, 4, 2, 320, "fp32"), (1, 700, 4096, 2, 1, 720, "bf16")]),
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


def recorded() -> dict[str, list[Any]]:
    """The file's digest and microseconds of each case."""
    return json.loads(FILE.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def bits(part: Any) -> bytes:
    """The bits of all arrays in nested tuples and lists; pools without their spare pages, which depend on the cores."""
    if isinstance(part, (tuple, list)):
        return b"".join(map(bits, part))
    if np.ndim(part) == 4 and part.shape[2] == PAGE and len(part) > SPARE_PAGES:
        part = part[:-SPARE_PAGES]
    return f"{part.dtype}{part.shape}".encode() + part.tobytes() if isinstance(part, np.ndarray) else b""


def measure(name: str, nki: str = "0.6") -> list[Any]:
    """sha256 of the results and of all operands after the launch, and the simulated microseconds."""
    kernel, build, lnc = CASES[name]
    operands = build()
    run = nkisim.run(KERNELS[kernel][lnc], operands, policy=nkisim.Policy(recording=True, nki=nki))
    digest = hashlib.sha256(bits((run.outputs, operands))).hexdigest()[:32]
    return [digest, round(schedule(run.recording.events, band=False).latency_ns / 1e3, 2)]


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if "slow" in n else n for n in CASES])
def test_recorded(name: str) -> None:
    (digest, us), (before, limit) = measure(name), recorded()[name]
    assert digest == before
    assert us <= TOLERANCE * limit + 0.01


def test_two_cores_have_the_bits_of_one() -> None:
    """Except for kernels whose result has an axis of cores."""
    digests, by_core = recorded(), ("coupled_sample", "weights_above")
    assert list(digests) == list(CASES)
    for name in digests:
        one, two = (digests[f"{name[:-1]}{lnc}"][0] for lnc in (1, 2))
        assert (one == two) != name.startswith(by_core)


def main(text: str = "") -> None:
    """Write recorded.json."""
    rows = recorded() if FILE.exists() else {}
    for name in CASES:
        if text in name:
            rows[name] = measure(name)
            print(name, *rows[name], flush=True)
    lines = ",\n".join(f'"{name}": {json.dumps(rows[name])}' for name in CASES if name in rows)
    FILE.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
