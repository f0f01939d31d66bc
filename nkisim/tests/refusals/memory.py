"""Planted faults of memory, views, registers, loops and engines, each in a kernel of its own."""

from __future__ import annotations

from typing import Any

import nkisim.isa as nisa
import nkisim.language as nl
from nkisim import errors
from nkisim.tests.harness import out, psum, tile
from nkisim.tests.registry import case


@case(errors.UnwrittenRead)
def unwritten_tile(bad: bool) -> Any:
    x = nl.ndarray((128, 8), dtype=nl.float32)
    nisa.memset(dst=x[:, 0:7] if bad else x, value=0.0)
    return out(x)


@case(errors.UnwrittenRead)
def unwritten_output(bad: bool) -> Any:
    result = nl.ndarray((128, 8), dtype=nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=result[0:64] if bad else result, src=tile(64 if bad else 128))
    return result


@case(errors.UnwrittenRead)
def predicated_holes(bad: bool) -> Any:
    x = nl.ndarray((128, 8), dtype=nl.float32)
    mask = tile(dtype="uint8")
    nisa.memset(dst=mask[:, 0:4], value=0)
    nisa.tensor_copy_predicated(dst=x, src=1.0, predicate=mask)
    if not bad:
        nisa.tensor_copy_predicated(dst=x, src=2.0, predicate=mask, reverse_pred=True)
    return out(x)


@case(errors.TooManyPartitions)
def many_partitions(bad: bool) -> Any:
    return out(tile(129 if bad else 128))


@case(errors.StartPartition)
def wide_start_partition(bad: bool) -> Any:
    x = tile()
    nisa.memset(dst=x[32:96] if bad else x[64:128], value=0.0)
    return out(x)


@case(errors.OutOfRange)
def index_past_the_end(bad: bool) -> Any:
    return out(tile()[:, 8 if bad else -8])


@case(errors.OutOfRange)
def pattern_past_the_end(bad: bool) -> Any:
    return out(tile(columns=8).ap([[8, 128], [1, 8]], offset=1 if bad else 0))


@case(errors.IllegalView)
def step_beyond_sixteen_bits(bad: bool) -> Any:
    step = 2**15 if bad else 2**15 - 1
    x, two = tile(1, 2**15 + 1), tile(1, 2)
    nisa.tensor_copy(dst=two, src=x.ap([[2**15 + 1, 1], [step, 2]]))
    return out(two)


@case(errors.DynamicOutOfRange)
def gather_index_past_the_end(bad: bool) -> Any:
    source = out(tile(64, 8))
    rows = tile(128, 1, "uint32", 64 if bad else 63)
    x = nl.ndarray((128, 8), dtype=nl.float32)
    nisa.dma_copy(dst=x, src=source.vector_select(0, rows))
    return out(x)


@case(errors.SbufFull)
def sbuf_overflow(bad: bool) -> Any:
    first, second = tile(columns=30000), tile(columns=30000)
    if bad:
        nisa.tensor_copy(dst=first, src=second)
    return out(second[:, 0:8])


@case(errors.PsumFull)
def psum_overflow(bad: bool) -> Any:
    x = tile(columns=512)
    tiles = [nl.ndarray((128, 512), nl.float32, nl.psum) for _ in range(9 if bad else 8)]
    for t in tiles:
        nisa.nc_matmul(dst=t, stationary=x[:, 0:128], moving=x)
    for t in tiles:
        nisa.tensor_copy(dst=x, src=t)
    return out(x)


@case(errors.SbufFull)
def one_tile_too_large(bad: bool) -> Any:
    x = nl.ndarray((128, 57345 if bad else 57344), dtype=nl.float32)
    nisa.memset(dst=x[:, 0:8], value=0.0)
    return out(x[:, 0:8])


@case(errors.Misaligned)
def psum_address_off_bank(bad: bool) -> Any:
    x = nl.ndarray((128, 8), nl.float32, nl.psum, address=(0, 1024 if bad else 2048))
    nisa.memset(dst=x, value=0.0)
    y = tile()
    nisa.tensor_copy(dst=y, src=x)
    return out(y)


