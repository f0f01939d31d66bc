"""Element-wise and reducing instructions of the Vector and Scalar Engines, property-tested against fp64."""

from __future__ import annotations

import pytest

from properties.tiles import *

ARITHMETIC = {
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "maximum": np.maximum,
    "minimum": np.minimum, "equal": np.equal, "not_equal": np.not_equal, "less": np.less,
    "less_equal": np.less_equal, "greater": np.greater, "greater_equal": np.greater_equal,
    "logical_and": np.logical_and, "logical_or": np.logical_or, "logical_xor": np.logical_xor,
}  # fmt: skip
BITS = {"bitwise_and": np.bitwise_and, "bitwise_or": np.bitwise_or, "bitwise_xor": np.bitwise_xor}


def by_element(data: Any, op: str, x: Any, y: Any, dtype: str) -> Any:
    """tensor_tensor of operands at any places."""
    return laid_out(
        lambda dst, p, q: nisa.tensor_tensor(dst=dst, data1=p, data2=q, op=getattr(nl, op)),
        [(x, data.draw(places(x.shape))), (y, data.draw(places(x.shape, psum=False)))],
        [(x.shape, dtype, data.draw(places(x.shape)))],
    )


@covers("tensor_tensor")
@pytest.mark.parametrize("op", sorted(ARITHMETIC))
@EACH
@given(data=st.data(), shape=SHAPES, out=st.sampled_from(FLOATS + INTEGERS))
def test_tensor_tensor(data: Any, shape: Shape, op: str, out: str) -> None:
    a, b = (data.draw(st.sampled_from((*FLOATS, "int8", "uint16"))) for _ in range(2))
    x, y = values(shape, a, 1), values(shape, b, 2)
    agree(by_element(data, op, x, y, out), fp64(ARITHMETIC[op], wide(x), wide(y)), out)


@covers("tensor_tensor")
@pytest.mark.parametrize("op", sorted(BITS))
@EACH
@given(data=st.data(), shape=SHAPES, dtype=st.sampled_from(INTEGERS))
def test_tensor_tensor_of_bits(data: Any, shape: Shape, op: str, dtype: str) -> None:
    x, y = values(shape, dtype, 1), values(shape, dtype, 2)
    assert np.array_equal(by_element(data, op, x, y, dtype), BITS[op](x, y))


@covers("tensor_scalar")
@pytest.mark.parametrize("op0", sorted(ARITHMETIC))
@EACH
@given(data=st.data(), shape=SHAPES, dtype=st.sampled_from(FLOATS), out=st.sampled_from(FLOATS + INTEGERS),
       first=st.booleans(), second=st.booleans())  # fmt: skip
def test_tensor_scalar(data: Any, shape: Shape, op0: str, dtype: str, out: str, first: bool, second: bool) -> None:
    op1 = data.draw(st.sampled_from(sorted(ARITHMETIC)))
    x, column = values(shape, dtype, 3), values((shape[0], 1), "float32", 4)
    result = laid_out(
        lambda dst, p, c: nisa.tensor_scalar(
            dst=dst, data=p, op0=getattr(nl, op0), operand0=c, reverse0=first,
            op1=getattr(nl, op1), operand1=1.5, reverse1=second),
        [(x, data.draw(places(shape))), (column, data.draw(places((shape[0], 1), folded=False)))],
        [(shape, out, data.draw(places(shape)))],
    )  # fmt: skip
    c = np.broadcast_to(wide(column), shape)
    inner = fp64(ARITHMETIC[op0], *((c, wide(x)) if first else (wide(x), c)))
    # the engine keeps fp32 between the two operators
    inner = wide(inner.astype(np.float32))
    agree(result, fp64(ARITHMETIC[op1], *((1.5, inner) if second else (inner, 1.5))), out)


