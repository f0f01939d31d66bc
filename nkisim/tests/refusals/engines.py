"""Planted faults of engines: placement, dtypes, shapes, operators, accumulation."""

from __future__ import annotations

from typing import Any

import nkisim.isa as nisa
import nkisim.language as nl
from nkisim import errors
from nkisim.tests.harness import out, psum, tile
from nkisim.tests.registry import case


@case(errors.BothInPsum)
def two_psum_inputs(bad: bool) -> Any:
    x = tile()
    nisa.tensor_tensor(dst=x, data1=psum(), data2=psum() if bad else x, op=nl.add)
    return out(x)


@case(errors.WrongSpace)
def gpsimd_reads_psum(bad: bool) -> Any:
    x = tile()
    engine = nisa.engine.gpsimd if bad else nisa.engine.vector
    nisa.tensor_copy(dst=x, src=psum(), engine=engine)
    return out(x)


@case(errors.WrongSpace)
def dma_from_psum(bad: bool) -> Any:
    return out(psum() if bad else tile())


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


@case(errors.WrongDtype)
def matmul_mixes_fp32(bad: bool) -> Any:
    x, y = tile(columns=128), tile(columns=128, dtype="bfloat16")
    dst = nl.ndarray((128, 128), nl.float32, nl.psum)
    nisa.nc_matmul(dst=dst, stationary=y, moving=x if bad else y)
    return out(x)


@case(errors.WrongDtype)
def matmul_into_bf16(bad: bool) -> Any:
    x = tile(columns=128, dtype="bfloat16")
    dst = nl.ndarray((128, 128), nl.bfloat16 if bad else nl.float32, nl.psum)
    nisa.nc_matmul(dst=dst, stationary=x, moving=x)
    return out(x)


@case(errors.ShapeMismatch)
def matmul_contraction(bad: bool) -> Any:
    x, dst = tile(columns=128), nl.ndarray((128, 128), nl.float32, nl.psum)
    nisa.nc_matmul(dst=dst, stationary=x, moving=x[0:64] if bad else x)
    return out(x)


@case(errors.TileTooLarge)
def matmul_wide_moving(bad: bool) -> Any:
    n = 513 if bad else 512
    dst = nl.ndarray((128, n), nl.float32, nl.psum)
    nisa.nc_matmul(dst=dst, stationary=tile(columns=128), moving=tile(columns=n))
    return out(tile())


@case(errors.PsumBankCrossed)
def matmul_crosses_bank(bad: bool) -> Any:
    x, dst = tile(columns=128), nl.ndarray((128, 1024), nl.float32, nl.psum)
    start = 448 if bad else 512
    nisa.nc_matmul(dst=dst[:, start : start + 128], stationary=x, moving=x)
    return out(x)


@case(errors.AccumulateMisuse)
def accumulate_first(bad: bool) -> Any:
    x, dst = tile(columns=128), nl.ndarray((128, 128), nl.float32, nl.psum)
    nisa.nc_matmul(dst=dst, stationary=x, moving=x, accumulate=bad)
    return out(x)


@case(errors.AccumulateMisuse)
def accumulate_on_vector_data(bad: bool) -> Any:
    x, dst = tile(columns=128), nl.ndarray((128, 128), nl.float32, nl.psum)
    nisa.memset(dst=dst, value=1.0)
    nisa.nc_matmul(dst=dst, stationary=x, moving=x, accumulate=None if bad else False)
    return out(x)


@case(errors.WrongArgument)
def transpose_without_identity(bad: bool) -> Any:
    x, eye = tile(columns=128), nl.shared_identity_matrix(128, dtype=nl.float32)
    dst = nl.ndarray((128, 128), nl.float32, nl.psum)
    nisa.nc_matmul(dst=dst, stationary=x, moving=x if bad else eye, is_transpose=True)
    return out(x)


@case(errors.TileTooLarge)
def vector_transpose_size(bad: bool) -> Any:
    n = 64 if bad else 32
    x = tile(n, n)
    nisa.nc_transpose(dst=tile(n, n), data=x, engine=nisa.engine.vector)
    return out(x)


@case(errors.ShapeMismatch)
def unequal_elements(bad: bool) -> Any:
    x = tile(columns=16)
    nisa.tensor_copy(dst=x, src=tile(columns=8 if bad else 16))
    return out(x)


@case(errors.WrongDtype)
def bitvec_on_floats(bad: bool) -> Any:
    x = tile(dtype="float32" if bad else "int32", value=1)
    nisa.tensor_tensor(dst=x, data1=x, data2=x, op=nl.bitwise_or)
    return out(x)


@case(errors.WrongOperator)
def mixed_operator_kinds(bad: bool) -> Any:
    x = tile(dtype="int32")
    op1 = nl.add if bad else nl.bitwise_or
    nisa.tensor_scalar(dst=x, data=x, op0=nl.bitwise_and, operand0=1, op1=op1, operand1=1)
    return out(x)


@case(errors.WrongDtype)
def bf16_column_operand(bad: bool) -> Any:
    x, column = tile(), tile(columns=1, dtype="bfloat16" if bad else "float32")
    nisa.tensor_scalar(dst=x, data=x, op0=nl.add, operand0=column)
    return out(x)


@case(errors.WrongEngine)
def scalar_engine_maximum(bad: bool) -> Any:
    x = tile()
    op = nl.maximum if bad else nl.multiply
    nisa.tensor_scalar(dst=x, data=x, op0=op, operand0=2.0, engine=nisa.engine.scalar)
    return out(x)


@case(errors.WrongOperator)
def activation_that_is_none(bad: bool) -> Any:
    x = tile()
    nisa.activation(dst=x, op=nl.floor if bad else nl.exp, data=x)
    return out(x)


@case(errors.NeedsNewerCore)
def v4_instruction(bad: bool) -> Any:
    x = tile()
    if bad:
        nisa.exponential(dst=x, src=x)
    else:
        nisa.activation(dst=x, op=nl.exp, data=x)
    return out(x)


@case(errors.WrongArgument)
def float_memset_of_integers(bad: bool) -> Any:
    return out(tile(dtype="int32", value=1.5 if bad else 1))


@case(errors.WrongArgument)
def reduce_partition_axis(bad: bool) -> Any:
    x, total = tile(), tile(columns=1)
    nisa.tensor_reduce(dst=total, op=nl.add, data=x, axis=0 if bad else 1)
    return out(total)


@case(errors.AccumulatorUndefined)
def accumulate_without_reset(bad: bool) -> Any:
    x, total = tile(), tile(columns=1)
    command = nisa.reduce_cmd.reduce if bad else nisa.reduce_cmd.reset_reduce
    nisa.activation(dst=x, op=nl.exp, data=x, reduce_op=nl.add, reduce_res=total, reduce_cmd=command)
    return out(total)


@case(errors.AccumulatorUndefined)
def idle_clobbers_registers(bad: bool) -> Any:
    x, total, mask = tile(), tile(columns=1), tile(dtype="uint8")
    nisa.tensor_scalar_reduce(dst=x, data=x, op0=nl.add, operand0=0.0, reduce_op=nl.maximum)
    if bad:
        nisa.select_reduce(dst=x, predicate=mask, on_true=x, on_false=0.0)
    nisa.tensor_scalar_reduce(dst=x, data=x, op0=nl.add, operand0=0.0, reduce_op=nl.maximum,
                              reduce_res=total, reduce_cmd=nisa.reduce_cmd.reduce)  # fmt: skip
    return out(total)
