"""Tensor Engine and DMA, property-tested: products, transposes, copies, gathers, sums in flight."""

from __future__ import annotations

from dataclasses import replace

from properties.tiles import *

NARROW = ("bfloat16", "float16", "float8_e4m3", "float8_e5m2")
TWO_BYTES = ("bfloat16", "float16", "int16", "uint16")
SIZES = st.sampled_from([1, 2, 16, 31, 64, 100, 128])


def tile_places(data: Any, shape: Shape) -> Place:
    """Any place in SBUF from partition 0: the partitions are the contraction."""
    return replace(data.draw(places(shape, psum=False)), start=0)


@covers("nc_matmul")
@PROPERTY
@given(st.data(), SIZES, SIZES, st.integers(1, 90), st.integers(1, 3))
def test_nc_matmul(data: Any, k: int, m: int, n: int, times: int) -> None:
    wide_types = data.draw(st.booleans())
    a, b = ("float32", "float32") if wide_types else [data.draw(st.sampled_from(NARROW)) for _ in range(2)]
    x, y = values((k, m), a, 1), values((k, n), b, 2)

    def body(dst: Any, stationary: Any, moving: Any) -> None:
        for i in range(times):
            nisa.nc_matmul(dst=dst, stationary=stationary, moving=moving, accumulate=i > 0)

    spot = replace(data.draw(places((m, n))), psum=True)
    result = laid_out(
        body, [(x, tile_places(data, x.shape)), (y, tile_places(data, y.shape))], [((m, n), "float32", spot)]
    )
    scale = times * np.abs(wide(x)).T @ np.abs(wide(y))
    agree(result, times * (wide(x).T @ wide(y)), "float32", k + times, scale)


@covers("nc_matmul")
@PROPERTY
@given(SIZES, SIZES, st.integers(1, 60))
def test_products_of_small_integers_are_exact(k: int, m: int, n: int) -> None:
    x, y = (np.random.default_rng(s).integers(-8, 8, (k, c)).astype(np.float32) for s, c in ((1, m), (2, n)))
    result = laid_out(
        lambda dst, p, q: nisa.nc_matmul(dst=dst, stationary=p, moving=q, accumulate=False),
        [(x, Place()), (y, Place())],
        [((m, n), "float32", Place(psum=True))],
    )
    assert np.array_equal(result, x.T @ y)


@covers("nc_transpose")
@PROPERTY
@given(st.data(), SIZES, SIZES, st.sampled_from(["float32", "bfloat16", "float16"]))
def test_nc_transpose(data: Any, rows: int, columns: int, dtype: str) -> None:
    x = values((rows, columns), dtype, 1)
    small = rows <= 32 and columns <= 32
    psum = not small or data.draw(st.booleans())
    spot = replace(data.draw(places((columns, rows))), psum=psum)
    result = laid_out(
        lambda dst, p: nisa.nc_transpose(dst=dst, data=p),
        [(x, tile_places(data, x.shape))],
        [((columns, rows), dtype, spot)],
    )
    assert result.tobytes() == np.ascontiguousarray(x.T).tobytes()


@covers("dma_copy")
@PROPERTY
@given(st.data(), SHAPES, st.sampled_from(FLOATS + INTEGERS), st.sampled_from(FLOATS + INTEGERS))
def test_dma_copy(data: Any, shape: Shape, dtype: str, other: str) -> None:
    x = values(shape, dtype, 1)
    result = laid_out(
        lambda dst, p: nisa.dma_copy(dst=dst, src=p),
        [(x, data.draw(places(shape, psum=False)))],
        [(shape, other, data.draw(places(shape, psum=False)))],
    )
    if dtype == other:
        assert result.tobytes() == x.tobytes()
    else:
        agree(result, wide(x), other)


