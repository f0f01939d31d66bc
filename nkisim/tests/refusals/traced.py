"""Refusals of NKI 0.7: scalars, grids, the split collectives, and what only one of the two versions has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np

import nkisim
import nkisim.collectives as ncc
import nkisim.isa as nisa
import nkisim.language as nl
from harness import hbm, out, run, tile
from nkisim.compiler import CompileConfig, SpecializationConfig
from nkisim.errors import *
from refusals.ranks import BOTH
from registry import launch, rules

rules(
    "scalars",
    (ShapeMismatch, lambda b: nisa.scalar_load(tile(1, 2, "int32")[:, 0 : 2 if b else 1])),
    (ShapeMismatch, lambda b: nisa.scalar_load(out(tile(1, 1, "int32")).reshape((1,) if b else (1, 1)))),
    (WrongDtype, lambda b: nisa.scalar_load(tile(1, 1, "uint32" if b else "int32"))),
    (WrongArgument, lambda b: nisa.scalar_store(tile(1, 1, "int32"), 1 if b else one())),
    (WrongDtype, lambda b: nisa.scalar_store(wide() if b else tile(1, 1, "int32"), one())),
    (WrongArgument, lambda b: nisa.register_store(tile(1, 1, "int32"), one() if b else nisa.register_alloc(1))),
    (LoopMisuse, lambda b: nl.fori_loop(0, nisa.scalar_load(wide()) if b else one(), lambda i: None)),
    (
        WrongDtype,
        lambda b: nisa.tensor_copy(tile(1, 8), tile(1, 8)[:, nl.ds(nisa.scalar_load(wide()), 8)] if b else tile(1, 8)),
    ),
    (WrongDtype, lambda b: nisa.dma_copy(tile(1, 1, "int32") if b else wide(), wide())),
    (WrongDtype, lambda b: nisa.dma_compute(wide() if b else tile(1, 1), [wide()] if b else [tile(1, 1)], nl.add)),
    nki="0.7",
)


def wide() -> Any:
    made = nl.ndarray((1, 1), nl.int64)
    nisa.dma_copy(dst=made, src=nl.shared_constant(np.zeros((1, 1), np.int64)))
    return made


def one() -> Any:
    return nisa.scalar_load(tile(1, 1, "int32"))


def grid(place: Any = hbm, **more: Any) -> Any:
    return nl.tiles(place(128, 8), **({"tile_shape": (32, 4)} | more))


def alloc(place: Any = None, **more: Any) -> Any:
    remaining: dict[str, Any] = {
        "tile_shape": (32, 4),
        "element_shape": (64, 6),
        "buffer": place or nl.sbuf,
        "dtype": nl.float32,
    }
    return nl.alloc_tiles(**(remaining | more))


def moved(x: Any) -> Any:
    return x.get_pattern()


rules(
    "grids",
    (OutOfRange, lambda b: grid()[4 if b else 3, 0]),
    (OutOfRange, lambda b: grid()[0, 0 : 3 if b else 2]),
    (OutOfRange, lambda b: grid()[0, 1:1] if b else grid()[0, 1:2]),
    (IllegalView, lambda b: grid()[::-1] if b else grid()[::2]),
    (IllegalView, lambda b: grid()[one() if b else 0]),
    (WrongArgument, lambda b: grid()[(0, 0, 0) if b else (0, 0)]),
    (WrongArgument, lambda b: grid(tile_shape=(32,) if b else (32, 4))),
    (WrongArgument, lambda b: grid(tile_shape=[32, 4] if b else (32, 4))),
    (WrongArgument, lambda b: grid(tile_shape=(0, 4) if b else (32, 4))),
    (WrongArgument, lambda b: grid(tile_shape=(1, 32, 4) if b else (32, 4))),
    (WrongArgument, lambda b: nl.tiles(1 if b else hbm(), tile_shape=(32, 4))),
    (WrongArgument, lambda b: nl.tiles(nl.ndarray((8, 8, 8), nl.float32, nl.sbuf if b else nl.hbm), tile_shape=(8, 8))),
    (IllegalView, lambda b: nl.tiles(hbm()[nl.ds(one(), 8)] if b else hbm(), tile_shape=(4, 4))),
    (IllegalView, lambda b: nl.blocks(grid()[:: 2 if b else 1], block_shape=(2, 2))),
    (WrongArgument, lambda b: nl.blocks(grid(), block_shape=(2,) if b else (2, 2))),
    (WrongArgument, lambda b: nl.tiles(alloc(), tile_shape=(16, 4) if b else (32, 4))),
    (WrongArgument, lambda b: alloc(tile_shape=(1, 32, 4) if b else (32, 4))),
    (IllegalView, lambda b: moved((grid()[::2, 0] if b else grid()[1, 0]).data)),
    (IllegalView, lambda b: moved((alloc() if b else alloc()[1]).data)),
    (WrongArgument, lambda b: nl.empty_like(grid(), transpose_axes=(0, 1) if b else (1, 0), buffer=nl.sbuf)),
    (WrongArgument, lambda b: nl.empty_like(grid(), transpose_axes=(1, 0), buffer=nl.hbm if b else nl.sbuf)),
    (WrongArgument, lambda b: nl.empty_like(hbm(8, 200 if b else 128), transpose_axes=(1, 0), buffer=nl.sbuf)),
    (WrongDtype, lambda b: alloc(dtype="float64" if b else "int64")),
    nki="0.7",
)


def exchange(b: bool) -> Any:
    other = 1 - nl.program_id(0)
    return nisa.sendrecv_compute(tile(8), tile(8), other, other, nl.multiply if b else nl.maximum)


def places(b: bool) -> Any:
    other = 1 - nl.program_id(0)
    private = nl.ndarray((8, 8), nl.float32, nl.private_hbm)
    nisa.dma_copy(dst=private, src=tile(8))
    return nisa.sendrecv_compute(private, tile(8) if b else private, other, other, nl.add)


def shapes(b: bool) -> Any:
    mine = nl.program_id(0)
    stored = tile(8, 16 if b and mine else 8)
    return nisa.sendrecv_compute(stored, stored, 1 - mine, 1 - mine, nl.add)


rules("two cores", (WrongArgument, exchange), (WrongSpace, places), (ShapeMismatch, shapes), nki="0.7")


def private(rows: int = 8) -> Any:
    made = nl.ndarray((rows, 8), nl.float32, nl.private_hbm)
    nisa.dma_copy(dst=made, src=tile(rows))
    return made


def prepare() -> Any:
    metadata = hbm(3, 2, "uint32", 0)
    return ncc.all_to_all_v_prepare([private()], [private()], BOTH, metadata)


def gather(src: Any = private, dst: Any = private) -> Any:
    return ncc.all_gather([src()], [dst(16)], BOTH, 0)


def twice(b: bool) -> Any:
    first = prepare()
    if not b:
        ncc.all_to_all_v_trigger(first)
    return ncc.all_to_all_v_trigger(prepare())


def again(b: bool) -> Any:
    first = prepare()
    ncc.all_to_all_v_trigger(first)
    return ncc.all_to_all_v_trigger(first if b else prepare())


def other_kind(b: bool) -> Any:
    first = prepare()
    return ncc.all_gather_v_trigger(first) if b else ncc.all_to_all_v_trigger(first)


def open_end(b: bool) -> Any:
    first = prepare()
    return None if b else ncc.all_to_all_v_trigger(first)


def both_kinds(b: bool) -> Any:
    pair = [private(), hbm(8) if b else private()]
    return ncc.all_reduce(pair, [private(), private()], BOTH, nl.add)


def partition(op: Any = ncc.rg_partition_op.mod, operand: int = 2) -> Any:
    return ncc.ReplicaGroup.from_partition_op(4, op, operand)


rules(
    "ranks",
    (LoopMisuse, twice),
    (LoopMisuse, again),
    (LoopMisuse, other_kind),
    (LoopMisuse, open_end),
    (WrongArgument, both_kinds),
    (WrongArgument, lambda b: gather(src=lambda: hbm(8) if b else private())),
    (WrongArgument, lambda b: partition(op="mod" if b else ncc.rg_partition_op.mod)),
    (WrongArgument, lambda b: partition(operand=0 if b else 1)),
    nki="0.7",
)


def topk(sorted: bool) -> Any:
    values, indices = nl.ndarray((16, 8), nl.bfloat16), nl.ndarray((16, 8), nl.uint32)
    return nisa.topk(values, indices, tile(16, 8, "bfloat16"), 128, sorted=sorted)


rules("topk", (OtherVersion, topk))
rules("topk", (NotSimulated, topk), nki="0.7")
rules(
    "scalar_tensor_tensor",
    (NotSimulated, lambda b: nisa.scalar_tensor_tensor(
        tile(), tile(), nl.add, 1.0, nl.add, tile(), reduce_res=tile(128, 1) if b else None)),
    nki="0.7",
)  # fmt: skip


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    with mock.patch.dict(os.environ, variables):
        yield


def plain() -> Any:
    return out(tile())


@launch(OtherVersion)
def a_new_name(bad: bool) -> None:
    run(lambda: out(nl.alloc_tiles(tile_shape=(8, 8), element_shape=(8, 8), buffer=nl.sbuf, dtype="int32")[0, 0].data)
        if bad else plain(), nki="0.6")  # fmt: skip


@launch(OtherVersion)
def a_name_that_went(bad: bool) -> None:
    def kernel() -> Any:
        for _ in nl.dynamic_range(3) if bad else nl.affine_range(3):
            tile()
        return plain()

    run(kernel, nki="0.7")


@launch(OtherVersion)
def options_of_the_compiler(bad: bool) -> None:
    kernel = nkisim.jit(plain, compile_config=CompileConfig(barrier_check=True))
    nkisim.run(kernel, (), policy=nkisim.Policy(nki="0.6" if bad else "0.7"))


@launch(NotSimulated)
def a_ring_of_prefetches(bad: bool) -> None:
    nkisim.run(nkisim.jit(plain, compile_config=CompileConfig(prefetch_auto=bad)), (), policy=nkisim.Policy(nki="0.7"))


@launch(BadLaunch)
def a_grid_against_the_environment(bad: bool) -> None:
    with environment(NEURON_LOGICAL_NC_CONFIG="2" if bad else "1"):
        run(plain, nki="0.7")


@launch(BadLaunch)
def the_front_end_of_before(bad: bool) -> None:
    with environment(NKI_COMPILER_FRONTEND="custom" if bad else "tracer"):
        run(plain, nki="0.7")


@launch(BadLaunch)
def the_rank_of_no_grid(bad: bool) -> None:
    def kernel() -> Any:
        return nl.program_ndim() if bad else None

    with environment(NEURON_LOGICAL_NC_CONFIG="2"):
        nkisim.run(kernel, (), policy=nkisim.Policy(nki="0.7"))


@launch(KernelInsideKernel)
def options_of_an_inner_kernel(bad: bool) -> None:
    inner = nkisim.jit(plain, compile_config=CompileConfig(dead_code_elim=False))
    outer = nkisim.jit(lambda: (inner(),), specialization_config=SpecializationConfig(not bad))
    nkisim.run(outer, (), policy=nkisim.Policy(nki="0.7"))


@launch(BadLaunch)
def a_version_that_is_not_simulated(bad: bool) -> None:
    with environment(NKISIM_NKI="0.8" if bad else "0.7"):
        nkisim.run(plain, ())
