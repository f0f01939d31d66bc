"""GpSimd instructions and random numbers, property-tested against loops over the manual's words."""

from __future__ import annotations

from properties.tiles import *

COMPARE = {
    "equal": np.equal,
    "not_equal": np.not_equal,
    "less": np.less,
    "less_equal": np.less_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
}
PATTERNS = st.lists(st.tuples(st.integers(-4, 4), st.integers(1, 4)), min_size=1, max_size=4)


def affine(rows: int, pattern: Any, offset: int, multiplier: int) -> Any:
    """offset + row * multiplier + sum of index * step, the last pair of the pattern fastest."""
    free = [0]
    for step, count in pattern:
        free = [f + i * step for f in free for i in range(count)]
    return np.array([[offset + r * multiplier + f for f in free] for r in range(rows)])


@covers("iota", "affine_select")
@PROPERTY
@given(st.data(), st.sampled_from([1, 16, 40, 128]), PATTERNS, st.integers(-20, 20), st.integers(-3, 3),
       st.sampled_from(sorted(COMPARE)), st.sampled_from(FLOATS))  # fmt: skip
def test_patterns(data: Any, rows: int, pattern: Any, offset: int, multiplier: int, op: str, dtype: str) -> None:
    pairs = [list(p) for p in pattern]
    index = affine(rows, pairs, offset, multiplier)
    shape = index.shape
    x = values(shape, dtype, 1)

    def body(numbers: Any, chosen: Any, p: Any) -> None:
        nisa.iota(dst=numbers, pattern=pairs, offset=offset, channel_multiplier=multiplier)
        nisa.affine_select(dst=chosen, pattern=pairs, offset=offset, channel_multiplier=multiplier, on_true_tile=p,
                           on_false_value=-9.5, cmp_op=getattr(nl, op))  # fmt: skip

    out = data.draw(st.sampled_from(["int32", "float32"]))
    spots = [data.draw(places(shape, psum=False)) for _ in range(3)]
    numbers, chosen = laid_out(body, [(x, spots[0])], [(shape, out, spots[1]), (shape, dtype, spots[2])])
    assert np.array_equal(numbers, index)
    agree(chosen, np.where(COMPARE[op](index, 0), wide(x), -9.5), dtype)


@covers("nc_n_gather")
@PROPERTY
@given(st.data(), SHAPES, st.integers(1, 20), st.sampled_from(FLOATS + INTEGERS))
def test_nc_n_gather(data: Any, shape: Shape, count: int, dtype: str) -> None:
    x = values(shape, dtype, 1)
    index = (values((shape[0], count), "uint32", 2) % shape[1]).astype(np.uint32)
    result = laid_out(
        lambda dst, p, i: nisa.nc_n_gather(dst=dst, data=p, indices=i),
        [(x, data.draw(places(shape, psum=False))), (index, data.draw(places(index.shape, psum=False)))],
        [(index.shape, dtype, data.draw(places(index.shape, psum=False)))],
    )  # fmt: skip
    wanted = [[x[r, i] for i in index[r]] for r in range(shape[0])]
    assert result.tobytes() == np.array(wanted, x.dtype).tobytes()


@covers("local_gather")
@PROPERTY
@given(st.data(), st.sampled_from([16, 32, 128]), st.integers(1, 3), st.sampled_from([1, 2, 4]),
       st.sampled_from(FLOATS))  # fmt: skip
