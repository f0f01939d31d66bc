"""What NKI 0.7 adds, property-tested: scalars, grids of tiles and blocks, split collectives, the reducing exchange."""

from __future__ import annotations

import nkisim
import nkisim.collectives as ncc
from nkisim.ranks import simulate_ranks
from properties.tiles import *

NKI = nkisim.Policy(nki="0.7")
STEPS = ("+", "-", "*", "reversed -", "neg", "own")
INTS = {"int32": np.int32, "int64": np.int64}


def move(dst: Any, src: Any) -> None:
    """Copy a cell, by an engine where PSUM has a part in it."""
    (nisa.tensor_copy if nl.psum in (dst.buffer, src.buffer) else nisa.dma_copy)(dst=dst, src=src)


def traced(kernel: Any, *args: Any, lnc: int = 1) -> Any:
    return nkisim.run(nkisim.jit(kernel)[lnc], args, policy=NKI).outputs


@covers("scalar_load", "scalar_store")
@PROPERTY
@given(st.sampled_from(sorted(INTS)), st.data())
def test_scalars_compute_with_the_width_of_their_tile(dtype: str, data: Any) -> None:
    kind = INTS[dtype]
    limits = np.iinfo(kind)
    number = st.integers(limits.min, limits.max) | st.integers(-3, 3)
    steps = data.draw(st.lists(st.tuples(st.sampled_from(STEPS), number), max_size=6))
    start = data.draw(number)

    def follow(value: Any) -> Any:
        for step, other in steps:
            if step in ("+", "own"):
                value = value + (other if step == "+" else value)
            elif step == "*":
                value = other * value
            else:
                value = value - other if step == "-" else -value if step == "neg" else other - value
        return value

    def kernel(x: Any) -> Any:
        stored = nl.load(x)
        nisa.scalar_store(stored, follow(nisa.scalar_load(stored)))
        return out(stored)

    exact = follow(start)
    expected = (exact - int(limits.min)) % 2 ** (8 * kind().itemsize) + int(limits.min)
    assert traced(kernel, np.array([[start]], kind)).tolist() == [[expected]]


@PROPERTY
@given(st.sampled_from(sorted(INTS)), st.integers(0, 5), st.integers(0, 4), st.integers(1, 3))
def test_a_scalar_is_an_address_and_a_bound(dtype: str, row: int, upper: int, step: int) -> None:
    x = values((16, 4), "float32", 1)

    def kernel(source: Any, index: Any, bound: Any) -> Any:
        at, last = nisa.scalar_load(index), nisa.scalar_load(bound)
        stored, result = nl.ndarray((1, 4), nl.float32), nl.zeros((16, 4), nl.float32, nl.shared_hbm)

        def body(i: Any) -> None:
            # an int64 row and the counter, which has 32 bits, do not mix
            nisa.dma_copy(dst=stored, src=source.ap([[4, 1], [1, 4]], scalar_offset=at * 2 + 1))
            nisa.dma_copy(dst=result[nl.ds(i * 3 + 1, 1)], src=stored)

        nl.fori_loop(last - last, last, body, step)
        return result

    expected = np.zeros((16, 4), np.float32)
    for i in range(0, upper, step):
        expected[i * 3 + 1] = x[2 * row + 1]
    output = traced(kernel, x, np.array([[row]], INTS[dtype]), np.array([[upper]], np.int32))
    assert np.array_equal(output, expected)


SIZES = st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(1, 12))
TILES = st.tuples(st.integers(1, 20), st.integers(1, 5))
# a grid of single elements may have steps
OFTEN_ONE = st.sampled_from([1, 1, 2, 3])
BUFFERS = st.sampled_from(["shared_hbm", "sbuf", "psum"])


