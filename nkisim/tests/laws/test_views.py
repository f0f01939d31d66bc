"""Views address what numpy addresses, and refuse what the hardware cannot."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nkisim.language as nl
from harness import out, run, tile
from nkisim import errors

SHAPE = (8, 3, 4, 5)
DATA = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)
COMMON = settings(max_examples=60, deadline=None)


def seen(view: Any, source: Any = DATA, on_chip: bool = True) -> Any:
    """Return what a view of an SBUF (or HBM) copy of `source` holds."""
    result: list[Any] = []

    def kernel(array: Any) -> None:
        result.append(np.asarray(view(nl.load(array) if on_chip else array)))

    run(kernel, source)
    return result[0]


def index(size: int) -> st.SearchStrategy[Any]:
    slices = st.tuples(st.integers(0, size - 1), st.integers(1, size), st.integers(1, 2)).map(
        lambda t: slice(t[0], max(t[1], t[0] + 1), t[2])
    )
    return st.one_of(st.integers(-size, size - 1), slices, st.just(slice(None)))


@COMMON
@given(st.tuples(*(index(n) for n in SHAPE)))
def test_hbm_subscripts_are_numpys(key: tuple[Any, ...]) -> None:
    wanted = DATA[key]
    result = seen(lambda t: t[key], on_chip=False)
    assert np.array_equal(result.reshape(wanted.shape), wanted)
    assert result.ndim == max(1, wanted.ndim)


@COMMON
@given(st.tuples(*(index(n) for n in SHAPE[1:])))
def test_sbuf_subscripts_keep_two_dimensions(key: tuple[Any, ...]) -> None:
    wanted = DATA[(slice(2, 6), *key)]
    result = seen(lambda t: t[(slice(2, 6), *key)])
    assert np.array_equal(result.reshape(wanted.shape), wanted)
    assert result.ndim == max(2, wanted.ndim)
    assert result.shape[0] == 4


def test_integers_keep_the_partition_dimension() -> None:
    assert seen(lambda t: t[3]).shape == (1, 3, 4, 5)
    assert seen(lambda t: t[0, 0, 1, 2]).shape == (1, 1)
    assert seen(lambda t: t[..., 2]).shape == (8, 3, 4)


@COMMON
@given(st.permutations([1, 2, 3]))
def test_permute_reshape_and_flatten(order: list[int]) -> None:
    dims = [0, *order]
    assert np.array_equal(seen(lambda t: t.permute(dims)), DATA.transpose(dims))
    assert np.array_equal(seen(lambda t: t.flatten_dims(1, 2).reshape_dim(1, (2, -1))), DATA.reshape(8, 2, 6, 5))
    assert np.array_equal(seen(lambda t: t.reshape((8, 6, 10))), DATA.reshape(8, 6, 10))


def test_rearrange_names_dimensions() -> None:
    names = (("p", "a", ("b", "c"), "d"), ("p", ("c", "d"), "a", "b"))
    result = seen(lambda t: t.rearrange(*names, {"c": 2}))
    wanted = DATA.reshape(8, 3, 2, 2, 5).transpose(0, 3, 4, 1, 2).reshape(8, 10, 3, 2)
    assert np.array_equal(result, wanted)


def test_broadcast_expand_squeeze_select_and_slice() -> None:
    result = seen(lambda t: t.expand_dim(1).broadcast(1, 3))
    assert np.array_equal(result, np.broadcast_to(DATA[:, None], (8, 3, *SHAPE[1:])))
    assert np.array_equal(seen(lambda t: t.expand_dim(2).squeeze_dim(2)), DATA)
    assert np.array_equal(seen(lambda t: t.select(2, 1)), DATA[:, :, 1])
    assert np.array_equal(seen(lambda t: t.slice(3, 1, 5, 2)), DATA[:, :, :, 1:5:2])


@COMMON
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.integers(0, 30))
def test_access_patterns_are_strided_loops(a: int, b: int, count: int, offset: int) -> None:
    pattern = [[60, 8], [a * 3, count], [b, 3]]
    flat = DATA.reshape(8, 60)
    reach = offset + a * 3 * (count - 1) + 2 * b
    if reach >= 60:
        with pytest.raises(errors.OutOfRange):
            seen(lambda t: t.ap(pattern, offset=offset))
        return
    result = seen(lambda t: t.ap(pattern, offset=offset))
    wanted = [[[row[offset + i * a * 3 + j * b] for j in range(3)] for i in range(count)] for row in flat]
    assert result.tolist() == wanted


def test_reinterpretation_copies_no_bits() -> None:
    words = np.arange(32, dtype=np.uint32).reshape(4, 8) * 0x01010101
    result = seen(lambda t: t.view(nl.uint16), words)
    assert np.array_equal(result, words.view(np.uint16))
    result = seen(lambda t: t.ap([[16, 4], [2, 8]], offset=1, dtype=nl.uint16), words)
    assert np.array_equal(result, words.view(np.uint16)[:, 1::2])


def test_patterns_on_shifted_views_warn() -> None:
    with pytest.warns(errors.AmbiguousManual, match="ap on a view"):
        result = seen(lambda t: t[:, 1:].ap([[60, 8], [1, 2]], offset=3))
    assert np.array_equal(result, DATA.reshape(8, 60)[:, 23:25])


def test_slices_made_again_are_the_same_view_and_others_are_not() -> None:
    def kernel() -> Any:
        x = tile(8, 8)
        keys = [slice(0, 2), (slice(0, 2), slice(1, 3)), 0, (0, 0), slice(0, 1), (..., 0), (slice(0, 2), 1),
                slice(None, 2), (slice(0, 2), slice(0, 8, 2))]  # fmt: skip
        views = [x[key] for key in keys]
        assert all(x[key] is view for key, view in zip(keys, views, strict=True))
        seen = {(v.shape, v.strides, v.offset) for v in views}
        # on chip, x[0] is x[0:1], and x[:2] is x[0:2]
        assert len(seen) == len(keys) - 2
        wanted = [(2, 8), (2, 2), (1, 8), (1, 1), (1, 8), (8, 1), (2, 1), (2, 8), (2, 4)]
        assert [v.shape for v in views] == wanted
        return out(x)

    run(kernel)
