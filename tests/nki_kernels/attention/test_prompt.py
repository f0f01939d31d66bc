"""Prompt attention: against its law in fp64, and the bits of a row, whatever chunk of a prompt it comes in."""

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
from tests.nki_kernels.attention.inputs import Dims, Inputs, draw, model_attention, pooled, same


def draw_prompt(heads: int, kv_heads: int, slots: int, dim: int, dtype: str) -> Inputs:
    """Queries, keys and values of a whole prompt, whose keys and values are its new ones too."""
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
    """At most twice as far from the law as the model's attention of these rows; `far` positions more are too many."""
    chunk, (keys, values) = x.part(slice(1), slice(start, start + count)), (x.keys, x.values)
    theirs, rows = model_attention(replace(chunk, keys=keys, values=values))[0], chunk.q[0].astype(np.float64)
    wide = keys[0].astype(np.float64), values[0].astype(np.float64)
    exact, wrong = (law.prompt_attention(rows, wide, first)[None] for first in (start, start + far))
    assert is_close(run(x, start, count, slots, **options), theirs, exact)
    assert not is_close(wrong, theirs, exact)


SHAPES = [((1, 1), 1024, 64, 0, 128), ((6, 3), 1024, 64, 517, 256), ((2, 1), 3072, 128, 2301, 384)]
WAYS = [(*shape, dtype, lnc) for shape in SHAPES for dtype in ("fp32", "bf16") for lnc in (1, 2)]


@pytest.mark.parametrize(
    ("heads", "slots", "dim", "start", "count", "dtype", "lnc"),
    [way if n in (1, 6, 8) else pytest.param(*way, marks=pytest.mark.slow) for n, way in enumerate(WAYS)],
    ids=str,
)
def test_as_exact_as_the_model(
    heads: tuple[int, int], slots: int, dim: int, start: int, count: int, dtype: str, lnc: int
) -> None:
    check(draw_prompt(*heads, slots, dim, dtype), start, count, slots, lnc=lnc)


@pytest.mark.parametrize("size", [60.0, 1e-3])
def test_extreme_scores(size: float) -> None:
    """Large scores need the maximum, tiny ones make all weights equal."""
    x = draw_prompt(2, 1, 3072, 64, "fp32")
    x.q = (x.q * size).astype(np.float32)
    check(x, 2500, 128, 3072, far=400)


# of fp32 a chunk of keys ends at 2048, of bf16 at 4096: both sides of the border
@pytest.mark.parametrize(
    ("dtype", "slots", "rows"),
    [
        ("fp32", 3072, 1024),
        *(pytest.param(*way, marks=pytest.mark.slow) for way in (("fp32", 4096, 2048), ("bf16", 5120, 2048))),
    ],
)
def test_bits_of_every_chunk_and_start(dtype: str, slots: int, rows: int) -> None:
    """Rows in chunks of several sizes, at starts that are multiples of 128 or not, on one core and on two."""
    x = draw_prompt(1, 1, slots, 64, dtype)
    last = slots - rows
    whole = {start: run(x, start, rows, slots) for start in (0, last)}
    for start, count, lnc in ((last, rows // 4, 1), (last + 37, 256, 1), (last + 600, 128, 1), (slots - 384, 384, 2)):
        part = run(x, start, count, slots, lnc=lnc)
        assert same(part, whole[last][:, :, start - last : start - last + count].copy()), f"C={count} start={start}"
    # shorter caches, whose last chunk is narrower
    for start, count, short in ((0, 128, 1024), (rows // 2 + 1, 256, 2048)):
        assert same(run(x, start, count, short), whole[0][:, :, start : start + count].copy()), f"S={short}"


def test_bits_of_neighbours() -> None:
    """Other rows' queries, keys and values after a row, and the order of pages, do not affect it; its own do."""
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
    """Rows of a prompt in their pages, from within one on; those beyond the table or in page 0 in spare pages."""
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
