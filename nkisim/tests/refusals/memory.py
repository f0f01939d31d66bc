"""Refusals of memory, addresses, registers and loops; faults that the end of a kernel shows have one of their own."""

from __future__ import annotations

from typing import Any

import nkisim.isa as nisa
import nkisim.language as nl
from harness import hbm, out, psum, tile, words
from nkisim.errors import *
from registry import case, rules

ENGINE, SBUF_BYTES = nisa.engine, 224 * 1024


def at(address: int, buffer: Any = nl.sbuf) -> Any:
    return nl.ndarray((128, 8), nl.float32, buffer, address=(0, address))


def far(step: int) -> Any:
    return tile(1, 2**15 + 1).ap([[2**15 + 1, 1], [step, 2]])


rules(
    "memory",
    (TooManyPartitions, lambda b: tile(129 if b else 128)),
    (StartPartition, lambda b: nisa.memset(tile()[32:96] if b else tile()[64:128], 0.0)),
    (OutOfRange, lambda b: tile()[:, 8 if b else -8]),
    (OutOfRange, lambda b: tile().ap([[8, 128], [1, 8]], offset=1 if b else 0)),
    (IllegalView, lambda b: nisa.tensor_copy(tile(1, 2), far(2**15 if b else 2**15 - 1))),
    (Misaligned, lambda b: at(1024 if b else 2048, nl.psum)),
    (AddressTaken, lambda b: at(SBUF_BYTES - (16 if b else 32))),
    (DuplicateName, lambda b: [nl.ndarray((8, 8), nl.float32, name=name) for name in ("a", "a" if b else "b")]),
    (RegisterMisuse, lambda b: nisa.register_store(tile(1, 1, "int32"), nisa.register_alloc(None if b else 3))),
    (RegisterMisuse, lambda b: nl.fori_loop(0, 2, lambda i: nisa.register_move(i if b else nisa.register_alloc(), 5))),
    (WrongOperator, lambda b: tile() + tile() if b else nl.add(tile(), tile())),
    (WrongOperator, lambda b: nisa.activation(tile(), nl.floor if b else nl.exp, tile())),
    (WrongSpace, lambda b: nisa.tensor_copy(tile(), psum(), engine=ENGINE.gpsimd if b else ENGINE.vector)),
    (ShapeMismatch, lambda b: nisa.tensor_copy(tile(columns=16), tile(columns=8 if b else 16))),
)


@case(UnwrittenRead)
def unwritten_tile(bad: bool) -> Any:
    x = nl.ndarray((128, 8), dtype=nl.float32)
    nisa.memset(dst=x[:, 0:7] if bad else x, value=0.0)
    return out(x)


@case(UnwrittenRead)
def unwritten_output(bad: bool) -> Any:
    result = nl.ndarray((128, 8), dtype=nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=result[0:64] if bad else result, src=tile(64 if bad else 128))
    return result


@case(UnwrittenRead)
def skipped_row(bad: bool) -> Any:
    dst = nl.ndarray((2, 8), nl.float32) if bad else tile(2)
    source = hbm(4).ap([[8, 2], [1, 8]], vector_offset=words(1, 9))
    nisa.dma_copy(dst=dst, src=source, oob_mode=nisa.oob_mode.skip)
    return out(dst)


@case(UnwrittenRead)
def predicated_holes(bad: bool) -> Any:
    x = nl.ndarray((128, 8), dtype=nl.float32)
    mask = tile(dtype="uint8")
    nisa.memset(dst=mask[:, 0:4], value=0)
    nisa.tensor_copy_predicated(dst=x, src=1.0, predicate=mask)
    if not bad:
        nisa.tensor_copy_predicated(dst=x, src=2.0, predicate=mask, reverse_pred=True)
    return out(x)


@case(SbufFull)
def sbuf_overflow(bad: bool) -> Any:
    first, second = tile(columns=30000), tile(columns=30000)
    if bad:
        nisa.tensor_copy(dst=first, src=second)
    return out(second[:, 0:8])


@case(PsumFull)
def psum_overflow(bad: bool) -> Any:
    x = tile(columns=512)
    tiles = [nl.ndarray((128, 512), nl.float32, nl.psum) for _ in range(9 if bad else 8)]
    for t in tiles:
        nisa.nc_matmul(dst=t, stationary=x[:, 0:128], moving=x)
    for t in tiles:
        nisa.tensor_copy(dst=x, src=t)
    return out(x)


@case(SbufFull)
def one_tile_too_large(bad: bool) -> Any:
    x = nl.ndarray((128, 57345 if bad else 57344), dtype=nl.float32)
    nisa.memset(dst=x[:, 0:8], value=0.0)
    return out(x[:, 0:8])


@case(ReplacedRead)
def read_after_replacement(bad: bool) -> Any:
    x = nl.ndarray((128, 8), nl.float32, address=(0, 0))
    nisa.memset(dst=x, value=0.0)
    y = nl.ndarray((128, 8), nl.float32, address=(0, 16 if bad else 32))
    nisa.memset(dst=y, value=0.0)
    return out(x)


@case(LoopMisuse)
def loop_inside_no_reorder(bad: bool) -> Any:
    def body(i: Any) -> None:
        del i

    with nl.no_reorder():
        tile()
        if bad:
            nl.fori_loop(0, 2, body)
    return out(tile())


@case(BadOutput)
def output_in_sbuf(bad: bool) -> Any:
    x = tile()
    return x if bad else out(x)


@case(AccumulatorUndefined)
def idle_clobbers_registers(bad: bool) -> Any:
    x, total, mask = tile(), tile(columns=1), tile(dtype="uint8")
    nisa.tensor_scalar_reduce(dst=x, data=x, op0=nl.add, operand0=0.0, reduce_op=nl.maximum)
    if bad:
        nisa.select_reduce(dst=x, predicate=mask, on_true=x, on_false=0.0)
    nisa.tensor_scalar_reduce(dst=x, data=x, op0=nl.add, operand0=0.0, reduce_op=nl.maximum,
                              reduce_res=total, reduce_cmd=nisa.reduce_cmd.reduce)  # fmt: skip
    return out(total)
