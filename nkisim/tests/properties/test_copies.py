"""Copies, constants and selections, property-tested over places and dtypes."""

from __future__ import annotations

from properties.tiles import *

COMPARE = {
    "equal": np.equal, "less": np.less, "less_equal": np.less_equal, "greater": np.greater,
    "greater_equal": np.greater_equal,
}  # fmt: skip
LOWEST = np.float32(-3.4028234663852886e38)
ENGINES = st.sampled_from(["vector", "scalar", "gpsimd", "unknown"])


@covers("tensor_copy")
@PROPERTY
@given(st.data(), SHAPES, st.sampled_from(FLOATS + INTEGERS), st.sampled_from(FLOATS + INTEGERS), ENGINES)
def test_tensor_copy(data: Any, shape: Shape, dtype: str, out: str, engine: str) -> None:
    x, psum = values(shape, dtype, 1), engine != "gpsimd"
    result = laid_out(
        lambda dst, p: nisa.tensor_copy(dst=dst, src=p, engine=getattr(nisa.engine, engine)),
        [(x, data.draw(places(shape, psum)))],
        [(shape, out, data.draw(places(shape, psum)))],
    )
    if dtype == out:
        assert result.tobytes() == x.tobytes()
    else:
        agree(result, wide(x), out)


@covers("memset")
@PROPERTY
@given(st.data(), SHAPES, st.sampled_from(FLOATS + INTEGERS), st.integers(0, 100))
def test_memset(data: Any, shape: Shape, dtype: str, number: int) -> None:
    value = number if dtype in INTEGERS else number + 0.3
    result = laid_out(lambda dst: nisa.memset(dst=dst, value=value), [], [(shape, dtype, data.draw(places(shape)))])
    agree(result, np.full(shape, float(value)), dtype)


@covers("tensor_copy_predicated")
@PROPERTY
@given(st.data(), SHAPES, st.sampled_from(FLOATS + INTEGERS), st.sampled_from(["uint8", "uint16", "uint32"]),
       st.booleans(), st.booleans())  # fmt: skip
def test_tensor_copy_predicated(data: Any, shape: Shape, dtype: str, mask: str, reverse: bool, number: bool) -> None:
    x, chosen = values(shape, dtype, 1), (values(shape, mask, 2) % 3).astype(mask)
    result = laid_out(
        lambda dst, p, m: nisa.tensor_copy_predicated(
            dst=dst, src=3 if number else p, predicate=m, reverse_pred=reverse
        ),
        [(x, data.draw(places(shape))), (chosen, data.draw(places(shape, psum=False)))],
        [(shape, dtype, data.draw(places(shape)))],
    )
    taken = (chosen == 0) if reverse else (chosen != 0)
    source = np.full(shape, 3).astype(x.dtype) if number else x
    assert result.tobytes() == np.where(taken, source, np.full(shape, MARK).astype(x.dtype)).tobytes()


@covers("select_reduce")
@PROPERTY
@given(st.data(), SHAPES, st.sampled_from(FLOATS), st.sampled_from(["uint8", "int8", "uint16"]), st.booleans())
def test_select_reduce(data: Any, shape: Shape, dtype: str, mask: str, reverse: bool) -> None:
    one = (shape[0], 1)
    x, column, chosen = values(shape, dtype, 1), values(one, "float32", 3), (values(shape, mask, 2) % 3).astype(mask)

    def body(dst: Any, top: Any, p: Any, m: Any, c: Any) -> None:
        nisa.select_reduce(dst=dst, predicate=m, on_true=p, on_false=c, reduce_res=top,
                           reduce_cmd=nisa.reduce_cmd.reset_reduce, reverse_pred=reverse)  # fmt: skip

    result, top = laid_out(
        body, [(x, data.draw(places(shape))), (chosen, data.draw(places(shape, psum=False))), (column, Place())],
        [(shape, dtype, data.draw(places(shape))), (one, "float32", Place())],
    )  # fmt: skip
    taken = (chosen == 0) if reverse else (chosen != 0)
    wanted = np.where(taken, wide(x), wide(column))
    agree(result, wanted, dtype)
    agree(top, wanted.max(axis=1, keepdims=True), "float32")


@covers("range_select")
@PROPERTY
@given(st.data(), SHAPES, st.sampled_from(FLOATS[:3]), st.sampled_from(sorted(COMPARE)), st.integers(0, 9))
def test_range_select(data: Any, shape: Shape, dtype: str, op: str, start: int) -> None:
    one = (shape[0], 1)
    x = values(shape, dtype, 1)
    low, high = (np.rint(np.abs(values(one, "float32", seed)) * 4) for seed in (2, 3))

    def body(dst: Any, top: Any, p: Any, a: Any, b: Any) -> None:
        nisa.range_select(dst=dst, on_true_tile=p, comp_op0=getattr(nl, op), comp_op1=nl.less, bound0=a, bound1=b,
                          reduce_res=top, range_start=start)  # fmt: skip

    result, top = laid_out(
        body, [(x, data.draw(places(shape))), (low, Place()), (high, Place())],
        [(shape, "float32", data.draw(places(shape))), (one, "float32", Place())],
    )  # fmt: skip
    index = start + np.arange(shape[1])[None]
    wanted = np.where(COMPARE[op](index, low) & (index < high), wide(x), wide(LOWEST))
    agree(result, wanted, "float32")
    agree(top, wanted.max(axis=1, keepdims=True), "float32")


@covers("nc_stream_shuffle")
@PROPERTY
@given(st.data(), st.sampled_from([32, 64, 128]), st.integers(1, 12), st.sampled_from(FLOATS + INTEGERS),
       st.lists(st.sampled_from([*range(32), 255]), min_size=32, max_size=32))  # fmt: skip
def test_nc_stream_shuffle(data: Any, rows: int, columns: int, dtype: str, mask: list[int]) -> None:
    shape = (rows, columns)
    x = values(shape, dtype, 1)
    result = laid_out(lambda dst, p: nisa.nc_stream_shuffle(dst=dst, src=p, shuffle_mask=mask),
                     [(x, data.draw(places(shape)))], [(shape, dtype, data.draw(places(shape)))])  # fmt: skip
    for row in range(rows):
        source = mask[row % 32]
        wanted = np.full(columns, MARK).astype(x.dtype) if source == 255 else x[row // 32 * 32 + source]
        assert result[row].tobytes() == wanted.tobytes()
