"""Without numerics: the same events, addresses, peaks, times and laws of memory, and no arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import nkisim
import nkisim.isa as nisa
import nkisim.language as nl
from harness import bank, out, psum, run, tile
from nkisim import errors
from nkisim.timeline.schedule import schedule
from refusals import memory

DATA = np.random.default_rng(0).standard_normal((128, 512)).astype(np.float32)
ROWS = np.arange(127, -1, -1, dtype=np.int32).reshape(128, 1)


def attention(x: Any, rows: Any) -> Any:
    """Products, softmax, a transpose, integers made of floats, a gather and a scatter by them."""
    stored, product = nl.load(x), bank(128, 512)
    nisa.nc_matmul(product, stored[:, 0:128], stored)
    weights = nl.softmax(product)
    transposed = bank(128, 128)
    nisa.nc_transpose(transposed, weights[:, 0:128])
    nisa.tensor_copy(stored[:, 0:128], transposed)
    positions, index = nl.ndarray((128, 1), nl.float32), nl.ndarray((128, 1), nl.int32)
    nisa.tensor_copy(positions, nl.load(rows))
    nisa.tensor_scalar(index, positions, nl.multiply, -1.0, op1=nl.add, operand1=127.0)
    nisa.dma_copy(dst=stored, src=x.vector_select(0, index))
    result = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
    nisa.dma_copy(dst=result, src=stored)
    nisa.dma_copy(dst=result.vector_select(0, index), src=stored)
    return result


def by_position(x: Any, rows: Any) -> Any:
    """A run-time slice whose start is computed in a small tile."""
    start = nl.ndarray((1, 1), nl.int32)
    nisa.dma_copy(dst=start, src=rows[120:121])
    nisa.tensor_scalar(start, start, nl.multiply, 16)
    return out(nl.load(x[:, nl.ds(start, 64)]))


@pytest.mark.parametrize("kernel", [attention, by_position])
def test_events_peaks_and_times_are_the_same(kernel: Callable[..., Any]) -> None:
    args = (DATA, ROWS)
    full, bare = (nkisim.run(kernel, args, policy=nkisim.Policy(recording=True, numerics=n)) for n in (True, False))
    assert [(e.op, e.reads, e.writes, e.work, e.after) for e in bare.recording.events] == [
        (e.op, e.reads, e.writes, e.work, e.after) for e in full.recording.events
    ]
    assert bare.peaks == full.peaks
    assert schedule(bare.recording.events).latency_ns == schedule(full.recording.events).latency_ns
    assert np.isnan(bare.outputs).all()
    assert not np.isnan(full.outputs).any()


def test_an_input_that_was_not_computed_stays_as_it_was() -> None:
    def kernel(x: Any) -> Any:
        nisa.dma_copy(dst=x, src=nl.multiply(nl.load(x), 2.0))
        return out(nl.load(x))

    mine = DATA.copy()
    run(kernel, mine, numerics=False)
    assert np.array_equal(mine, DATA)


def race() -> Any:
    shared = nl.ndarray((128, 512), nl.float32, nl.shared_hbm)
    if nl.program_id(0) == 0:
        nisa.dma_copy(dst=shared, src=tile(128, 512))
        return shared
    return out(nl.load(shared))


@pytest.mark.parametrize(
    ("kernel", "law", "lnc"),
    [(lambda: memory.unwritten_tile(True), errors.UnwrittenRead, 1),
     (lambda: memory.sbuf_overflow(True), errors.SbufFull, 1),
     (lambda: nisa.tensor_tensor(tile(), psum(), psum(), nl.add), errors.BothInPsum, 1),
     (race, errors.HbmRace, 2)],
)  # fmt: skip
def test_laws_of_memory_hold(kernel: Callable[..., Any], law: type[errors.LawError], lnc: int) -> None:
    with pytest.raises(law):
        run(kernel, lnc=lnc, numerics=False)