def cells(size: int, cell: int) -> int:
    return -(-size // cell)


@covers("nl.tiles", "nl.alloc_tiles")
@PROPERTY
@given(SIZES, TILES, BUFFERS)
def test_tiles_cover_a_tensor_once(size: tuple[int, int, int], tile: Shape, place: str) -> None:
    x = values(size, "float32", 1)
    counts = (size[0], cells(size[1], tile[0]), cells(size[2], tile[1]))

    def kernel(source: Any) -> Any:
        result, given_ = nl.ndarray(size, nl.float32, nl.shared_hbm), nl.tiles(source, tile_shape=tile)
        middle = nl.alloc_tiles(tile_shape=tile, element_shape=size, buffer=getattr(nl, place), dtype=nl.float32)
        wanted = nl.tiles(result, tile_shape=tile)
        assert given_.shape == middle.shape == wanted.shape == counts
        assert given_.index_step_elements == (1, *tile)
        for n in np.ndindex(counts):
            stage = nl.ndarray(given_[n].element_shape, nl.float32)
            nisa.dma_copy(dst=stage, src=given_[n].data)
            move(middle[n].data, stage)
        for n in np.ndindex(counts):
            last = [size[i + 1] - n[i + 1] * tile[i] for i in range(2)]
            exact = tuple(map(min, tile, last))
            assert middle[n].element_shape == tuple(middle[n].data.shape) == exact
            assert middle[n].is_remainder == (exact != tile)
            stage = nl.ndarray(exact, nl.float32)
            move(stage, middle[n].data)
            nisa.dma_copy(dst=wanted[n].data, src=stage)
        return result

    assert np.array_equal(traced(kernel, x), x)


def draw_slice(data: Any, count: int, steps: int) -> slice:
    start = data.draw(st.integers(0, count - 1))
    return slice(start, data.draw(st.integers(start + 1, count)), data.draw(st.integers(1, steps)))


@covers("nl.blocks", "nl.alloc_blocks")
@PROPERTY
@given(st.data(), SIZES, st.tuples(OFTEN_ONE, OFTEN_ONE), st.tuples(OFTEN_ONE, OFTEN_ONE))
def test_a_selection_of_blocks_is_a_slice(data: Any, size: tuple[int, int, int], tile: Shape, block: Shape) -> None:
    x = values(size, "float32", 1)
    cell = (1, tile[0] * block[0], tile[1] * block[1])
    counts = tuple(map(cells, x.shape, cell))
    # a block at a time may have gaps where it is one element
    keys = tuple(draw_slice(data, n, 3 if c == 1 else 1) for n, c in zip(counts, cell, strict=True))
    inner = tuple(0 if data.draw(st.booleans()) else slice(None) for _ in range(2))

    def kernel(source: Any) -> Any:
        view = nl.blocks(source, tile_shape=tile, block_shape=block)
        assert view.shape == counts
        assert (view.tile_shape, view.block_shape) == (tile, block)
        stored = nl.alloc_blocks(
            tile_shape=tile, block_shape=block, element_shape=x.shape, buffer=nl.hbm, dtype=nl.float32
        )
        nisa.dma_copy(dst=stored.data, src=view.data)
        picked = stored[keys]
        assert isinstance(picked, nl.NkiBlockGrid)
        if all(key.step == 1 for key in keys):
            picked = nl.tiles(picked)[(slice(None), *inner)]
        result = nl.ndarray(picked.element_shape, nl.float32, nl.shared_hbm)
        nisa.dma_copy(dst=result, src=picked.data)
        return result

    expected = x[tuple(slice(k.start * c, k.stop * c, k.step) for k, c in zip(keys, cell, strict=True))]
    if all(key.step == 1 for key in keys):
        expected = expected[(slice(None), *(slice(0, t if i == 0 else None) for i, t in zip(inner, tile, strict=True)))]
    assert np.array_equal(traced(kernel, x), expected)


@PROPERTY
@given(st.data(), st.tuples(st.integers(1, 40), st.integers(1, 30)), TILES, st.booleans())
def test_empty_like_packs_the_cells_of_a_grid(data: Any, size: Shape, tile: Shape, transposed: bool) -> None:
    x = values(size, "float32", 1)
    keys = tuple(draw_slice(data, cells(n, t), 3) for n, t in zip(size, tile, strict=True))
    order = (1, 0) if transposed else (0, 1)

    def kernel(source: Any) -> Any:
        picked = nl.tiles(source, tile_shape=tile)[keys]
        packed = nl.empty_like(picked, buffer=nl.sbuf, transpose_axes=order if transposed else None)
        assert packed.shape == tuple(picked.shape[i] for i in order)
        result = nl.ndarray(picked.element_shape, nl.float32, nl.shared_hbm)
        for n in np.ndindex(picked.shape):
            cell = packed[tuple(n[i] for i in order)].data
            assert tuple(cell.shape) == tuple(picked[n].element_shape[i] for i in order)
            stage = nl.ndarray(picked[n].element_shape, nl.float32) if transposed else cell
            nisa.dma_copy(dst=stage, src=picked[n].data)
            nisa.dma_copy(dst=nl.tiles(result, tile_shape=tile)[n].data, src=stage)
        return result

    rows, columns = (
        [i for c in range(cells(n, t))[key] for i in range(c * t, min(n, c * t + t))]
        for n, t, key in zip(size, tile, keys, strict=True)
    )
    assert np.array_equal(traced(kernel, x), x[np.ix_(rows, columns)])


@covers(
    "ncc.all_gather_v_prepare", "ncc.all_gather_v_trigger", "ncc.all_to_all_v_prepare", "ncc.all_to_all_v_trigger"
)  # fmt: skip
@PROPERTY
@given(st.data(), st.integers(1, 3), st.booleans(), st.booleans())
def test_a_split_collective_equals_the_full_one(data: Any, world: int, gathers: bool, known: bool) -> None:
    full, begin, end = (getattr(ncc, f"all_{'gather' if gathers else 'to_all'}_v{part}")
                         for part in ("", "_prepare", "_trigger"))  # fmt: skip
    counts = np.array(data.draw(st.lists(st.lists(st.integers(0, 4), min_size=world, max_size=world),
                                         min_size=world, max_size=world)), np.uint32)  # fmt: skip
    ring = ncc.ReplicaGroup([list(range(world))])
    sources = [values((1, 16), "float32", r) for r in range(world)]

    def kernel(a: Any, meta: Any, split: bool) -> Any:
        src, dst = nl.zeros(a.shape, a.dtype, nl.hbm), nl.zeros((1, 4 * world), a.dtype, nl.hbm)
        if not split:
            nisa.dma_copy(dst=src, src=a)
            full([src], [dst], ring, meta, known)
        else:
            prepared = begin([src], [dst], ring, meta, known)
            # the data and later metadata are none of the prepare's
            nisa.dma_copy(dst=src, src=a)
            nisa.dma_copy(dst=meta[1:2], src=nl.full((1, world), 15, nl.uint32))
            end(prepared)
        result = nl.ndarray(dst.shape, a.dtype, nl.shared_hbm)
        nisa.dma_copy(dst=result, src=dst)
        return result, meta

    starts = np.cumsum(np.pad(counts, ((0, 0), (1, 0)))[:, :-1], axis=1).astype(np.uint32)
    output = [
        simulate_ranks(kernel, world, NKI)([(sources[r], np.stack([counts[r], starts[r], counts[r] * 0]), split)
                                            for r in range(world)]) for split in (False, True)
    ]  # fmt: skip
    for (dst, meta), (split_dst, split_meta) in zip(*output, strict=True):
        assert np.array_equal(dst, split_dst)
        assert np.array_equal(meta[2], split_meta[2])


@covers("sendrecv_compute")
@PROPERTY
@given(SHAPES, st.sampled_from(FLOATS[:3]), st.sampled_from(["add", "maximum", "minimum"]), st.booleans())
def test_sendrecv_compute_reduces_both_tiles(shape: Shape, dtype: str, op: str, on_chip: bool) -> None:
    x = values((2, *shape), dtype, 1)
    exact = {"add": np.add, "maximum": np.maximum, "minimum": np.minimum}[op](wide(x[0]), wide(x[1]))

    def kernel(source: Any) -> Any:
        core = nl.program_id(0)
        mine, both = (nl.ndarray(shape, dtype, nl.sbuf if on_chip else nl.private_hbm) for _ in range(2))
        nisa.dma_copy(dst=mine, src=source[core])
        nisa.sendrecv_compute(mine, both, 1 - core, 1 - core, getattr(nl, op))
        result = nl.ndarray((2, *shape), dtype, nl.shared_hbm)
        nisa.dma_copy(dst=result[core], src=both)
        return result

    for output in traced(kernel, x, lnc=2):
        agree(output, exact, dtype, 1, np.abs(wide(x)).sum(axis=0))


@PROPERTY
@given(st.integers(1, 12), st.sampled_from(list(ncc.rg_partition_op)), st.integers(1, 12))
def test_a_partition_lists_every_rank_once(world: int, op: Any, operand: int) -> None:
    groups = ncc.ReplicaGroup.from_partition_op(world, op, operand).groups
    number = {"bitwise_and": lambda r: r & operand, "div": lambda r: r // operand, "mod": lambda r: r % operand}[
        op.name
    ]
    assert sorted(rank for ranks in groups for rank in ranks) == list(range(world))
    assert [len({number(r) for r in ranks}) for ranks in groups] == [1] * len(groups)
    assert len({number(ranks[0]) for ranks in groups}) == len(groups)
