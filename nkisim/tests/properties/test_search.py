"""Searches and statistics of the Vector Engine, and top-k, property-tested against loops."""

from __future__ import annotations

import pytest

from properties.tiles import *

ROWS = st.sampled_from([1, 16, 33, 64, 128])


def few(shape: tuple[int, int], dtype: str, seed: int) -> Any:
    """Small integers, so that values repeat."""
    return np.random.default_rng(seed).integers(-6, 6, shape).astype(values((1,), dtype, 0).dtype)


@covers("max8")
@PROPERTY
@given(st.data(), ROWS, st.integers(8, 60), st.sampled_from(FLOATS), st.booleans())
def test_max8(data: Any, rows: int, columns: int, dtype: str, repeats: bool) -> None:
    x = (few if repeats else values)((rows, columns), dtype, 1)
    result = laid_out(
        lambda dst, p: nisa.max8(dst=dst, src=p),
        [(x, data.draw(places(x.shape)))],
        [((rows, 8), "float32", data.draw(places((rows, 8), folded=False)))],
    )
    for row in range(rows):
        assert result[row].tolist() == sorted(wide(x)[row].tolist(), reverse=True)[:8]


def places_of(row: Any, wanted: Any, order: list[int]) -> list[int]:
    """Give each value, taken in `order`, its first place that no value before it took; -1 where there is none."""
    taken: set[int] = set()
    result = [-1] * 8
    for i in order:
        for at, value in enumerate(row):
            if value == wanted[i] and at not in taken:
                taken.add(at)
                result[i] = at
                break
    return result


@covers("nc_find_index8")
@PROPERTY
@given(st.data(), ROWS, st.integers(8, 40), st.sampled_from(FLOATS[:3]), st.sampled_from(["uint16", "uint32"]))
def test_nc_find_index8(data: Any, rows: int, columns: int, dtype: str, index: str) -> None:
    x, sought = few((rows, columns), dtype, 1), few((rows, 8), dtype, 2)
    result = laid_out(
        lambda dst, p, v: nisa.nc_find_index8(dst=dst, data=p, vals=v),
        [(x, data.draw(places(x.shape))), (sought, data.draw(places((rows, 8))))],
        [((rows, 8), index, data.draw(places((rows, 8))))],
    )
    missing = np.iinfo(index).max
    for row in range(rows):
        wanted = places_of(x[row], sought[row], list(range(8)))
        assert result[row].tolist() == [missing if w < 0 else w for w in wanted]


@covers("nc_match_replace8")
@PROPERTY
@given(st.data(), ROWS, st.integers(8, 40), st.sampled_from(FLOATS[:3]))
def test_nc_match_replace8(data: Any, rows: int, columns: int, dtype: str) -> None:
    x, sought = few((rows, columns), dtype, 3), few((rows, 8), dtype, 4)
    result, order = laid_out(
        lambda dst, at, p, v: nisa.nc_match_replace8(dst=dst, data=p, vals=v, imm=-99.0, dst_idx=at),
        [(x, data.draw(places(x.shape))), (sought, data.draw(places((rows, 8))))],
        [(x.shape, dtype, data.draw(places(x.shape))), ((rows, 8), "uint32", data.draw(places((rows, 8))))],
    )
    for row in range(rows):
        at = places_of(x[row], sought[row], list(range(7, -1, -1)))
        wanted = wide(x)[row]
        wanted[[i for i in at if i >= 0]] = -99
        assert result[row].astype(float).tolist() == wanted.tolist()
        assert order[row].tolist() == [2**32 - 1 if i < 0 else i for i in at]


@covers("bn_stats", "bn_aggr")
@PROPERTY
@given(st.data(), ROWS, st.lists(st.integers(2, 40), min_size=1, max_size=4), st.sampled_from(FLOATS[:3]))
def test_statistics(data: Any, rows: int, widths: list[int], dtype: str) -> None:
    x = values((rows, sum(widths)), dtype, 5)
    parts, pair = (rows, 6 * len(widths)), (rows, 2)

    def body(stats: Any, result: Any, p: Any) -> None:
        at = 0
        for i, width in enumerate(widths):
            nisa.bn_stats(dst=stats[:, 6 * i : 6 * i + 6], data=p[:, at : at + width])
            at += width
        nisa.bn_aggr(dst=result, data=stats)

    stats, output = laid_out(
        body,
        [(x, data.draw(places(x.shape, folded=False)))],
        [(parts, "float32", data.draw(places(parts, folded=False))), (pair, "float32", data.draw(places(pair)))],
    )
    exact = wide(x)
    even, odd = exact[:, : widths[0] : 2], exact[:, 1 : widths[0] : 2]
    for first, half in ((0, even), (3, odd)):
        assert (stats[:, first] == half.shape[1]).all()
        agree(stats[:, first + 1], half.mean(1), "float32", 64, np.abs(half).max(1))
        agree(stats[:, first + 2], half.var(1) * half.shape[1], "float32", 256, np.square(half).sum(1))
    agree(output[:, 0], exact.mean(1), "float32", 256, np.abs(exact).max(1))
    agree(output[:, 1], exact.var(1), "float32", 1024, np.square(exact).max(1))


@covers("topk")
@pytest.mark.filterwarnings("ignore::nkisim.errors.AmbiguousManual")
@PROPERTY
@given(st.sampled_from([16, 32, 64, 128]), st.integers(1, 6), st.data())
def test_topk(rows: int, columns: int, data: Any) -> None:
    n = data.draw(st.integers(max(8, 16 * columns - 15), 16 * columns))
    k = data.draw(st.integers(1, n // 16 + 1))
    x = values((rows, columns), "bfloat16", 6)
    top, index = laid_out(
        lambda v, i, p: nisa.topk(v, i, p, n),
        [(x, data.draw(places(x.shape, psum=False)))],
        [((rows, k), "bfloat16", Place()), ((rows, k), "uint32", Place())],
    )
    for first in range(0, rows, 16):
        snake = [float(x[first + i % 16, i // 16]) for i in range(n)]
        best = sorted(snake)[-k:]
        got = [float(top[first + j % 16, j // 16]) for j in range(k)]
        where = [int(index[first + j % 16, j // 16]) for j in range(k)]
        assert got == best
        assert [snake[w] for w in where] == best
        # the places that no result takes stay as they are
        rest = [(first + j % 16, j // 16) for j in range(k, 16 * k)]
        assert all(float(top[at]) == MARK for at in rest)
