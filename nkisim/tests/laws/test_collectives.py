"""Collectives over simulated ranks compute what numpy computes on the list of arrays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import nkisim
import nkisim.collectives as ncc
import nkisim.isa as nisa
import nkisim.language as nl
from nkisim import errors
from nkisim.ranks import simulate_ranks
from nkisim.timeline.costs.dma import collective_ns, dma_cost
from nkisim.timeline.trn2 import TRN2

WORLD = 4
# cores of a rank in this test
LNC = [1]
DATA = [np.random.default_rng(r).standard_normal((8, 6)).astype(np.float32) for r in range(WORLD)]
ALL = ncc.ReplicaGroup([[0, 1, 2, 3]])
PAIRS = ncc.ReplicaGroup([[0, 2], [1, 3]])


@pytest.fixture(params=[1, 2], autouse=True, ids=["one core", "two cores"])
def cores(request: pytest.FixtureRequest) -> Iterator[int]:
    """Every law holds for ranks of one core and of two."""
    LNC[0] = request.param
    yield request.param
    LNC[0] = 1


def on(kernel: Any, world: int, inputs: list[tuple[Any, ...]]) -> list[Any]:
    return simulate_ranks(nkisim.jit(kernel)[LNC[0]], world)(inputs)


def ranks(body: Any, shape: tuple[int, ...], world: int = WORLD) -> list[Any]:
    def kernel(a: Any) -> Any:
        dst = nl.ndarray(shape, dtype=a.dtype, buffer=nl.shared_hbm)
        body(a, dst)
        return dst

    return on(kernel, world, [(d,) for d in DATA[:world]])


def test_all_reduce_in_groups() -> None:
    result = ranks(lambda a, d: ncc.all_reduce([a], [d], PAIRS, nl.add), (8, 6))
    for rank, partner in ((0, 2), (1, 3), (2, 0), (3, 1)):
        np.testing.assert_allclose(result[rank], DATA[rank] + DATA[partner], rtol=1e-6)
    result = ranks(lambda a, d: ncc.all_reduce([a], [d], ALL, nl.maximum), (8, 6))
    assert np.array_equal(result[1], np.max(DATA, axis=0))


@pytest.mark.filterwarnings("ignore::nkisim.errors.NkiSimWarning")
def test_a_missing_rank_is_a_deadlock(cores: int) -> None:
    def kernel(a: Any) -> Any:
        dst = nl.zeros((8, 6), dtype=a.dtype, buffer=nl.shared_hbm)
        if ncc.rank_id().state != 2:
            ncc.all_reduce([a], [dst], ALL, nl.add)
        return dst

    with pytest.raises(errors.Deadlock, match=f"core {2 * cores} has ended"):
        on(kernel, WORLD, [(d,) for d in DATA])


def halves(a: Any, src: Any, barrier: bool) -> Any:
    """Each core writes half of what the rank sends."""
    dst = nl.ndarray((8, 6), a.dtype, nl.shared_hbm)
    core = nl.program_id(0)
    rows = slice(4 * core, 4 * core + 4) if nl.num_programs(0) == 2 else slice(0, 8)
    nisa.dma_copy(dst=src[rows], src=a[rows])
    if barrier and nl.num_programs(0) == 2:
        nisa.core_barrier(data=src, cores=(0, 1))
    ncc.all_reduce([src], [dst], ncc.ReplicaGroup([[0, 1]]), nl.add)
    back = nl.load(dst)
    nisa.tensor_scalar(back, back, nl.multiply, 2.0)
    result = nl.ndarray((8, 6), a.dtype, nl.shared_hbm)
    nisa.dma_copy(dst=result[rows], src=back[rows])
    return result


def test_both_cores_issue_a_collective(cores: int) -> None:
    def body(a: Any, d: Any) -> None:
        if nl.program_id(0) == 0:
            ncc.all_reduce([a], [d], ALL, nl.add)

    if cores == 2:
        with pytest.raises(errors.Deadlock, match=r"core 0 waits for core 1, .*in all_reduce"):
            ranks(body, (8, 6))


def test_a_collective_waits_for_no_core_that_still_writes(cores: int) -> None:
    inputs = [(DATA[r], np.zeros((8, 6), np.float32)) for r in range(2)]
    result = on(lambda a, b: halves(a, b, True), 2, inputs)
    np.testing.assert_allclose(result[1], 2 * (DATA[0] + DATA[1]), rtol=1e-6)
    if cores == 2:
        with pytest.raises(errors.HbmRace, match="core_barrier"):
            on(lambda a, b: halves(a, b, False), 2, inputs)


@pytest.mark.filterwarnings("error::nkisim.errors.NkiSimWarning")
def test_a_ring_through_two_buffers(cores: int) -> None:
    def kernel(a: Any) -> Any:
        result = nl.ndarray((WORLD, 8, 6), a.dtype, nl.shared_hbm)
        here, there = (nl.ndarray((8, 6), a.dtype, nl.shared_hbm) for _ in range(2))
        if nl.program_id(0) == 0:
            nisa.dma_copy(dst=here, src=a)
        if cores == 2:
            nisa.core_barrier(data=here, cores=(0, 1))
        for step in range(WORLD):
            stored = nl.load(here)
            if nl.program_id(0) == step % cores:
                nisa.dma_copy(dst=result[step], src=stored)
            ncc.collective_permute_implicit([[here]], [[there]], ALL)
            here, there = there, here
        return result

    output = on(kernel, WORLD, [(d,) for d in DATA])
    assert all(np.array_equal(output[r][step], DATA[(r - step) % WORLD]) for r in range(WORLD) for step in range(WORLD))


def test_one_rank_stands_for_many(cores: int) -> None:
    """Its recording has the times of them all; where numbers count it is refused."""

    def kernel(a: Any) -> Any:
        dst = nl.ndarray((8, 6), dtype=a.dtype, buffer=nl.shared_hbm)
        ncc.all_reduce([a], [dst], ncc.ReplicaGroup([list(range(32))]), nl.add)
        return dst

    policy, n = nkisim.Policy(recording=True, numerics=False, ranks=32), TRN2.at("nominal")
    ran = nkisim.run(nkisim.jit(kernel)[cores], (DATA[0],), policy=policy)
    cost = dma_cost(ran.recording.events[0], n)
    assert cost.lead == collective_ns(0, 32, cores, n) > collective_ns(0, 1, cores, n)
    with pytest.raises(errors.BadLaunch, match="simulate_ranks"):
        nkisim.Policy(ranks=32)
