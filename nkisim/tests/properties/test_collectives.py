"""Collectives over simulated ranks, property-tested against numpy on the list of arrays."""

from __future__ import annotations

import nkisim.collectives as ncc
from nkisim.ranks import simulate_ranks
from properties.tiles import *

WORLDS = st.integers(1, 4)
FOLDS = {"add": np.sum, "maximum": np.max, "minimum": np.min}


def group(order: list[int]) -> Any:
    return ncc.ReplicaGroup([order])


def on_ranks(body: Any, sources: list[Any], shape: tuple[int, ...]) -> list[Any]:
    """Call body(source, destination) on every rank; return the destinations."""

    def kernel(a: Any) -> Any:
        dst = nl.zeros(shape, dtype=a.dtype, buffer=nl.shared_hbm)
        body(a, dst)
        return dst

    return simulate_ranks(kernel, len(sources))([(s,) for s in sources])


@covers("ncc.all_reduce", "ncc.all_gather", "ncc.reduce_scatter", "ncc.all_to_all")
@PROPERTY
@given(
    st.data(), WORLDS, st.integers(1, 4), st.integers(1, 6), st.sampled_from(FLOATS[:3]), st.sampled_from(sorted(FOLDS))
)
def test_full_tensors(data: Any, world: int, part: int, columns: int, dtype: str, op: str) -> None:
    order = data.draw(st.permutations(range(world)))
    rows, ring, token = part * world, group(order), getattr(nl, op)
    sources = [values((rows, columns), dtype, r) for r in range(world)]
    exact = np.stack([wide(s) for s in sources])
    folded, size = FOLDS[op](exact, axis=0), np.abs(exact).sum(axis=0)
    errors = 0 if op != "add" else world
    for result in on_ranks(lambda a, d: ncc.all_reduce([a], [d], ring, token), sources, (rows, columns)):
        agree(result, folded, dtype, errors, size)
    scattered = on_ranks(lambda a, d: ncc.reduce_scatter([a], [d], ring, 0, token), sources, (part, columns))
    gathered = on_ranks(lambda a, d: ncc.all_gather([a], [d], ring, 0), sources, (rows * world, columns))
    swapped = on_ranks(lambda a, d: ncc.all_to_all([a], [d], ring, 0), sources, (rows, columns))
    for rank in range(world):
        mine = slice(part * order.index(rank), part * order.index(rank) + part)
        agree(scattered[rank], folded[mine], dtype, errors, size[mine])
        assert np.array_equal(gathered[rank], np.concatenate([sources[r] for r in order]))
        assert np.array_equal(swapped[rank], np.concatenate([sources[r][mine] for r in order]))


@covers(
    "ncc.collective_permute",
    "ncc.collective_permute_implicit",
    "ncc.collective_permute_implicit_reduce",
    "ncc.rank_id",
    "ncc.collective_permute_implicit_current_processing_rank_id",
)
@PROPERTY
@given(st.data(), WORLDS, st.integers(1, 6), st.sampled_from(FLOATS[:3]))
def test_from_rank_to_rank(data: Any, world: int, columns: int, dtype: str) -> None:
    order = data.draw(st.permutations(range(world)))
    targets = data.draw(st.permutations(range(world)))
    sources, shape, ring = [values((4, columns), dtype, r) for r in range(world)], (4, columns), group(order)
    pairs = list(enumerate(targets))
    sent = on_ranks(lambda a, d: ncc.collective_permute([a], [d], pairs), sources, shape)
    moved = on_ranks(lambda a, d: ncc.collective_permute_implicit([[a]], [[d]], ring), sources, shape)
    reduced = ncc.collective_permute_implicit_reduce
    summed = on_ranks(lambda a, d: reduced([[a]], [[a]], [[d]], ring, nl.add), sources, shape)

    def number(_: Any) -> Any:
        result = nl.ndarray((1, 2), dtype=nl.int32, buffer=nl.shared_hbm)
        nisa.register_store(result[:, 0:1], ncc.rank_id())
        step = ncc.collective_permute_implicit_current_processing_rank_id(1, ring)
        nisa.register_store(result[:, 1:2], step)
        return result

    numbers = simulate_ranks(number, world)([(s,) for s in sources])
    for rank in range(world):
        before = order[order.index(rank) - 1]
        assert np.array_equal(sent[targets[rank]], sources[rank])
        assert np.array_equal(moved[rank], sources[before])
        agree(summed[rank], 2 * wide(sources[before]), dtype)
        assert numbers[rank].tolist() == [[rank, before]]


@covers("ncc.all_gather_v", "ncc.all_to_all_v")
@PROPERTY
@given(st.data(), st.integers(1, 3), st.booleans(), st.booleans(), st.booleans())
def test_chunks_of_any_length(data: Any, world: int, gather: bool, known: bool, placed: bool) -> None:
    room = 6
    counts = np.array([[data.draw(st.integers(0, room)) for _ in range(world)] for _ in range(world)], np.uint32)
    starts = np.array([[data.draw(st.integers(0, 20 - room)) for _ in range(world)] for _ in range(world)], np.uint32)
    # where a rank puts the chunks of the others: its own order of slots
    slots = [data.draw(st.permutations(range(world))) for _ in range(world)]
    sources = [values((1, 20), "float32", r) for r in range(world)]
    op = ncc.all_gather_v if gather else ncc.all_to_all_v

    def kernel(a: Any, meta: Any) -> Any:
        dst = nl.zeros((1, room * world), dtype=a.dtype, buffer=nl.shared_hbm)
        op([a], [dst], group(list(range(world))), meta, recv_counts_known=known, has_rdispls=placed)
        return dst, meta

    metas = []
    for rank in range(world):
        table = [counts[rank], starts[rank], np.full(world, 99, np.uint32)]
        metas.append(np.stack([*table, np.array(slots[rank], np.uint32) * room][: 4 if placed else 3]))
    result = simulate_ranks(kernel, world)([(sources[r], metas[r].copy()) for r in range(world)])
    for rank, (dst, meta) in enumerate(result):
        for source in range(world):
            column = 0 if gather else rank
            count, start = int(counts[source, column]), int(starts[source, column])
            at = room * (slots[rank][source] if placed else source)
            wanted = np.zeros(room, np.float32)
            wanted[:count] = sources[source][0, start : start + count]
            assert np.array_equal(dst[0, at : at + room], wanted)
            assert meta[2, source] == (99 if known else count)
