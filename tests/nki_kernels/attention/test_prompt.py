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
SHAPES += [((2, 1), 2048, 256, 1100, 256)]


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
