"""Rejection sampling on a vocabulary shard: what the rule needs of each row's target and draft distribution.

target[i] = exp(t[i] * ts + tb) [t[i] >= tf],  draft[i] likewise;  residual[i] = max(weight * target[i] - draft[i], 0)
sums = target[drafted], draft[drafted], sum_i residual[i];  id = argmax_i residual[i] * exp(noise[i]), the smallest

With scale 1 / T and bias -log sum exp over the whole vocabulary the weights are probabilities. weight is 1 for the
classic rule; the row after the last draft has draft bias -1e30, hence no draft mass: its residual is the target, the
bonus. exp(noise) is the inverse of an exponential: the race that the largest wins draws from the residual, without a
logarithm of it. noise comes from a domain of its own (gumbel_noise.py). The rule itself: accept_rejection.py.

Layouts: target and draft logits (R, V) fp32 or bf16, scales (R, 6) fp32 = (ts, tb, tf, ds, db, df), weight (R, 1) fp32,
drafted (R, 1) int32, noise (R, V) fp32, start (1, 1) int32; sums (cores, 3, R) and values (cores, R) fp32, ids
(cores, R) int32. R <= 128. Sources: Leviathan, Kalman, Matias, ICML 2023; Chen et al., arXiv 2302.01318.
Cost: nine passes of the Vector Engine over V (roofline.rejection_sample).
"""

import nki
import nki.isa as nisa
import nki.language as nl

from nki_kernels.sampling.best import best_column, over_parts
from nki_kernels.sampling.coupled_sample import best_of_chunks
from nki_kernels.sampling.rows import LOWEST, chunks, for_all, load, part_starts, per_row, tiling

LARGEST_CHUNK = 2048


class Operands(nl.NKIObject):
    """The launch's operands in HBM, and each row's numbers on its partitions."""

    def __init__(self, target, draft, noise, scales, weight):
        self.target = target
        self.draft = draft
        self.noise = noise
        self.scales = scales
        self.weight = weight


def probabilities(logits, scales):
    """exp(l * scale + bias) where l reaches the floor, else 0; scales (P, 3): fp32 (P, W)."""
    made = nl.ndarray(logits.shape, nl.float32)
    nisa.activation(dst=made, op=nl.exp, data=logits, scale=scales[:, 0:1], bias=scales[:, 1:2])
    nisa.scalar_tensor_tensor(
        dst=made, data=logits, op0=nl.greater_equal, operand0=scales[:, 2:3], op1=nl.multiply, operand1=made
    )
    return made


def sum_of(tile, function, result):
    """The sum of a function of each partition's numbers, on the Scalar Engine: fp32 (P, 1)."""
    read = nl.ndarray(tile.shape, nl.float32)
    nisa.activation(
        dst=read, op=function, data=tile, reduce_op=nl.add, reduce_res=result, reduce_cmd=nisa.reduce_cmd.reset_reduce
    )


def chosen(weights, place, columns, result):
    """The weight at column `place` of each partition, 0 if that is elsewhere: fp32 (P, 1)."""
    only = nl.ndarray(weights.shape, nl.float32)
    nisa.scalar_tensor_tensor(dst=only, data=columns, op0=nl.equal, operand0=place, op1=nl.multiply, operand1=weights)
    sum_of(only, nl.copy, result)


def race(t, operands, chunk, place, total):
    """One chunk: adds to the three sums `total` (P, 3), returns its best score and column, (P, 1) each."""
    target = probabilities(load(t, operands.target, chunk, LOWEST), operands.scales[:, 0:3])
    draft = probabilities(load(t, operands.draft, chunk, LOWEST), operands.scales[:, 3:6])
    shape, part = target.shape, nl.ndarray((target.shape[0], 3), nl.float32)
    columns, rest, speed = nl.ndarray(shape, nl.float32), nl.ndarray(shape, nl.float32), nl.ndarray(shape, nl.float32)
    nisa.iota(dst=columns, pattern=[[1, chunk[1]]], offset=chunk[0], channel_multiplier=0)
    chosen(target, place, columns, part[:, 0:1])
    chosen(draft, place, columns, part[:, 1:2])
    nisa.scalar_tensor_tensor(
        dst=rest, data=target, op0=nl.multiply, operand0=operands.weight, op1=nl.subtract, operand1=draft
    )
    sum_of(rest, nl.relu, part[:, 2:3])
    nisa.activation(dst=speed, op=nl.exp, data=load(t, operands.noise, chunk, 0.0))
    nisa.scalar_tensor_tensor(dst=speed, data=rest, op0=nl.maximum, operand0=0.0, op1=nl.multiply, operand1=speed)
    nisa.tensor_tensor(dst=total, data1=total, data2=part, op=nl.add)
    return best_column(speed)


def sum_over_parts(t, total):
    """Column sums over the parts of each row: fp32 (3, R) from (parts * R, 3)."""
    turned = nl.ndarray((3, t.parts, t.rows), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=turned, data=total)
    made = nl.ndarray((3, t.rows), nl.float32)
    nisa.tensor_reduce(dst=made, op=nl.add, data=turned.permute((0, 2, 1)), axis=2)
    return made


@nki.jit
def rejection_sample_kernel(target, draft, scales, weight, drafted, noise, start):
    """Sums (cores, 3, R), values (cores, R), ids (cores, R); a core's half of the columns is a shard of its own."""
    rows, core, cores = target.shape[0], 0, 1
    if nl.program_ndim() > 0:
        core, cores = nl.program_id(0), nl.num_programs()
    sums = nl.ndarray((cores, 3, rows), dtype=nl.float32, buffer=nl.shared_hbm)
    values = nl.ndarray((cores, rows), dtype=nl.float32, buffer=nl.shared_hbm)
    ids = nl.ndarray((cores, rows), dtype=nl.int32, buffer=nl.shared_hbm)
    t = tiling(rows, target.shape[1])
    operands = Operands(target, draft, noise, per_row(t, scales, 6), per_row(t, weight, 1))
    base, place = nl.ndarray((t.partitions(), 1), nl.float32), nl.ndarray((t.partitions(), 1), nl.float32)
    total, found = nl.ndarray((t.partitions(), 3), nl.float32), []
    nisa.tensor_tensor(dst=base, data1=part_starts(t, 1), data2=for_all(t, start), op=nl.add)
    nisa.tensor_tensor(dst=place, data1=per_row(t, drafted, 1), data2=base, op=nl.subtract)
    nisa.memset(dst=total, value=0.0)
    for chunk in chunks(t, LARGEST_CHUNK):
        value, column = race(t, operands, chunk, place, total)
        nisa.tensor_scalar(dst=column, data=column, op0=nl.add, operand0=float(chunk[0]), op1=nl.add, operand1=base)
        found.append((value, column))
    best = best_of_chunks(t, found)
    top, winner = over_parts(t, best[0], best[1])
    whole = nl.ndarray((1, rows), dtype=nl.int32)
    nisa.tensor_copy(dst=whole, src=winner)
    nisa.dma_copy(dst=sums.ap([[rows, 3], [1, rows]], offset=core * 3 * rows), src=sum_over_parts(t, total))
    nisa.dma_copy(dst=values.ap([[rows, 1], [1, rows]], offset=core * rows), src=top)
    nisa.dma_copy(dst=ids.ap([[rows, 1], [1, rows]], offset=core * rows), src=whole)
    return sums, values, ids