@covers("scalar_tensor_tensor")
@PROPERTY
@given(st.data(), SHAPES, st.sampled_from(FLOATS), st.sampled_from(FLOATS), st.booleans(), st.booleans())
def test_scalar_tensor_tensor(data: Any, shape: Shape, dtype: str, out: str, first: bool, second: bool) -> None:
    names = st.sampled_from(sorted(ARITHMETIC))
    op0, op1 = data.draw(names), data.draw(names)
    x, y, column = values(shape, dtype, 3), values(shape, "bfloat16", 4), values((shape[0], 1), "float32", 5)
    result = laid_out(
        lambda dst, p, q, c: nisa.scalar_tensor_tensor(
            dst=dst, data=p, op0=getattr(nl, op0), operand0=c, op1=getattr(nl, op1), operand1=q,
            reverse0=first, reverse1=second),
        [(x, data.draw(places(shape))), (y, data.draw(places(shape, psum=False))),
         (column, data.draw(places((shape[0], 1), folded=False)))],
        [(shape, out, data.draw(places(shape)))],
    )  # fmt: skip
    c = np.broadcast_to(wide(column), shape)
    inner = wide(fp64(ARITHMETIC[op0], *((c, wide(x)) if first else (wide(x), c))).astype(np.float32))
    agree(result, fp64(ARITHMETIC[op1], *((wide(y), inner) if second else (inner, wide(y)))), out)


@covers("tensor_reduce")
@PROPERTY
@given(
    st.data(), st.tuples(st.integers(1, 128), st.integers(1, 5), st.integers(1, 9)), st.sampled_from(FLOATS),
    st.sampled_from(["add", "maximum", "minimum", "multiply", "subtract"]), st.booleans(), st.booleans(),
)  # fmt: skip
def test_tensor_reduce(data: Any, sizes: tuple[int, int, int], dtype: str, op: str, negate: bool, both: bool) -> None:
    rows, outer, inner = sizes
    x = values((rows, outer * inner), dtype, 6)
    if op == "multiply":
        x = (np.sign(wide(x)) * 1.25).astype(x.dtype)
    place = data.draw(places((rows, outer * inner), folded=False))
    remaining = (rows, 1 if both else outer)
    result = laid_out(
        lambda dst, p: nisa.tensor_reduce(
            dst=dst, op=getattr(nl, op), data=p.reshape_dim(1, (outer, inner)),
            axis=(1, 2) if both else (2,), negate=negate),
        [(x, place)], [(remaining, "float32", data.draw(places(remaining)))],
    )  # fmt: skip
    parts = wide(x).reshape(rows, *((1, outer * inner) if both else (outer, inner)))
    fold = {"add": np.sum, "maximum": np.max, "minimum": np.min, "multiply": np.prod}
    wanted = 2 * parts[..., 0] - parts.sum(axis=-1) if op == "subtract" else fold[op](parts, axis=-1)
    scale = np.abs(wanted) if op == "multiply" else np.abs(parts).sum(axis=-1)
    roundings = 0 if op in ("maximum", "minimum") else parts.shape[-1]
    agree(result, -wanted if negate else wanted, "float32", roundings, scale)


@covers("tensor_scalar_reduce")
@PROPERTY
@given(st.data(), SHAPES, st.sampled_from(FLOATS), st.sampled_from(["add", "maximum", "minimum"]), st.booleans())
def test_tensor_scalar_reduce(data: Any, shape: Shape, dtype: str, reduce: str, negate: bool) -> None:
    x, column = values(shape, dtype, 7), values((shape[0], 1), "float32", 8)
    one = (shape[0], 1)

    def body(dst: Any, total: Any, p: Any, c: Any) -> None:
        for command in (nisa.reduce_cmd.reset_reduce, nisa.reduce_cmd.reduce):
            nisa.tensor_scalar_reduce(
                dst=dst, data=p, op0=nl.multiply, operand0=c, reduce_op=getattr(nl, reduce),
                reduce_res=total, reduce_cmd=command, reduce_res_negate=negate)  # fmt: skip

    start = data.draw(places(one, folded=False)).start
    rest = [Place(start) for _ in range(2)]
    result, total = laid_out(body, [(x, rest[0]), (column, Place())],
                            [(shape, dtype, rest[1]), (one, "float32", Place())])  # fmt: skip
    product = wide(x) * wide(column)
    agree(result, product, dtype)
    product = wide(product.astype(np.float32))
    wanted = {"add": 2 * product.sum(1), "maximum": product.max(1), "minimum": product.min(1)}[reduce][:, None]
    scale = 2 * np.abs(product).sum(1)[:, None]
    agree(total, -wanted if negate else wanted, "float32", 0 if reduce != "add" else shape[1] + 2, scale)


