"""Planted faults of launches: what is passed in, who calls, and what two cores do to each other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

import nkisim
import nkisim.isa as nisa
import nkisim.language as nl
from harness import out, run, tile
from nkisim import errors
from nkisim.geometry import CORE_V3
from registry import launch

DATA = np.ones((128, 8), np.float32)


@launch(errors.OutsideKernel)
def instruction_outside(bad: bool) -> Any:
    return tile() if bad else run(lambda: out(tile()))


@launch(errors.NoDevice)
def call_without_simulator(bad: bool) -> Any:
    kernel = nkisim.jit(lambda: out(tile()))
    return kernel() if bad else nkisim.simulate(kernel)()


@launch(errors.KernelInsideKernel)
def kernel_calls_kernel(bad: bool) -> Any:
    inner = nkisim.jit(lambda: out(tile()))
    called = inner if bad else inner.fn

    def kernel() -> Any:
        return called()

    return run(kernel)


@launch(errors.BadInput)
def argument_of_no_nki_type(bad: bool) -> Any:
    return run(lambda a: out(nl.load(a)), DATA.astype(np.float64 if bad else np.float16))


@launch(errors.WrongCall)
def argument_given_twice(bad: bool) -> Any:
    def kernel() -> Any:
        x = tile()
        nisa.tensor_copy(x, **({"dst": x, "src": x} if bad else {"src": x}))
        return out(x)

    return run(kernel)


@launch(errors.BadInput)
def list_instead_of_a_tensor(bad: bool) -> Any:
    return run(lambda a: out(nl.load([a] if bad else a)), DATA)


@launch(errors.NeedsNewerCore)
def operator_of_a_newer_core_before_its_shapes(bad: bool) -> Any:
    return run(lambda a: out((nl.abs_max if bad else nl.maximum)(nl.load(a), nl.load(a[:, 0 : 1 if bad else 8]))), DATA)


@launch(errors.WrongArgument)
def assignment_to_a_slice(bad: bool) -> Any:
    def kernel() -> Any:
        x = tile()
        if bad:
            x[:, 0:4] = [1.0, 2.0]
        else:
            x[:, 0:4] = x[:, 4:8]
        return out(x)

    return run(kernel)


@launch(errors.HbmFull)
def tensors_beyond_one_stack(bad: bool) -> Any:
    size = DATA.nbytes * (2 if bad else 3)
    kernel = nkisim.jit(lambda a: out(nl.load(out(nl.load(a)))))
    return nkisim.run(kernel, (DATA,), geometry=replace(CORE_V3, hbm_bytes=size))


@launch(errors.CoresDiverge)
def shared_tensors_of_two_sizes(bad: bool) -> Any:
    def kernel() -> Any:
        core = nl.program_id(0)
        made = nl.ndarray((128, 8 + (core if bad else 0)), dtype=nl.float32, buffer=nl.shared_hbm)
        if core == 0:
            nisa.dma_copy(dst=made, src=tile())
        return made

    return run(kernel, lnc=2)


@launch(errors.CoresDiverge)
def a_different_output_on_each_core(bad: bool) -> Any:
    def kernel() -> Any:
        made = [out(tile()), out(tile(value=2))]
        return made[nl.program_id(0) if bad else 0]

    return run(kernel, lnc=2)


def pass_on(*barriers: bool) -> Any:
    """Return a kernel in which core 0 writes and core 1 reads, each after a barrier or not."""

    def kernel(a: Any) -> Any:
        middle, result = (nl.ndarray((128, 8), nl.float32, nl.shared_hbm, name) for name in ("middle", "result"))
        core = nl.program_id(0)
        if core == 0:
            nisa.dma_copy(dst=middle, src=nl.load(a))
        if barriers[core]:
            nisa.core_barrier(data=middle, cores=(0, 1))
        if core == 1:
            nisa.dma_copy(dst=result, src=nl.load(middle))
        return result

    return kernel


@launch(errors.HbmRace)
def no_barrier(bad: bool) -> Any:
    return run(pass_on(not bad, not bad), DATA, lnc=2)


@launch(errors.Deadlock)
def barrier_of_one_core(bad: bool) -> Any:
    return run(pass_on(not bad, True), DATA, lnc=2)


@launch(errors.NotComputed)
def address_that_was_not_computed(bad: bool) -> Any:
    columns = 512 if bad else 4

    def kernel(a: Any) -> Any:
        start = nl.ndarray((128, columns), nl.int32)
        nisa.tensor_copy(start, nl.multiply(nl.load(a[:, 0:columns]), 2.0))
        return out(nl.load(a[:, nl.ds(start[0:1, 0:1], 4)]))

    return run(kernel, np.zeros((128, 512), np.float32), numerics=False)