@covers("dma_copy")
@PROPERTY
@given(st.data(), st.integers(1, 40), st.integers(1, 9), st.integers(1, 64), st.sampled_from(FLOATS))
def test_gather_and_scatter_of_rows(data: Any, rows: int, columns: int, count: int, dtype: str) -> None:
    count = min(rows, count)
    source, base = values((rows, columns), dtype, 1), values((rows, columns), dtype, 2)
    index = np.random.default_rng(3).permutation(rows)[:count, None].astype(np.uint32)
    beyond = data.draw(st.sets(st.integers(0, count - 1)))
    index[sorted(beyond)] = rows + 5
    pattern, skip = [[columns, count], [1, columns]], nisa.oob_mode.skip

    def kernel(source: Any, base: Any, index: Any) -> Any:
        where, got = nl.load(index), nl.ndarray((count, columns), dtype=source.dtype)
        nisa.memset(dst=got, value=0.0)
        nisa.dma_copy(dst=got, src=source.ap(pattern, vector_offset=where), oob_mode=skip)
        nisa.dma_copy(dst=base.ap(pattern, vector_offset=where), src=got, oob_mode=skip)
        return out(got), base

    inside = [i for i in range(count) if i not in beyond]
    picked, target = np.zeros((count, columns), source.dtype), base.copy()
    picked[inside] = source[index[inside, 0]]
    target[index[inside, 0]] = source[index[inside, 0]]
    got, scattered = on_hbm(kernel, [source, base, index])
    assert got.tobytes() == picked.tobytes()
    assert scattered.tobytes() == target.tobytes()


@covers("dma_copy")
@PROPERTY
@given(st.integers(2, 30), st.integers(1, 8), st.data())
def test_a_run_time_start_moves_the_view(columns: int, width: int, data: Any) -> None:
    width = min(width, columns)
    start = data.draw(st.integers(0, columns - width))
    x = values((12, columns), "float32", 1)

    def kernel(source: Any, start: Any) -> Any:
        register, got = nisa.register_alloc(), nl.ndarray((12, width), dtype=nl.float32)
        nisa.register_load(register, start)
        nisa.dma_copy(dst=got, src=source[:, nl.ds(register, width)])
        again = nl.ndarray((12, width), dtype=nl.float32)
        pattern = [[columns, 12], [1, width]]
        nisa.dma_copy(dst=again, src=source.ap(pattern, scalar_offset=nl.load(start), indirect_dim=1))
        return out(got), out(again)

    for result in on_hbm(kernel, [x, np.array([[start]], np.int32)]):
        assert np.array_equal(result, x[:, start : start + width])


@covers("dma_transpose")
@PROPERTY
@given(st.data(), st.sampled_from([(1, 0), (2, 1, 0), (3, 1, 2, 0)]), st.sampled_from(TWO_BYTES))
def test_dma_transpose(data: Any, axes: tuple[int, ...], dtype: str) -> None:
    shape = tuple(data.draw(st.integers(1, 12)) for _ in axes)
    x = values(shape, dtype, 1)

    def kernel(source: Any) -> Any:
        got = nl.ndarray(tuple(shape[a] for a in axes), dtype=source.dtype)
        nisa.dma_transpose(dst=got, src=source, axes=axes)
        return out(got)

    assert on_hbm(kernel, [x])[()].tobytes() == np.ascontiguousarray(x.transpose(axes)).tobytes()


@covers("dma_transpose")
@PROPERTY
@given(st.data(), st.integers(1, 8), st.integers(1, 64), st.sampled_from(["bfloat16", "float16"]))
def test_indirect_dma_transpose(data: Any, sixteens: int, columns: int, dtype: str) -> None:
    count, stored = 16 * sixteens, 50
    x = values((stored, columns), dtype, 1)
    index = (values((count, 1), "uint32", 2) % stored).astype(np.uint32)
    beyond = sorted(data.draw(st.sets(st.integers(0, count - 1), max_size=4)))
    index[beyond] = stored

    def kernel(source: Any, rows: Any) -> Any:
        got = nl.ndarray((columns, count), dtype=source.dtype)
        nisa.memset(dst=got, value=MARK)
        picked = source.ap([[columns, count], [1, columns]], vector_offset=nl.load(rows))
        nisa.dma_transpose(dst=got, src=picked, axes=(1, 0), oob_mode=nisa.oob_mode.skip)
        return out(got)

    wanted = np.full((columns, count), MARK).astype(x.dtype)
    inside = [i for i in range(count) if i not in beyond]
    wanted[:, inside] = x[index[inside, 0]].T
    assert on_hbm(kernel, [x, index]).tobytes() == wanted.tobytes()


