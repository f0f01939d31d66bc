"""GpSimd instructions and generators against an independent reading of the manual."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nkisim.isa as nisa
import nkisim.language as nl
from nkisim.tests.harness import draw, on_device

COMMON = settings(max_examples=25, deadline=None)
RANDOM = np.random.default_rng(7)


@COMMON
@given(st.integers(-5, 5), st.integers(-3, 3), st.integers(1, 6), st.integers(1, 6))
def test_iota_and_affine_select(step: int, multiplier: int, outer: int, inner: int) -> None:
    pattern = [[step, outer], [1, inner]]
    shape = (16, outer * inner)

    def body(numbers: Any, chosen: Any, p: Any) -> None:
        nisa.iota(dst=numbers, pattern=pattern, offset=3, channel_multiplier=multiplier)
        nisa.affine_select(
            dst=chosen,
            pattern=pattern,
            offset=3,
            channel_multiplier=multiplier,
            on_true_tile=p,
            on_false_value=-9.0,
            cmp_op=nl.greater,
        )

    x = draw(shape, seed=12)
    numbers, chosen = on_device(body, (x,), [(shape, "int32"), (shape, "float32")])
    wanted = [[3 + r * multiplier + w * step + i for w in range(outer) for i in range(inner)] for r in range(16)]
    assert numbers.tolist() == wanted
    assert np.array_equal(chosen, np.where(np.array(wanted) > 0, x, np.float32(-9)))


def test_gathers_inside_and_across_partitions() -> None:
    x = draw((32, 20), seed=13)
    index = RANDOM.integers(0, 20, (32, 7)).astype(np.uint32)
    found = on_device(
        lambda d, p, i: nisa.nc_n_gather(dst=d, data=p, indices=i),
        (x, index),
        [((32, 7), "float32")],
    )
    assert np.array_equal(found, np.take_along_axis(x, index.astype(int), axis=1))
    local = RANDOM.integers(0, 9, (32, 2)).astype(np.uint16) * 2
    found = on_device(
        lambda d, p, i: nisa.local_gather(dst=d, src_buffer=p, index=i, num_elem_per_idx=2),
        (x, local),
        [((32, 64), "float32")],
    )
    for group in range(2):
        rows = slice(16 * group, 16 * group + 16)
        flat = [int(local[p + 16 * group, c]) for c in range(2) for p in range(16)]
        wanted = np.concatenate([x[rows, f : f + 2] for f in flat], axis=1)
        assert np.array_equal(found[rows], wanted)


def test_stream_shuffle_moves_rows_and_keeps_255() -> None:
    x = draw((64, 5), seed=14)
    mask = [31 - i for i in range(31)] + [255]

    def body(dst: Any, p: Any) -> None:
        nisa.memset(dst=dst, value=7.0)
        nisa.nc_stream_shuffle(dst=dst, src=p, shuffle_mask=mask)

    found = on_device(body, (x,), [(x.shape, "float32")])
    for quadrant in (0, 32):
        assert np.array_equal(found[quadrant : quadrant + 31], x[quadrant + 1 : quadrant + 32][::-1])
        assert (found[quadrant + 31] == 7).all()


def test_nonzero_sequence_bounds_and_partition_reduce() -> None:
    bits = np.zeros((16, 8), np.int32)
    bits[0] = [0, 1, 1, 0, 0, 1, 0, 0]

    def nonzero(dst: Any, p: Any) -> None:
        nisa.memset(dst=dst, value=0)
        nisa.nonzero_with_count(dst=dst, src=p, index_offset=16)

    assert on_device(nonzero, (bits,), [((16, 9), "int32")])[0].tolist() == [17, 18, 21, -1, -1, -1, -1, -1, 3]
    ids = np.array([[0, 1, 1, 2, 2, 2, 0]], np.int32)
    found = on_device(lambda d, p: nisa.sequence_bounds(dst=d, segment_ids=p), (ids,), [((1, 2, 7), "int32")])
    assert found.tolist() == [[[7, 1, 1, 3, 3, 3, 7], [-1, 3, 3, 6, 6, 6, -1]]]
    x = draw((32, 5), seed=15)
    for op, fn in ((nl.add, np.sum), (nl.average, np.mean), (nl.maximum, np.max)):
        total = on_device(
            lambda d, p, op=op: nisa.tensor_partition_reduce(dst=d, op=op, data=p),
            (x,),
            [((1, 5), "float32")],
        )
        np.testing.assert_allclose(total[0], fn(x.astype(np.float64), axis=0), atol=1e-5)


@pytest.mark.filterwarnings("ignore::nkisim.errors.AmbiguousManual")
def test_topk_reads_the_snake_and_ascends() -> None:
    x = draw((32, 4), "bfloat16", 16)
    n, k = 50, 8

    def body(values: Any, index: Any, p: Any) -> None:
        nisa.memset(dst=values, value=0.0)
        nisa.memset(dst=index, value=0)
        nisa.topk(values, index, p, n)

    values, index = on_device(body, (x,), [((32, k), "bfloat16"), ((32, k), "uint32")])
    for first in (0, 16):
        snake = [float(x[first + i % 16, i // 16]) for i in range(n)]
        assert [float(values[first + j, 0]) for j in range(k)] == sorted(snake)[-k:]
        assert [snake[int(index[first + j, 0])] for j in range(k)] == sorted(snake)[-k:]


def test_random_bits_are_seeded_and_xorwow_is_marsaglias() -> None:
    seed = np.array([[5]], np.uint32)

    def body(first: Any, second: Any, s: Any) -> None:
        for dst in (first, second):
            nisa.set_rng_seed(s)
            nisa.rng(dst=dst)

    first, second = on_device(body, (seed,), [((4, 9), "uint32")] * 2)
    assert np.array_equal(first, second)
    assert len(np.unique(first)) == 36
    state = np.array([[123456789, 362436069, 521288629, 88675123, 5783321, 6615241]], np.uint32)

    def lanes(dst: Any, after: Any, s: Any) -> None:
        nisa.rand_set_state(s)
        nisa.rng(dst=dst, engine=nisa.engine.gpsimd)
        nisa.rand_get_state(after)

    words, after = on_device(lanes, (state,), [((1, 3), "uint32"), ((1, 6), "uint32")])
    x, y, z, w, v, d = (int(i) for i in state[0])
    for word in words[0]:
        t = x ^ (x >> 2)
        x, y, z, w, v = y, z, w, v, (v ^ (v << 4) ^ t ^ (t << 1)) % 2**32
        d = (d + 362437) % 2**32
        assert word == (d + v) % 2**32
    assert after[0].tolist() == [x, y, z, w, v, d]


def test_dropout_keeps_or_zeroes() -> None:
    x = np.ones((64, 64), np.float32)
    found = on_device(lambda d, p: nisa.dropout(dst=d, data=p, prob=0.25), (x,), [(x.shape, "float32")])
    assert set(np.unique(found)) == {0.0, 1.0}
    assert 0.2 < (found == 0).mean() < 0.3
