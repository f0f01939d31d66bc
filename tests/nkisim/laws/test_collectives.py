"""Collectives over simulated ranks compute what numpy computes on the list of arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nkisim.collectives as ncc
import nkisim.isa as nisa
import nkisim.language as nl
from nkisim import errors
from nkisim.ranks import simulate_ranks

WORLD = 4
DATA = [np.random.default_rng(r).standard_normal((8, 6)).astype(np.float32) for r in range(WORLD)]
ALL = ncc.ReplicaGroup([[0, 1, 2, 3]])
PAIRS = ncc.ReplicaGroup([[0, 2], [1, 3]])


def ranks(body: Any, shape: tuple[int, ...], world: int = WORLD) -> list[Any]:
    def kernel(a: Any) -> Any:
        dst = nl.ndarray(shape, dtype=a.dtype, buffer=nl.shared_hbm)
        body(a, dst)
        return dst

    return simulate_ranks(kernel, world)([(d,) for d in DATA[:world]])


def test_all_reduce_in_groups() -> None:
    found = ranks(lambda a, d: ncc.all_reduce([a], [d], PAIRS, nl.add), (8, 6))
    for rank, partner in ((0, 2), (1, 3), (2, 0), (3, 1)):
        np.testing.assert_allclose(found[rank], DATA[rank] + DATA[partner], rtol=1e-6)
    found = ranks(lambda a, d: ncc.all_reduce([a], [d], ALL, nl.maximum), (8, 6))
    assert np.array_equal(found[1], np.max(DATA, axis=0))


def test_gather_scatter_and_all_to_all() -> None:
    found = ranks(lambda a, d: ncc.all_gather([a], [d], ALL, 0), (32, 6))
    assert np.array_equal(found[3], np.concatenate(DATA))
    found = ranks(lambda a, d: ncc.reduce_scatter([a], [d], ALL, 0, nl.add), (2, 6))
    for rank in range(WORLD):
        np.testing.assert_allclose(found[rank], np.sum(DATA, axis=0)[2 * rank : 2 * rank + 2], rtol=1e-5)
    found = ranks(lambda a, d: ncc.all_to_all([a], [d], ALL, 0), (8, 6))
    assert np.array_equal(found[1], np.concatenate([x[2:4] for x in DATA]))


def test_permutes() -> None:
    pairs = [(r, (r + 1) % WORLD) for r in range(WORLD)]
    found = ranks(lambda a, d: ncc.collective_permute([a], [d], pairs), (8, 6))
    assert all(np.array_equal(found[r], DATA[r - 1]) for r in range(WORLD))
    found = ranks(lambda a, d: ncc.collective_permute_implicit([[a]], [[d]], ALL), (8, 6))
    assert all(np.array_equal(found[r], DATA[r - 1]) for r in range(WORLD))
    found = ranks(
        lambda a, d: ncc.collective_permute_implicit_reduce([[a]], [[a]], [[d]], ALL, nl.add),
        (8, 6),
    )
    assert all(np.array_equal(found[r], 2 * DATA[r - 1]) for r in range(WORLD))


def test_rank_registers() -> None:
    def kernel(_: Any) -> Any:
        result = nl.ndarray((1, 2), dtype=nl.int32, buffer=nl.shared_hbm)
        nisa.register_store(result[:, 0:1], ncc.rank_id())
        step = ncc.collective_permute_implicit_current_processing_rank_id(1, ALL)
        nisa.register_store(result[:, 1:2], step)
        return result

    found = simulate_ranks(kernel, WORLD)([(d,) for d in DATA])
    assert [f.tolist() for f in found] == [[[0, 3]], [[1, 0]], [[2, 1]], [[3, 2]]]


@pytest.mark.parametrize("variant", ["gather", "exchange"])
def test_variable_lengths(variant: str) -> None:
    counts = np.array([[1, 2, 3], [2, 0, 1], [3, 1, 2]], np.uint32)
    starts = np.cumsum(np.pad(counts, ((0, 0), (1, 0)))[:, :-1], axis=1).astype(np.uint32)
    group = ncc.ReplicaGroup([[0, 1, 2]])
    op = ncc.all_gather_v if variant == "gather" else ncc.all_to_all_v

    def kernel(a: Any, meta: Any) -> Any:
        dst = nl.zeros((1, 12), dtype=a.dtype, buffer=nl.shared_hbm)
        op([a], [dst], group, meta)
        return dst, meta

    metas = [np.stack([counts[r], starts[r], counts[r] * 0]) for r in range(3)]
    found = simulate_ranks(kernel, 3)([(DATA[r], metas[r]) for r in range(3)])
    for rank in range(3):
        dst, meta = found[rank]
        for source in range(3):
            column = 0 if variant == "gather" else rank
            n, at = counts[source, column], starts[source, column]
            wanted = np.zeros(4, np.float32)
            wanted[:n] = DATA[source].reshape(-1)[at : at + n]
            assert np.array_equal(dst[0, 4 * source : 4 * source + 4], wanted)
            assert meta[2, source] == n


def test_a_missing_rank_is_a_deadlock() -> None:
    def kernel(a: Any) -> Any:
        dst = nl.zeros((8, 6), dtype=a.dtype, buffer=nl.shared_hbm)
        if nl.program_id(0) == 0 and ncc.rank_id().state != 2:
            ncc.all_reduce([a], [dst], ALL, nl.add)
        return dst

    with pytest.raises(errors.Deadlock, match="core 2 has ended"):
        simulate_ranks(kernel, WORLD)([(d,) for d in DATA])


def test_mixed_memories_are_refused() -> None:
    def body(a: Any, d: Any) -> None:
        ncc.all_reduce([nl.load(a)], [d], ALL, nl.add)

    with pytest.raises(errors.WrongArgument, match="mix HBM and SBUF"):
        ranks(body, (8, 6))
