"""Tile sizes of the chip, core slices, and small tile subroutines that every kernel family uses."""

import math

import nki.isa as nisa
import nki.language as nl

# partitions of SBUF and PSUM
P = 128
# free elements of one matmul: a PSUM bank of fp32
BANK = 512
PSUM_BANK_BYTES = 2048
# mask value: below every score; scaling it stays finite in fp32
LOWEST = -3.0e38


def absent(value):
    """Whether an optional operand or field is None; the NKI language guide refuses `is None`."""
    return value == None  # noqa: E711


def this_core():
    """This core's number and the number of cores of the launch: (0, 1) or (0 or 1, 2)."""
    if nl.program_ndim() == 0:
        return 0, 1
    return nl.program_id(0), nl.num_programs()


def core_slice(count, unit=1):
    """This core's slice of `count` items, first and last: all, or half, in multiples of `unit`."""
    core, cores = this_core()
    if cores == 1:
        return 0, count
    middle = min(count, math.ceil(count / unit / 2) * unit)
    if core == 0:
        return 0, middle
    return middle, count


def itemsize(dtype):
    """Bytes per element."""
    if dtype == nl.float32:
        return 4
    if dtype == nl.float8_e4m3:
        return 1
    return 2


def dma_static(dst, src):
    """DMA with host-made (static) descriptors: back-to-back small copies are not limited by descriptor generation."""
    nisa.dma_copy(dst=dst, src=src, dge_mode=nisa.dge_mode.none)


def preload_act_table(function, after=None):
    """Preload the activation table of `function` on the Scalar Engine.

    `after` (1, 1) adds a data dependence, so that the compiler cannot hoist the load above its producer.
    """
    scratch_11 = nl.ndarray((1, 1), dtype=nl.float32)
    if absent(after):
        nisa.memset(dst=scratch_11, value=0.0)
    else:
        nisa.tensor_scalar(dst=scratch_11, data=after, op0=nl.multiply, operand0=0.0)
    nisa.activation(dst=scratch_11, op=function, data=scratch_11)


def affine_iota(rows, period, per_period, per_row, first):
    """first + per_period * (p // period) + per_row * (p % period) on partition p: fp32 (rows, 1), exact below 2**24."""
    count = math.ceil(rows / period)
    passed, iota_R1 = nl.ndarray((rows, count), dtype=nl.float32), nl.ndarray((rows, 1), dtype=nl.float32)
    linear_R1 = nl.ndarray((rows, 1), dtype=nl.float32)
    # p // period is the number of k >= 0 with p >= k * period, less one
    jump = per_period - per_row * period
    nisa.iota(dst=passed, pattern=[[-period, count]], offset=0, channel_multiplier=1)
    nisa.iota(dst=linear_R1, pattern=[[0, 1]], offset=first - jump, channel_multiplier=per_row)
    nisa.tensor_scalar(
        dst=passed, data=passed, op0=nl.greater_equal, operand0=0.0, op1=nl.multiply, operand1=float(jump)
    )
    nisa.tensor_reduce(dst=iota_R1, op=nl.add, data=passed, axis=1)
    nisa.tensor_tensor(dst=iota_R1, data1=iota_R1, data2=linear_R1, op=nl.add)
    return iota_R1


def transpose_on_pe(dst_PTR, src_RPT, span, engines):
    """Transpose tiles span[0] to span[1] of (R, P, T) on the Tensor Engine; `engines` copy its banks round-robin."""
    rows, dtype = src_RPT.shape[0], src_RPT.dtype
    each, number = PSUM_BANK_BYTES // (P * itemsize(dtype)), 0
    for first in range(span[0], span[1], each):
        last = min(first + each, span[1])
        psum_PTR = nl.ndarray((P, last - first, rows), dtype=dtype, buffer=nl.psum)
        for t in range(first, last):
            nisa.nc_transpose(dst=psum_PTR[:, t - first, :], data=src_RPT[:, :, t])
        nisa.tensor_copy(dst=dst_PTR[:, first:last, :], src=psum_PTR, engine=engines[number % len(engines)])
        number = number + 1
