"""Functions of nki.language, property-tested against fp64."""

from __future__ import annotations

import pytest

from properties.test_scalar import FUNCTIONS, INTO
from properties.tiles import *

UNARY = {**FUNCTIONS, "ceil": np.ceil, "floor": np.floor, "trunc": np.trunc, "negative": np.negative, "cos": np.cos,
         "tan": np.tan, "logical_not": lambda x: x == 0}  # fmt: skip
BINARY = {
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "maximum": np.maximum, "minimum": np.minimum,
    "equal": np.equal, "not_equal": np.not_equal, "less": np.less, "less_equal": np.less_equal,
    "greater": np.greater, "greater_equal": np.greater_equal, "logical_and": np.logical_and,
    "logical_or": np.logical_or, "logical_xor": np.logical_xor, "divide": np.divide, "fmod": np.fmod, "mod": np.mod,
}  # fmt: skip
BITS = {"bitwise_and": np.bitwise_and, "bitwise_or": np.bitwise_or, "bitwise_xor": np.bitwise_xor}
SHIFTS = {"left_shift": np.left_shift, "right_shift": np.right_shift}
quiet = pytest.mark.filterwarnings("ignore::nkisim.errors.NkiSimWarning")


def copied(dst: Any, result: Any) -> None:
    """Bring a function's result, which is a new tile, into the output's place."""
    nisa.tensor_copy(dst=dst, src=result)


@covers(*(f"nl.{name}" for name in UNARY))
@quiet
@pytest.mark.parametrize("name", sorted(UNARY))
@EACH
@given(data=st.data(), shape=SHAPES, dtype=st.sampled_from(FLOATS[:3]))
def test_functions_of_one_tile(data: Any, shape: Shape, name: str, dtype: str) -> None:
    # nl.sin reduces its range, the instruction does not
    x = values(shape, dtype, 1)
    x = (INTO[name](wide(x)) if name in INTO and name != "sin" else wide(x)).astype(x.dtype)
    result = laid_out(lambda dst, p: copied(dst, getattr(nl, name)(p, dtype=nl.float32)),
                     [(x, data.draw(places(shape, psum=name != "rsqrt")))], [(shape, "float32", Place())])  # fmt: skip
    wanted = fp64(UNARY[name], wide(x))
    agree(result, wanted, "float32", 4, np.maximum(np.abs(wanted), 2.0**-10))


@covers(*(f"nl.{name}" for name in BINARY))
@quiet
@pytest.mark.parametrize("name", sorted(BINARY))
@EACH
@given(data=st.data(), shape=SHAPES, dtype=st.sampled_from(FLOATS[:3]), kinds=st.sampled_from(["tt", "ts", "st"]))
def test_functions_of_two(data: Any, shape: Shape, name: str, dtype: str, kinds: str) -> None:
    x, y = values(shape, dtype, 1), values(shape, dtype, 2)
    x[x == 0], y[y == 0] = 1, 1
    number = 2.5

    def body(dst: Any, p: Any, q: Any) -> None:
        operands = {"tt": (p, q), "ts": (p, number), "st": (number, q)}[kinds]
        copied(dst, getattr(nl, name)(*operands, dtype=nl.float32))

    # both of one rank
    spots = [data.draw(places(shape, psum=not i, folded=False)) for i in range(2)]
    result = laid_out(body, list(zip((x, y), spots, strict=True)), [(shape, "float32", Place())])
    pair = {"tt": (wide(x), wide(y)), "ts": (wide(x), number), "st": (number, wide(y))}[kinds]
    wanted = np.broadcast_to(fp64(BINARY[name], *pair), shape)
    roundings = 1 if name in ("divide", "mod") else 0
    agree(result, wanted, "float32", roundings, np.maximum(np.abs(wanted), number))