@covers("dma_compute")
@PROPERTY
@given(st.data(), SHAPES, st.lists(st.sampled_from(FLOATS), min_size=1, max_size=16), st.sampled_from(FLOATS))
def test_dma_compute(data: Any, shape: Shape, dtypes: list[str], result: str) -> None:
    sources = [values(shape, d, i) for i, d in enumerate(dtypes)]
    output = laid_out(
        lambda dst, *srcs: nisa.dma_compute(dst=dst, srcs=list(srcs), reduce_op=nl.add),
        [(s, data.draw(places(shape, psum=False))) for s in sources],
        [(shape, result, data.draw(places(shape, psum=False)))],
    )
    scale = sum(np.abs(wide(s)) for s in sources)
    agree(output, sum(wide(s) for s in sources), result, len(sources) - 1, scale)


@covers("dma_compute")
@PROPERTY
@given(st.integers(1, 30), st.integers(1, 8), st.integers(1, 30), st.booleans(), st.data())
def test_sums_into_and_from_rows(rows: int, columns: int, count: int, scatter: bool, data: Any) -> None:
    count = min(rows, count)
    base, add = values((rows, columns), "float32", 1), values((count, columns), "float32", 2)
    index = np.random.default_rng(3).permutation(rows)[:count, None].astype(np.uint32)
    beyond = sorted(data.draw(st.sets(st.integers(0, count - 1), max_size=3)))
    index[beyond] = np.arange(len(beyond), dtype=np.uint32)[:, None] + rows

    def kernel(base: Any, add: Any, index: Any) -> Any:
        tile = nl.load(add)
        where = base.ap([[columns, count], [1, columns]], vector_offset=nl.load(index))
        dst, other = (where, tile) if scatter else (tile, where)
        nisa.dma_compute(dst=dst, srcs=[dst, other], reduce_op=nl.add, oob_mode=nisa.oob_mode.skip)
        return base if scatter else out(tile)

    wanted = (base if scatter else add).copy()
    for i in (i for i in range(count) if i not in beyond):
        to = index[i, 0] if scatter else i
        wanted[to] = base[index[i, 0]] + add[i]
    assert np.array_equal(on_hbm(kernel, [base, add, index]), wanted)


@covers("dma_copy")
@PROPERTY
@given(st.integers(1, 20), st.integers(1, 6), st.data())
def test_a_gather_into_a_scatter_skips_what_either_misses(rows: int, columns: int, data: Any) -> None:
    x, base = values((rows, columns), "float32", 1), values((rows, columns), "float32", 2)
    orders = [np.random.default_rng(s).permutation(rows)[:, None].astype(np.uint32) for s in (3, 4)]
    for order in orders:
        order[sorted(data.draw(st.sets(st.integers(0, rows - 1))))] = rows
    pattern = [[columns, rows], [1, columns]]

    def kernel(source: Any, target: Any, at: Any, to: Any) -> Any:
        nisa.dma_copy(
            dst=target.ap(pattern, vector_offset=nl.load(to)),
            src=source.ap(pattern, vector_offset=nl.load(at)),
            oob_mode=nisa.oob_mode.skip,
        )
        return target

    wanted = base.copy()
    for at, to in zip(orders[0][:, 0], orders[1][:, 0], strict=True):
        if at < rows and to < rows:
            wanted[to] = x[at]
    assert np.array_equal(on_hbm(kernel, [x, base, *orders]), wanted)
