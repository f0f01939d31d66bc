"""Prefill attention against its law in fp64, and the bits of a row in chunks of any size and start."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nki_kernels.attention import law
from nki_kernels.attention.append_rows import append_rows
from nki_kernels.attention.prompt import prompt_attention
from nki_kernels.limits import SPARE_PAGES
from nkisim.policy import using
from tests.close import is_close
from tests.nki_kernels.attention.inputs import Dims, Inputs, combine, draw, model_attention, pooled, same


def draw_prompt(heads: int, kv_heads: int, slots: int, dim: int, dtype: str) -> Inputs:
    """Queries, keys and values of a full prompt; its new keys and values are those of the cache."""
    x = draw(Dims(1, heads, kv_heads, slots, slots, dim, dtype), first=[0])
    return replace(x, new=(x.keys, x.values))


def operands(x: Inputs, start: int, count: int, slots: int, seed: int = 1) -> tuple[Any, ...]:
    """Rows start to start + count of a prompt in a cache of `slots`."""
    (keys, values), table = pooled(x.keys[:, :, :slots], x.values[:, :, :slots], seed)
    return x.q[:, :, start : start + count].copy(), keys, values, np.array([[start]], np.int32), table


def run(x: Inputs, start: int, count: int, slots: int, seed: int = 1, **options: Any) -> Any:
    """The kernel's output (1, H, C, D)."""
    return prompt_attention(*operands(x, start, count, slots, seed), **options)


def check(x: Inputs, start: int, count: int, slots: int, far: int = 1, **options: Any) -> None:
    """The error is at most twice that of the model's attention; rows that attend `far` more positions exceed it."""
    chunk, (keys, values) = x.part(slice(1), slice(start, start + count)), (x.keys, x.values)
    naive, rows = model_attention(replace(chunk, keys=keys, values=values))[0], chunk.q[0].astype(np.float64)
    wide = keys[0].astype(np.float64), values[0].astype(np.float64)
    exact, wrong = (law.prompt_attention(rows, wide, first)[None] for first in (start, start + far))
    assert is_close(run(x, start, count, slots, **options), naive, exact)
    assert not is_close(wrong, naive, exact)


SHAPES = [((1, 1), 1024, 64, 0, 128), ((6, 3), 1024, 64, 517, 256), ((2, 1), 3072, 128, 2301, 384)]


@pytest.mark.parametrize(("shape", "dtype", "lnc"), combine(SHAPES), ids=str)
def test_as_exact_as_the_model(shape: Any, dtype: str, lnc: int) -> None:
    heads, slots, dim, start, count = shape
    check(draw_prompt(*heads, slots, dim, dtype), start, count, slots, lnc=lnc)


@pytest.mark.parametrize("size", [60.0, 1e-3])
def test_extreme_scores(size: float) -> None:
    """Large scores need the running max, tiny ones give equal weights."""
    x = draw_prompt(2, 1, 3072, 64, "fp32")
    x.q = (x.q * size).astype(np.float32)
    check(x, 2500, 128, 3072, far=400)


# chunks of keys end at 2048 for fp32 and at 4096 for bf16: rows on both sides
@pytest.mark.parametrize(
    ("dtype", "slots", "rows"),
    [
        ("fp32", 3072, 1024),
        *(pytest.param(*way, marks=pytest.mark.slow) for way in (("fp32", 4096, 2048), ("bf16", 5120, 2048))),
    ],
)
def test_bits_of_every_chunk_and_start(dtype: str, slots: int, rows: int) -> None:
    """Chunks of several sizes, at starts that are multiples of 128 or not, on one core and on two."""
    x = draw_prompt(1, 1, slots, 64, dtype)
    last = slots - rows
    full = {start: run(x, start, rows, slots) for start in (0, last)}
    for start, count, lnc in ((last, rows // 4, 1), (last + 37, 256, 1), (last + 600, 128, 1), (slots - 384, 384, 2)):
        part = run(x, start, count, slots, lnc=lnc)
        assert same(part, full[last][:, :, start - last : start - last + count].copy()), f"C={count} start={start}"
    # shorter caches, whose last chunk is narrower
    for start, count, short in ((0, 128, 1024), (rows // 2 + 1, 256, 2048)):
        assert same(run(x, start, count, short), full[0][:, :, start : start + count].copy()), f"S={short}"


def test_bits_of_neighbours() -> None:
    """Queries, keys and values of later rows and the order of pages do not change a row; earlier values do."""
    x = draw_prompt(2, 1, 1024, 64, "bf16")
    before = run(x, 600, 128, 1024)
    x.q[:, :, 601:], x.keys[:, :, 601:], x.values[:, :, 601:] = 3, 1e30, -1e30
    after = run(x, 600, 128, 1024, seed=5)
    assert same(after[:, :, :1].copy(), before[:, :, :1].copy())
    assert not same(after, before)
    x.values[:, :, 0] *= 2
    assert not same(run(x, 600, 128, 1024)[:, :, :1].copy(), before[:, :, :1].copy())


@pytest.mark.parametrize("lnc", [1, 2])
def test_rows_that_are_appended(lnc: int) -> None:
    """Rows go to their pages, those beyond the table or in page 0 to spare pages."""
    x, start, count = draw_prompt(6, 3, 1024, 64, "bf16"), 413, 640
    pools, table = pooled(x.keys, x.values)
    table[0, 5] = 0
    new = [np.resize(rows[:, :, start:], (1, 3, count, 64)).astype(rows.dtype) for rows in (x.values, x.keys)]
    positions = np.arange(start, start + count, dtype=np.int32)[None]
    before = [pool.copy() for pool in pools]
    with using("strict"):
        append_rows(*new, *pools, positions, table, lnc=lnc)
    for pool, old, rows in zip(pools, before, new, strict=True):
        law.append_rows(rows, old, positions, table)
        assert same(pool[:-SPARE_PAGES], old[:-SPARE_PAGES])
        assert pool[-lnc].any()