def test_local_gather(data: Any, rows: int, columns: int, run: int, dtype: str) -> None:
    count = data.draw(st.integers(1, 16 * columns))
    x = values((rows, 21), dtype, 1)
    index = (values((rows, columns), "uint16", 2) % (22 - run)).astype(np.uint16)
    shape = (rows, count * run)
    result = laid_out(
        lambda dst, p, i: nisa.local_gather(
            dst=dst, src_buffer=p, index=i, num_elem_per_idx=run, num_valid_indices=count),
        [(x, data.draw(places(x.shape, psum=False))), (index, data.draw(places(index.shape, psum=False)))],
        [(shape, dtype, data.draw(places(shape, psum=False)))],
    )  # fmt: skip
    for row in range(rows):
        first = row // 16 * 16
        flat = [int(index[first + i % 16, i // 16]) for i in range(count)]
        wanted = [x[row, f + j] for f in flat for j in range(run)]
        assert result[row].tobytes() == np.array(wanted, x.dtype).tobytes()


@covers("tensor_partition_reduce")
@PROPERTY
@given(st.data(), SHAPES, st.sampled_from(FLOATS), st.sampled_from(["add", "average", "maximum"]))
def test_tensor_partition_reduce(data: Any, shape: Shape, dtype: str, op: str) -> None:
    x, one = values(shape, dtype, 1), (1, shape[1])
    result = laid_out(lambda dst, p: nisa.tensor_partition_reduce(dst=dst, op=getattr(nl, op), data=p),
                     [(x, data.draw(places(shape, psum=False)))],
                     [(one, "float32", data.draw(places(one, psum=False)))])  # fmt: skip
    wanted = {"add": np.sum, "average": np.mean, "maximum": np.max}[op](wide(x), axis=0)
    agree(result[0], wanted, "float32", 0 if op == "maximum" else shape[0], np.abs(wide(x)).sum(axis=0))


@covers("sequence_bounds")
@PROPERTY
@given(st.data(), st.lists(st.integers(0, 3), min_size=1, max_size=30), st.sampled_from(["int32", "float32"]))
def test_sequence_bounds(data: Any, ids: list[int], dtype: str) -> None:
    n = len(ids)
    segments = np.array([ids], dtype)
    result = laid_out(lambda dst, p: nisa.sequence_bounds(dst=dst, segment_ids=p),
                     [(segments, data.draw(places((1, n), psum=False)))],
                     [((1, 2 * n), dtype, data.draw(places((1, 2 * n), psum=False)))])  # fmt: skip
    for i in range(n):
        first, last = i, i
        while first > 0 and ids[first - 1] == ids[i]:
            first -= 1
        while last < n and ids[last] == ids[i]:
            last += 1
        assert (result[0, i], result[0, n + i]) == ((first, last) if ids[i] else (n, -1))


@covers("nonzero_with_count")
@PROPERTY
@given(st.data(), st.sampled_from([1, 16, 17, 64, 128]), st.integers(1, 30), st.sampled_from(["int32", "float32"]),
       st.integers(-5, 5), st.integers(-9, -1))  # fmt: skip
def test_nonzero_with_count(data: Any, rows: int, columns: int, dtype: str, offset: int, padding: int) -> None:
    x = np.random.default_rng(columns).integers(-1, 2, (rows, columns)).astype(dtype)
    shape = (rows, columns + 1)
    result = laid_out(
        lambda dst, p: nisa.nonzero_with_count(dst=dst, src=p, index_offset=offset, padding_val=padding),
        [(x, data.draw(places(x.shape, psum=False)))], [(shape, "int32", data.draw(places(shape, psum=False)))],
    )  # fmt: skip
    for row in range(rows):
        where = [i + offset for i in range(columns) if x[row, i]]
        wanted = where + [padding] * (columns - len(where)) + [len(where)]
        assert result[row].tolist() == (wanted if row % 16 == 0 else [MARK] * (columns + 1))


@covers("rand_set_state", "rand_get_state", "rng")
@PROPERTY
@given(st.data(), st.sampled_from([1, 32, 128]), st.integers(1, 12), st.sampled_from(INTEGERS))
def test_xorwow(data: Any, rows: int, count: int, dtype: str) -> None:
    shape, six = (rows, count), (rows, 6)
    state = values(six, "uint32", count)

    def body(words: Any, after: Any, s: Any) -> None:
        nisa.rand_set_state(s)
        nisa.rng(dst=words, engine=nisa.engine.gpsimd)
        nisa.rand_get_state(after)

    words, after = laid_out(
        body, [(state, data.draw(places(six, psum=False)))],
        [(shape, dtype, data.draw(places(shape, psum=False))), (six, "uint32", data.draw(places(six, psum=False)))],
    )  # fmt: skip
    width = 8 * words.dtype.itemsize
    for row in range(rows):
        x, y, z, w, v, d = (int(i) for i in state[row])
        for word in words[row]:
            t = x ^ (x >> 2)
            x, y, z, w, v = y, z, w, v, (v ^ (v << 4) ^ t ^ (t << 1)) % 2**32
            d = (d + 362437) % 2**32
            assert int(word) % 2**width == (d + v) % 2**width
        assert after[row].tolist() == [x, y, z, w, v, d]


@covers("set_rng_seed", "rng")
@PROPERTY
@given(st.data(), SHAPES, st.integers(0, 2**32 - 1))
def test_a_seed_repeats_its_numbers(data: Any, shape: Shape, seed: int) -> None:
    first, second = np.array([[seed]], np.uint32), np.array([[seed ^ 1]], np.uint32)

    def body(one: Any, again: Any, other: Any, s: Any, t: Any) -> None:
        for dst, chosen in ((one, s), (again, s), (other, t)):
            nisa.set_rng_seed(chosen)
            nisa.rng(dst=dst)

    one, again, other = laid_out(body, [(first, Place()), (second, Place())],
                                 [(shape, "uint32", data.draw(places(shape))) for _ in range(3)])  # fmt: skip
    assert np.array_equal(one, again)
    # 2**-32 per element is the chance of an equal number
    assert shape[0] * shape[1] < 4 or not np.array_equal(one, other)


@covers("dropout")
@PROPERTY
@given(st.data(), SHAPES, st.sampled_from(FLOATS), st.sampled_from([0.0, 0.5, 1.0]), st.booleans())
def test_dropout(data: Any, shape: Shape, dtype: str, prob: float, column: bool) -> None:
    x, chance = values(shape, dtype, 1), np.full((shape[0], 1), prob, np.float32)
    result = laid_out(lambda dst, p, c: nisa.dropout(dst=dst, data=p, prob=c if column else prob),
                     [(x, data.draw(places(shape))), (chance, Place())],
                     [(shape, dtype, data.draw(places(shape)))])  # fmt: skip
    remaining = wide(result) == wide(x)
    assert (remaining | (wide(result) == 0)).all()
    if prob in (0.0, 1.0):
        assert np.array_equal(wide(result), wide(x) * (1 - prob))
    elif remaining.size > 200:
        assert abs(remaining.mean() - 0.5) < 6 * 0.5 / np.sqrt(remaining.size) + (wide(x) == 0).mean()
