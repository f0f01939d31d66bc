"""Arguments that hold arrays, limits of access patterns, descriptors, casts of the small functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import nkisim
import nkisim.isa as nisa
import nkisim.language as nl
from nkisim import errors
from nkisim.tests.harness import draw, on_hbm, out, run, tile
from nkisim.timeline.schedule import schedule

DATA = draw((16, 8), seed=1)
DGE = nisa.dge_mode


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


def test_dimensions_that_merge_count_once() -> None:
    def kernel() -> Any:
        x = tile(8, 64).reshape((8, 2, 2, 2, 2, 2, 2))
        nisa.tensor_scalar(dst=x, data=x, op0=nl.add, operand0=1.0)
        return out(x.reshape((8, 64)))

    assert (run(kernel) == 2).all()


def transfer(kernel: Any, *arrays: Any, lnc: int = 1) -> list[Any]:
    policy = nkisim.Policy(recording=True)
    return nkisim.run(nkisim.jit(kernel)[lnc], arrays, policy=policy).recording.events


def copied(dtype: str, moving: bool, **more: Any) -> str:
    def kernel(a: Any) -> Any:
        dst = nl.ndarray((16, 4), dtype=dtype)
        src = a[:, nl.ds(nisa.register_alloc(2), 4)] if moving else a[:, 2:6]
        nisa.dma_copy(dst=dst, src=src, name="it", **more)
        return out(dst)

    return next(e for e in transfer(kernel, DATA) if e.name == "it").work["dge"]


def test_descriptors_left_to_the_compiler() -> None:
    for dtype, moving in (("float32", False), ("float32", True), ("bfloat16", False), ("bfloat16", True)):
        assert copied(dtype, moving) == "unknown"
    assert copied("float32", False, dge_mode=DGE.swdge) == "swdge"
    assert copied("float32", False, dge_mode=DGE.hwdge) == "hwdge"


def test_sums_in_flight_have_static_descriptors() -> None:
    def kernel(a: Any) -> Any:
        dst = nl.ndarray((16, 8), dtype=nl.float32)
        nisa.dma_compute(dst=dst, srcs=[a, a], reduce_op=nl.add, name="it")
        return out(dst)

    assert next(e for e in transfer(kernel, DATA) if e.name == "it").work["dge"] == "none"


def test_gpsimd_exchanges_by_a_dma_of_its_own() -> None:
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


def test_small_functions_cast_their_result() -> None:
    def kernel(a: Any, index: Any) -> Any:
        x = nl.load(a)
        turned = nl.transpose(x, dtype=nl.bfloat16)
        gathered = nl.gather_flattened(x, nl.load(index), dtype=nl.bfloat16)
        kept = nl.dropout(x, 0.0, dtype=nl.float16)
        assert (turned.dtype, gathered.dtype, kept.dtype) == ("bfloat16", "bfloat16", "float16")
        return out(nl.copy(turned)), out(gathered), out(kept)

    index = np.arange(16 * 3, dtype=np.uint32).reshape(16, 3) % 8
    turned, gathered, kept = on_hbm(kernel, [DATA, index])
    assert np.array_equal(turned, DATA.T.astype(ml_dtypes.bfloat16))
    assert np.array_equal(gathered, np.take_along_axis(DATA, index.astype(int), 1).astype(ml_dtypes.bfloat16))
    assert np.array_equal(kept, DATA.astype(np.float16))
