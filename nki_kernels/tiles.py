"""Shared by the kernels of all families: the chip's tile sizes, small moves and tiles, and the halves of two cores."""

import math

import nki.isa as nisa
import nki.language as nl

# partitions of SBUF and PSUM
P = 128
# columns of one product: a PSUM bank of fp32
BANK = 512
PSUM_BANK_BYTES = 2048
# below every score, and far enough from the end of fp32 that scaling does not leave it
LOWEST = -3.0e38


def absent(value):
    """Whether an optional operand or field is None; the NKI language guide refuses `is None`."""
    return value == None  # noqa: E711


def this_core():
    """This core's number and how many cores share the launch: (0, 1) or (0 or 1, 2)."""
    if nl.program_ndim() == 0:
        return 0, 1
    return nl.program_id(0), nl.num_programs()


def share_of_core(count, unit=1):
    """The part of `count` things that this core works on: all, or the first or second half in whole units."""
    core, cores = this_core()
    if cores == 1:
        return 0, count
    middle = min(count, math.ceil(count / unit / 2) * unit)
    if core == 0:
        return 0, middle
    return middle, count


def itemsize(dtype):
    """Bytes of one number."""
    if dtype == nl.float32:
        return 4
    return 2


def move(dst, src):
    """A small transfer with descriptors that exist beforehand, so that many can follow each other."""
    nisa.dma_copy(dst=dst, src=src, dge_mode=nisa.dge_mode.none)


def warm_up(function, after=None):
    """Let the Scalar Engine load the table of a function while the first operands travel, or once `after` is there.

    `after` (1, 1) is made by the last work with the table before it, which a compiler could otherwise move behind.
    """
    scratch_11 = nl.ndarray((1, 1), dtype=nl.float32)
    if absent(after):
        nisa.memset(dst=scratch_11, value=0.0)
    else:
        nisa.tensor_scalar(dst=scratch_11, data=after, op0=nl.multiply, operand0=0.0)
    nisa.activation(dst=scratch_11, op=function, data=scratch_11)


def ramp(rows, period, per_period, per_row, first):
    """first + per_period * (p // period) + per_row * (p % period) on partition p: fp32 (rows, 1), exact below 2**24."""
    count = math.ceil(rows / period)
    passed, ramp_R1 = nl.ndarray((rows, count), dtype=nl.float32), nl.ndarray((rows, 1), dtype=nl.float32)
    straight_R1 = nl.ndarray((rows, 1), dtype=nl.float32)
    # p // period is the number of periods that p has passed, less one
    jump = per_period - per_row * period
    nisa.iota(dst=passed, pattern=[[-period, count]], offset=0, channel_multiplier=1)
    nisa.iota(dst=straight_R1, pattern=[[0, 1]], offset=first - jump, channel_multiplier=per_row)
    nisa.tensor_scalar(
        dst=passed, data=passed, op0=nl.greater_equal, operand0=0.0, op1=nl.multiply, operand1=float(jump)
    )
    nisa.tensor_reduce(dst=ramp_R1, op=nl.add, data=passed, axis=1)
    nisa.tensor_tensor(dst=ramp_R1, data1=ramp_R1, data2=straight_R1, op=nl.add)
    return ramp_R1


def transposed(source, first, rows, start):
    """Rows `first` to `first + rows` of D elements of an HBM tensor (..., D) as an SBUF tile (D, rows).

    Up to 128 at a time travel, through the partitions from `start` (32 or 64) on if they are allowed there.
    """
    dim = source.shape[len(source.shape) - 1]
    turned_DR = nl.ndarray((dim, rows), dtype=source.dtype)
    for done in range(0, rows, P):
        count = min(P, rows - done)
        skip = 0
        # 32 rows may start at any multiple of 32, up to 64 at 64
        if count <= start:
            skip = start
        loaded = nl.ndarray((skip + count, dim), dtype=source.dtype)
        rows_RD = loaded[skip : skip + count, :]
        move(rows_RD, source.ap([[dim, count], [1, dim]], offset=(first + done) * dim))
        psum_DR = nl.ndarray((dim, count), dtype=source.dtype, buffer=nl.psum)
        nisa.nc_transpose(dst=psum_DR, data=rows_RD)
        nisa.tensor_copy(dst=turned_DR[:, done : done + count], src=psum_DR)
    return turned_DR
