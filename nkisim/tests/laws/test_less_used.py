"""Arguments that hold arrays, limits of access patterns, descriptors, casts of the small functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest

import nkisim
import nkisim.isa as nisa
import nkisim.language as nl
from harness import draw, out, run
from nkisim import errors
from nkisim.timeline.schedule import schedule

DATA = draw((16, 8), seed=1)


@dataclass
class Weights(nl.NKIObject):
    left: Any
    right: Any
    scale: float = 2.0


class Pair(NamedTuple):
    first: Any
    second: Any


def weighted(w: Any) -> Any:
    x = nl.multiply(nl.load(w.left), w.scale)
    w.scale = 0.0
    return out(nl.add(x, nl.load(w.right)))


def test_an_object_of_arrays_is_an_argument_and_is_copied() -> None:
    w = Weights(DATA, DATA + 1)
    assert np.array_equal(run(weighted, w), 2 * DATA + (DATA + 1))
    # the kernel changed its own copy
    assert w.scale == 2.0
    nested = run(lambda p: weighted(p.first), Pair(w, (1, 2)))
    assert np.array_equal(nested, 2 * DATA + (DATA + 1))


def test_an_object_without_arrays_is_passed_as_it_is() -> None:
    w = Weights(1, 2)
    assert run(lambda a, b: out(nl.load(a)) if b is w else None, DATA, w) is not None


def test_an_object_of_lists_of_arrays_is_refused_like_a_list() -> None:
    run(weighted, Weights(DATA, DATA))
    with pytest.raises(errors.BadInput):
        run(weighted, Weights(DATA, [DATA]))


def transfer(kernel: Any, *arrays: Any, lnc: int = 1) -> list[Any]:
    policy = nkisim.Policy(recording=True)
    return nkisim.run(nkisim.jit(kernel)[lnc], arrays, policy=policy).recording.events


def test_sums_in_flight_have_static_descriptors() -> None:
    def kernel(a: Any) -> Any:
        dst = nl.ndarray((16, 8), dtype=nl.float32)
        nisa.dma_compute(dst=dst, srcs=[a, a], reduce_op=nl.add, name="it")
        return out(dst)

    assert next(e for e in transfer(kernel, DATA) if e.name == "it").work["dge"] == "none"


def test_gpsimd_exchanges_by_its_dma() -> None:
    def latency(way: Any) -> float:
        def kernel(a: Any) -> Any:
            core, other = nl.program_id(0), nl.ndarray((16, 8), nl.float32)
            result = nl.ndarray((2, 16, 8), nl.float32, nl.shared_hbm)
            nisa.sendrecv(
                src=nl.load(a), dst=other, send_to_rank=1 - core, recv_from_rank=1 - core, pipe_id=0, dma_engine=way
            )
            nisa.dma_copy(dst=result[core], src=other)
            return result

        events = transfer(kernel, DATA, lnc=2)
        assert [e.work["dma_engine"] for e in events if e.op == "sendrecv"] == [way.name] * 2
        return schedule(events).latency_ns

    assert latency(nisa.dma_engine.dma) != latency(nisa.dma_engine.gpsimd_dma)
