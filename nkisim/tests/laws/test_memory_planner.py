"""Placement: peaks by last use, reuse of addresses, banks, explicit addresses, refusal lists."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nkisim.isa as nisa
import nkisim.language as nl
from harness import out, run
from nkisim import errors
from nkisim.geometry import CORE_V3
from nkisim.memory.placement import Region, place, regions
from nkisim.memory.storage import Allocation

SBUF, PSUM = regions(0, CORE_V3)


def allocation(number: int, size: int, first: int, last: int, space: str = "sbuf") -> Allocation:
    made = Allocation(number, f"t{number}", space, 0, 128, size, ("kernel.py", number))
    made.first, made.last = first, last
    return made


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 30), st.integers(0, 10)), max_size=25))
def test_live_tensors_never_share_bytes(rows: list[tuple[int, int, int]]) -> None:
    items = [allocation(i, s * 32, f, f + d) for i, (s, f, d) in enumerate(rows)]
    region = Region("sbuf", 0, 2400, 32, 0)
    try:
        peak = place(items, region)
    except errors.SbufFull:
        return
    assert peak.peak_bytes_per_partition <= region.size
    for a in items:
        for b in items:
            if a is not b and a.first <= b.last and b.first <= a.last:
                assert a.address is not None
                assert b.address is not None
                assert a.address + a.size <= b.address or b.address + b.size <= a.address


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=40))
def test_a_tensor_takes_the_bytes_that_are_dead_for_the_longest_time(rows: list[tuple[int, int]]) -> None:
    """Against every address, where there is room for all: no other choice would overlap bytes that died earlier."""
    items = [allocation(i, s * 32, i, i + d) for i, (s, d) in enumerate(rows)]
    region = Region("sbuf", 0, 32 * 40, 32, 0)
    try:
        place(items, region)
    except errors.SbufFull:
        return
    died = [-1] * 40
    for a in items:
        assert a.address is not None
        blocks = range(a.size // 32)
        ends = [max(died[at + b] for b in blocks) for at in range(40 - len(blocks) + 1)]
        taken = max(died[a.address // 32 + b] for b in blocks)
        if min(ends) < a.first:
            assert taken == min(ends)
        for b in blocks:
            died[a.address // 32 + b] = a.last


def staying_and_passing(stay: int, passing: int) -> list[Allocation]:
    """Tensors of one block that stay, each brought by one that passes; then passing tensors of four blocks."""
    items = []
    for i in range(stay):
        items.append(allocation(2 * i, 32, 2 * i, 2 * i + 1))
        items.append(allocation(2 * i + 1, 32, 2 * i + 1, 2 * stay + passing))
    return items + [allocation(2 * stay + i, 128, 2 * stay + i, 2 * stay + i) for i in range(passing)]


def test_where_tensors_that_stay_fill_the_memory_the_others_are_still_spread() -> None:
    """All spread, those that stay would leave single blocks between them; first-fit would use one place again."""
    items = staying_and_passing(stay=40, passing=40)
    place(items, Region("sbuf", 0, 80 * 32, 32, 0))
    assert len({a.address for a in items[80:]}) >= 9
    # negative control: with room for all, what stays is spread too
    place(items, Region("sbuf", 0, 8000 * 32, 32, 0))
    assert {a.address for a in items[:80]} == set(range(0, 80 * 32, 32))


def test_psum_tiles_take_full_banks() -> None:
    items = [allocation(i, 4, 0, 9, "psum") for i in range(8)]
    place(items, PSUM)
    assert sorted(i.address for i in items) == [2048 * i for i in range(8)]
    with pytest.raises(errors.PsumFull):
        place([*items, allocation(8, 4, 0, 9, "psum")], PSUM)


def test_explicit_addresses_stay_free() -> None:
    fixed = allocation(0, 64, 5, 9)
    fixed.explicit, fixed.address = True, 0
    free = allocation(1, 64, 0, 6)
    place([fixed, free], SBUF)
    assert free.address is not None
    assert free.address >= 64


def test_the_refusal_lists_what_was_live() -> None:
    def kernel() -> Any:
        weights = nl.ndarray((128, 30000), dtype=nl.float32, name="weights")
        nisa.memset(dst=weights, value=0.0)
        scores = nl.ndarray((128, 30000), dtype=nl.float32, name="scores")
        nisa.tensor_copy(dst=scores, src=weights)
        return out(scores[:, 0:8])

    with pytest.raises(errors.SbufFull) as caught:
        run(kernel)
    text = str(caught.value)
    assert "240000 B per partition" in text
    assert "weights 120000 B" in text
    assert "scores 120000 B" in text
    assert "right before" not in text
    run(kernel, capacity=False)


@pytest.mark.parametrize("used_together", [False, True])
def test_the_refusal_names_later_loads_that_would_fit(used_together: bool) -> None:
    def kernel() -> Any:
        source = nl.ndarray((128, 30000), dtype=nl.float32, buffer=nl.private_hbm)
        nisa.dma_copy(dst=source, src=nl.zeros((128, 30000), dtype=nl.float32))
        brought = [nl.ndarray((128, 30000), dtype=nl.float32) for _ in range(2)]
        sums = [nl.ndarray((128, 8), dtype=nl.float32) for _ in range(2)]
        for full in brought:
            # in two pieces, and neither is a use
            for half in (slice(0, 15000), slice(15000, 30000)):
                nisa.dma_copy(dst=full[:, half], src=source[:, half])
        for full, total in zip(brought, sums, strict=True):
            nisa.tensor_copy(dst=total, src=full[:, 0:8])
        if used_together:
            nisa.tensor_tensor(dst=sums[0], data1=brought[0][:, 0:8], data2=brought[1][:, 0:8], op=nl.add)
        return out(sums[0])

    with pytest.raises(errors.SbufFull) as caught:
        run(kernel)
    assert ("it fits if each load comes right before the first use" in str(caught.value)) != used_together