@covers("tensor_tensor_scan")
@PROPERTY
@given(st.data(), SHAPES, st.sampled_from(FLOATS), st.booleans(), st.booleans())
def test_tensor_tensor_scan(data: Any, shape: Shape, dtype: str, reverse: bool, column: bool) -> None:
    a, b = (values(shape, dtype, 1) / 8).astype(values((1,), dtype, 0).dtype), values(shape, dtype, 2)
    start = values((shape[0], 1), "float32", 3)
    result = laid_out(
        lambda dst, p, q, s: nisa.tensor_tensor_scan(
            dst=dst, data0=p, data1=q, initial=s if column else 0.5, op0=nl.multiply, op1=nl.subtract,
            reverse1=reverse),
        [(a, data.draw(places(shape))), (b, data.draw(places(shape, psum=False))), (start, Place())],
        [(shape, "float32", data.draw(places(shape)))],
    )  # fmt: skip
    state = wide(start)[:, 0] if column else np.full(shape[0], 0.5)
    for i in range(shape[1]):
        product = wide((state * wide(a)[:, i]).astype(np.float32))
        state = wide((wide(b)[:, i] - product if reverse else product - wide(b)[:, i]).astype(np.float32))
        agree(result[:, i], state, "float32")


@covers("tensor_scalar_cumulative")
@PROPERTY
@given(st.data(), SHAPES, st.sampled_from(FLOATS), st.sampled_from(["add", "subtract", "maximum", "minimum"]))
def test_tensor_scalar_cumulative(data: Any, shape: Shape, dtype: str, op: str) -> None:
    x, seed = values(shape, dtype, 4), values((shape[0], 1), "float32", 5)
    begins = {nisa.reduce_cmd.load_reduce: seed, nisa.reduce_cmd.reset_reduce: None}
    command = data.draw(st.sampled_from(list(begins)))
    result = laid_out(
        lambda dst, p, s: nisa.tensor_scalar_cumulative(
            dst=dst, src=p, op0=nl.multiply, op1=getattr(nl, op), imm0=0.5, reduce_cmd=command,
            imm1=None if begins[command] is None else s),
        [(x, data.draw(places(shape))), (seed, Place())], [(shape, "float32", data.draw(places(shape)))],
    )  # fmt: skip
    start = {"add": 0.0, "subtract": 0.0, "maximum": -np.inf, "minimum": np.inf}[op]
    state = np.full(shape[0], start) if begins[command] is None else wide(seed)[:, 0]
    for i in range(shape[1]):
        state = wide(ARITHMETIC[op](0.5 * wide(x)[:, i], state).astype(np.float32))
        agree(result[:, i], state, "float32")


@covers("reciprocal")
@PROPERTY
@given(st.data(), SHAPES, st.sampled_from(FLOATS), st.sampled_from(FLOATS))
def test_reciprocal(data: Any, shape: Shape, dtype: str, out: str) -> None:
    x = values(shape, dtype, 11)
    result = laid_out(lambda dst, p: nisa.reciprocal(dst=dst, data=p), [(x, data.draw(places(shape)))],
                     [(shape, out, data.draw(places(shape)))])  # fmt: skip
    agree(result, fp64(lambda v: 1 / v, wide(x)), out, 1)