@covers("nl.power")
@PROPERTY
@given(SHAPES, st.sampled_from(FLOATS[:3]))
def test_power(shape: Shape, dtype: str) -> None:
    x, y = np.abs(values(shape, dtype, 1)), values(shape, dtype, 2)
    x[x == 0] = 1
    result = laid_out(lambda dst, p, q: copied(dst, nl.power(p, q, dtype=nl.float32)), [(x, Place()), (y, Place())],
                     [(shape, "float32", Place())])  # fmt: skip
    wanted = wide(x) ** wide(y)
    agree(result, wanted, "float32", 8)


@covers("nl.invert", *(f"nl.{name}" for name in (*BITS, *SHIFTS)))
@pytest.mark.parametrize("name", [*BITS, *SHIFTS, "invert"])
@EACH
@given(shape=SHAPES, dtype=st.sampled_from(INTEGERS))
def test_functions_of_bits(shape: Shape, name: str, dtype: str) -> None:
    x, y = values(shape, dtype, 1), values(shape, dtype, 2)
    if name in SHIFTS:
        y = np.abs(y.astype(np.int64) % (8 * x.dtype.itemsize)).astype(x.dtype)

    def body(dst: Any, p: Any, q: Any) -> None:
        copied(dst, nl.invert(p) if name == "invert" else getattr(nl, name)(p, q))

    result = laid_out(body, [(x, Place()), (y, Place())], [(shape, dtype, Place())])
    bits = np.dtype(f"u{x.dtype.itemsize}")
    a, b = x.view(bits), y.view(bits)
    wanted = ~a if name == "invert" else {**BITS, **SHIFTS}[name](a, b)
    assert result.tobytes() == wanted.astype(bits).tobytes()


FOLDS = {"sum": np.sum, "max": np.max, "min": np.min, "mean": np.mean, "var": np.var,
         "prod": np.prod, "all": lambda x, axis: (x != 0).all(axis=axis)}  # fmt: skip


@covers(*(f"nl.{name}" for name in FOLDS))
@pytest.mark.parametrize("name", sorted(FOLDS))
@EACH
@given(data=st.data(), shape=SHAPES, dtype=st.sampled_from(FLOATS[:3]))
def test_reductions(data: Any, shape: Shape, name: str, dtype: str) -> None:
    x = values(shape, dtype, 3)
    if name == "prod":
        x = (np.sign(wide(x)) * 1.125).astype(x.dtype)
    if name == "all":
        x[::2, 0] = 0
    result = laid_out(lambda dst, p: copied(dst, getattr(nl, name)(p, axis=1, dtype=nl.float32)),
                     [(x, data.draw(places(shape, folded=False)))], [((shape[0], 1), "float32", Place())])  # fmt: skip
    wanted = fp64(FOLDS[name], wide(x), 1)[:, None]
    size = np.abs(wanted) if name == "prod" else np.square(wide(x)).max(1)[:, None] * shape[1] + 1
    agree(result, wanted, "float32", 0 if name in ("max", "min", "all") else 4 * shape[1] + 4, size)


@covers("nl.softmax", "nl.rms_norm")
@PROPERTY
@given(SHAPES, st.sampled_from(FLOATS[:3]))
def test_normalizations(shape: Shape, dtype: str) -> None:
    x, w = values(shape, dtype, 1), values(shape, "float32", 2)

    def body(share: Any, norm: Any, p: Any, q: Any) -> None:
        copied(share, nl.softmax(p, axis=1, dtype=nl.float32))
        copied(norm, nl.rms_norm(p, q, 1, shape[1], epsilon=1e-5, dtype=nl.float32))

    share, norm = laid_out(body, [(x, Place()), (w, Place())], [(shape, "float32", Place())] * 2)
    power = np.exp(wide(x) - wide(x).max(1, keepdims=True))
    agree(share, power / power.sum(1, keepdims=True), "float32", 64, np.ones(shape))
    wanted = wide(x) / np.sqrt(np.square(wide(x)).mean(1, keepdims=True) + 1e-5) * wide(w)
    agree(norm, wanted, "float32", 64)