@case(errors.AddressTaken)
def address_outside(bad: bool) -> Any:
    limit = 224 * 1024
    x = nl.ndarray((128, 8), nl.float32, address=(0, limit - (16 if bad else 32)))
    nisa.memset(dst=x, value=0.0)
    return out(x)


@case(errors.ReplacedRead)
def read_after_replacement(bad: bool) -> Any:
    x = nl.ndarray((128, 8), nl.float32, address=(0, 0))
    nisa.memset(dst=x, value=0.0)
    y = nl.ndarray((128, 8), nl.float32, address=(0, 16 if bad else 32))
    nisa.memset(dst=y, value=0.0)
    return out(x)


@case(errors.DuplicateName)
def duplicate_name(bad: bool) -> Any:
    nl.ndarray((128, 8), nl.float32, name="a")
    nl.ndarray((128, 8), nl.float32, name="a" if bad else "b")
    return out(tile())


@case(errors.RegisterMisuse)
def register_never_set(bad: bool) -> Any:
    register = nisa.register_alloc(None if bad else 3)
    x = tile(columns=1, rows=1, dtype="int32")
    nisa.register_store(x, register)
    return out(x)


@case(errors.RegisterMisuse)
def loop_counter_written(bad: bool) -> Any:
    def body(i: Any) -> None:
        nisa.register_move(i if bad else nisa.register_alloc(), 5)

    nl.fori_loop(0, 2, body)
    return out(tile())


@case(errors.LoopMisuse)
def loop_inside_no_reorder(bad: bool) -> Any:
    def body(i: Any) -> None:
        del i

    with nl.no_reorder():
        tile()
        if bad:
            nl.fori_loop(0, 2, body)
    return out(tile())


@case(errors.WrongOperator)
def python_operator_on_tensor(bad: bool) -> Any:
    x = tile()
    return out(x + x if bad else nl.add(x, x))


@case(errors.BadOutput)
def output_in_sbuf(bad: bool) -> Any:
    x = tile()
    return x if bad else out(x)


@case(errors.WrongSpace)
def gpsimd_reads_psum(bad: bool) -> Any:
    x = tile()
    engine = nisa.engine.gpsimd if bad else nisa.engine.vector
    nisa.tensor_copy(dst=x, src=psum(), engine=engine)
    return out(x)


@case(errors.WrongSpace)
def matmul_into_sbuf(bad: bool) -> Any:
    x = tile(columns=128)
    dst = tile(columns=128) if bad else nl.ndarray((128, 128), nl.float32, nl.psum)
    nisa.nc_matmul(dst=dst, stationary=x, moving=x)
    return out(x)


@case(errors.WrongSpace)
def matmul_from_psum(bad: bool) -> Any:
    x, dst = tile(columns=128), nl.ndarray((128, 128), nl.float32, nl.psum)
    nisa.nc_matmul(dst=dst, stationary=x, moving=psum(columns=128) if bad else x)
    return out(x)


@case(errors.AccumulatorUndefined)
def idle_clobbers_registers(bad: bool) -> Any:
    x, total, mask = tile(), tile(columns=1), tile(dtype="uint8")
    nisa.tensor_scalar_reduce(dst=x, data=x, op0=nl.add, operand0=0.0, reduce_op=nl.maximum)
    if bad:
        nisa.select_reduce(dst=x, predicate=mask, on_true=x, on_false=0.0)
    nisa.tensor_scalar_reduce(dst=x, data=x, op0=nl.add, operand0=0.0, reduce_op=nl.maximum,
                              reduce_res=total, reduce_cmd=nisa.reduce_cmd.reduce)  # fmt: skip
    return out(total)


@case(errors.WrongOperator)
def activation_that_is_none(bad: bool) -> Any:
    x = tile()
    nisa.activation(dst=x, op=nl.floor if bad else nl.exp, data=x)
    return out(x)


@case(errors.ShapeMismatch)
def unequal_elements(bad: bool) -> Any:
    x = tile(columns=16)
    nisa.tensor_copy(dst=x, src=tile(columns=8 if bad else 16))
    return out(x)
