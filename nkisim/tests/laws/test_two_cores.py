"""Two cores: separate SBUF, shared HBM, barriers, exchange, races, deadlocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nkisim
import nkisim.isa as nisa
import nkisim.language as nl
from harness import run, tile, vendor
from nkisim import errors
from refusals.launch import pass_on

DATA = np.arange(128 * 8, dtype=np.float32).reshape(128, 8)


def shared(columns: int = 8, name: str = "") -> Any:
    return nl.ndarray((128, columns), dtype=nl.float32, buffer=nl.shared_hbm, name=name)


def half(core: int) -> slice:
    return slice(64 * core, 64 * core + 64)


def test_without_a_barrier_there_is_a_race_with_both_lines() -> None:
    with pytest.raises(errors.HbmRace) as caught:
        run(pass_on(False, False), DATA, lnc=2)
    text = str(caught.value)
    assert "core_barrier(data=middle" in text
    assert text.count("refusals/launch.py") == 2


@pytest.mark.parametrize("overlap", [False, True])
def test_interleaved_columns_are_no_race(overlap: bool) -> None:
    def kernel() -> Any:
        result, core = shared(), nl.program_id(0)
        start = 0 if overlap else core
        nisa.dma_copy(dst=result[:, start::2], src=tile(columns=4, value=core))
        if overlap and core == 0:
            nisa.dma_copy(dst=result[:, 1::2], src=tile(columns=4))
        return result

    if overlap:
        with pytest.raises(errors.HbmRace):
            run(kernel, lnc=2)
    else:
        assert np.array_equal(run(kernel, lnc=2)[0], [0, 1] * 4)


def written_twice(last: tuple[float, float], read: bool) -> Any:
    """Return a kernel in which each core fills a tensor, then writes its row 3."""

    def kernel() -> Any:
        result, core = shared(), nl.program_id(0)
        nisa.dma_copy(dst=result, src=tile())
        nisa.dma_copy(dst=result[3:4], src=tile(1, value=last[core]))
        if read:
            nisa.dma_copy(dst=tile(1), src=result[3:4])
        return result

    return kernel


def test_a_race_that_cannot_change_the_result_warns_under_the_vendor_s_policy() -> None:
    result = vendor(written_twice((5, 5), read=False), lnc=2)
    assert result[2:5, 0].tolist() == [1, 5, 1]
    for last, read, policy in (((5, 6), False, "vendor"), ((5, 5), True, "vendor"), ((5, 5), False, "strict")):
        with pytest.raises(errors.HbmRace):
            nkisim.run(nkisim.jit(written_twice(last, read))[2], (), policy=policy)


def test_such_a_race_is_judged_at_a_barrier() -> None:
    def kernel(last: tuple[float, float]) -> Any:
        result = written_twice(last, read=False)()
        nisa.core_barrier(data=result, cores=(0, 1))
        if nl.program_id(0) == 0:
            nisa.dma_copy(dst=result, src=tile(value=9))
        return result

    assert (vendor(lambda: kernel((5, 5)), lnc=2) == 9).all()
    with pytest.raises(errors.HbmRace):
        nkisim.run(nkisim.jit(lambda: kernel((5, 6)))[2], (), policy="vendor")


def test_deadlock_names_who_waits_for_whom() -> None:
    def kernel() -> Any:
        result = shared()
        if nl.program_id(0) == 0:
            nisa.core_barrier(data=result, cores=(0, 1))
        return result

    with pytest.raises(errors.Deadlock, match=r"core 0 waits for core 1 in core_barrier.*core 1 has ended"):
        run(kernel, lnc=2)


def test_crossed_pipes_deadlock() -> None:
    def kernel(same: bool) -> Any:
        core, x, y = nl.program_id(0), tile(), tile()
        pipe = 0 if same else core
        nisa.sendrecv(src=x, dst=y, send_to_rank=1 - core, recv_from_rank=1 - core, pipe_id=pipe)
        result = shared()
        nisa.dma_copy(dst=result[half(core)], src=y[0:64])
        return result

    run(lambda: kernel(True), lnc=2)
    with pytest.raises(errors.Deadlock, match=r"pipe_id=0.*pipe_id=1"):
        run(lambda: kernel(False), lnc=2)


def test_meetings_order_the_recorded_events() -> None:
    policy = nkisim.Policy(recording=True)
    result = nkisim.run(nkisim.jit(pass_on(True, True))[2], (DATA,), policy=policy)
    events = result.recording.events
    barriers = [e for e in events if e.op == "core_barrier"]
    assert [e.core for e in barriers] == [0, 1]
    # core 1's barrier waits for what precedes core 0's
    assert [events[i].core for i in barriers[1].after] == [0]