@covers("nl.load", "nl.store", "nl.load_transpose2d", "nl.transpose", "nl.copy", "nl.expand_dims", "nl.broadcast_to")
@PROPERTY
@given(SHAPES, st.sampled_from(FLOATS[:3]), st.integers(1, 5))
def test_moving(shape: Shape, dtype: str, times: int) -> None:
    x = values(shape, dtype, 1)

    def kernel(source: Any) -> Any:
        tile = nl.load(source)
        stored = nl.ndarray(shape, dtype=source.dtype, buffer=nl.shared_hbm)
        nl.store(stored, nl.copy(tile))
        wide_tile = nl.broadcast_to(nl.expand_dims(tile, 1), (shape[0], times, shape[1]))
        return stored, out(nl.load_transpose2d(source)), out(nl.copy(nl.transpose(tile))), out(wide_tile)

    stored, transposed, again, repeated = on_hbm(kernel, [x])
    assert stored.tobytes() == x.tobytes()
    assert transposed.tobytes() == again.tobytes() == np.ascontiguousarray(x.T).tobytes()
    assert np.array_equal(repeated, np.repeat(x[:, None], times, 1))


@covers("nl.where", "nl.gather_flattened", "nl.dropout", "nl.matmul")
@PROPERTY
@given(st.integers(1, 128), st.integers(1, 128), st.integers(1, 40))
def test_combining(k: int, m: int, n: int) -> None:
    x, y = values((k, m), "float32", 1), values((k, n), "float32", 2)
    index = (values((k, n), "uint32", 3) % m).astype(np.uint32)

    def kernel(a: Any, b: Any, i: Any) -> Any:
        p, q, at = nl.load(a), nl.load(b), nl.load(i)
        chosen = nl.where(nl.greater(q, 0.0), q, -1.0)
        return (out(chosen), out(nl.gather_flattened(p, at)), out(nl.dropout(p, 0.0)),
                out(nl.copy(nl.matmul(p, q, transpose_x=True))))  # fmt: skip

    chosen, gathered, remaining, product = on_hbm(kernel, [x, y, index])
    assert np.array_equal(chosen, np.where(y > 0, y, np.float32(-1)))
    assert np.array_equal(gathered, np.take_along_axis(x, index.astype(int), 1))
    assert np.array_equal(remaining, x)
    agree(product, wide(x).T @ wide(y), "float32", k + 1, np.abs(wide(x)).T @ np.abs(wide(y)))


@covers("nl.zeros", "nl.ones", "nl.full", "nl.zeros_like", "nl.empty_like", "nl.ndarray", "nl.shared_constant",
        "nl.shared_identity_matrix", "nl.rand", "nl.random_seed")  # fmt: skip
@PROPERTY
@given(SHAPES, st.sampled_from(FLOATS[:3]), st.integers(0, 99), st.integers(1, 128))
def test_creation(shape: Shape, dtype: str, number: int, size: int) -> None:
    constant = values(shape, dtype, 1)

    def kernel(seed: Any) -> Any:
        made = [nl.zeros(shape, dtype), nl.ones(shape, dtype), nl.full(shape, number, dtype)]
        made.append(nl.zeros_like(made[1]))
        empty, plain = nl.empty_like(made[1]), nl.ndarray(shape, dtype)
        assert (empty.shape, empty.dtype) == (plain.shape, plain.dtype) == (shape, dtype)
        eye, fixed = nl.shared_identity_matrix(size, dtype=dtype), nl.load(nl.shared_constant(constant))
        samples = []
        for _ in range(2):
            nl.random_seed(nl.load(seed))
            samples.append(nl.rand(shape, nl.float32))
        return tuple(out(t) for t in (*made, eye, fixed, *samples))

    zeros, ones, full, like, eye, fixed, first, second = on_hbm(kernel, [np.array([[number]], np.uint32)])
    assert (zeros == 0).all()
    assert (like == 0).all()
    assert (ones == 1).all()
    assert (full == number).all()
    assert np.array_equal(eye, np.eye(size))
    assert fixed.tobytes() == constant.tobytes()
    assert np.array_equal(first, second)
    assert first.min() >= 0
    assert first.max() < 1
