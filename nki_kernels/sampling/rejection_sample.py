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

from nki_kernels.sampling.best import best_column, best_of_chunks, over_parts
from nki_kernels.sampling.rows import chunks, for_all, load, part_starts, per_row, store_per_row, tiling
from nki_kernels.tiles import LOWEST, this_core

LARGEST_CHUNK = 2048


class Operands(nl.NKIObject):
    """The launch's operands in HBM, (R, V) each, and each row's numbers on its partitions."""

    def __init__(self, target, draft, noise, scales_P6, weight_P1):
        self.target = target
        self.draft = draft
        self.noise = noise
        self.scales_P6 = scales_P6
        self.weight_P1 = weight_P1


def probabilities(logits_PW, scales_P3):
    """exp(l * scale + bias) where l reaches the floor, else 0: fp32 (P, W)."""
    mass_PW, floor_P1 = nl.ndarray(logits_PW.shape, nl.float32), scales_P3[:, 2:3]
    nisa.activation(dst=mass_PW, op=nl.exp, data=logits_PW, scale=scales_P3[:, 0:1], bias=scales_P3[:, 1:2])
    nisa.scalar_tensor_tensor(
        dst=mass_PW, data=logits_PW, op0=nl.greater_equal, operand0=floor_P1, op1=nl.multiply, operand1=mass_PW
    )
    return mass_PW


def sum_of(tile_PW, function, sum_P1):
    """The sum of a function of each partition's numbers, on the Scalar Engine: fp32 (P, 1)."""
    read_PW = nl.ndarray(tile_PW.shape, nl.float32)
    nisa.activation(
        dst=read_PW,
        op=function,
        data=tile_PW,
        reduce_op=nl.add,
        reduce_res=sum_P1,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )


def chosen(weights_PW, place_P1, columns_PW, weight_P1):
    """The weight at column `place` of each partition, 0 if that is elsewhere: fp32 (P, 1)."""
    only_PW = nl.ndarray(weights_PW.shape, nl.float32)
    nisa.scalar_tensor_tensor(
        dst=only_PW, data=columns_PW, op0=nl.equal, operand0=place_P1, op1=nl.multiply, operand1=weights_PW
    )
    sum_of(only_PW, nl.copy, weight_P1)


def race(t, operands, chunk, place_P1, total_P3):
    """One chunk: adds to the three sums `total` (P, 3), returns its best score and column, (P, 1) each."""
    target_PW = probabilities(load(t, operands.target, chunk, LOWEST), operands.scales_P6[:, 0:3])
    draft_PW = probabilities(load(t, operands.draft, chunk, LOWEST), operands.scales_P6[:, 3:6])
    shape, sums_P3 = target_PW.shape, nl.ndarray((target_PW.shape[0], 3), nl.float32)
    columns_PW, residual_PW = nl.ndarray(shape, nl.float32), nl.ndarray(shape, nl.float32)
    speed_PW = nl.ndarray(shape, nl.float32)
    nisa.iota(dst=columns_PW, pattern=[[1, chunk[1]]], offset=chunk[0], channel_multiplier=0)
    chosen(target_PW, place_P1, columns_PW, sums_P3[:, 0:1])
    chosen(draft_PW, place_P1, columns_PW, sums_P3[:, 1:2])
    # negative where the draft has more: relu and maximum below take it as 0
    nisa.scalar_tensor_tensor(
        dst=residual_PW,
        data=target_PW,
        op0=nl.multiply,
        operand0=operands.weight_P1,
        op1=nl.subtract,
        operand1=draft_PW,
    )
    sum_of(residual_PW, nl.relu, sums_P3[:, 2:3])
    nisa.activation(dst=speed_PW, op=nl.exp, data=load(t, operands.noise, chunk, 0.0))
    nisa.scalar_tensor_tensor(
        dst=speed_PW, data=residual_PW, op0=nl.maximum, operand0=0.0, op1=nl.multiply, operand1=speed_PW
    )
    nisa.tensor_tensor(dst=total_P3, data1=total_P3, data2=sums_P3, op=nl.add)
    return best_column(speed_PW)


def sum_over_parts(t, total_P3):
    """Column sums over the parts of each row: fp32 (3, R) from (parts * R, 3)."""
    turned_psum = nl.ndarray((3, t.parts, t.rows), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=turned_psum, data=total_P3)
    sums_3R = nl.ndarray((3, t.rows), nl.float32)
    nisa.tensor_reduce(dst=sums_3R, op=nl.add, data=turned_psum.permute((0, 2, 1)), axis=2)
    return sums_3R


@nki.jit
def rejection_sample_kernel(target, draft, scales, weight, drafted, noise, start):
    """Sums (cores, 3, R), values (cores, R), ids (cores, R); a core's half of the columns is a shard of its own."""
    rows = target.shape[0]
    core, cores = this_core()
    sums = nl.ndarray((cores, 3, rows), dtype=nl.float32, buffer=nl.shared_hbm)
    values = nl.ndarray((cores, rows), dtype=nl.float32, buffer=nl.shared_hbm)
    ids = nl.ndarray((cores, rows), dtype=nl.int32, buffer=nl.shared_hbm)
    t = tiling(rows, target.shape[1])
    operands = Operands(target, draft, noise, per_row(t, scales, 6), per_row(t, weight, 1))
    base_P1, place_P1 = nl.ndarray((t.partitions(), 1), nl.float32), nl.ndarray((t.partitions(), 1), nl.float32)
    total_P3, bests = nl.ndarray((t.partitions(), 3), nl.float32), []
    nisa.tensor_tensor(dst=base_P1, data1=part_starts(t, 1), data2=for_all(t, start), op=nl.add)
    nisa.tensor_tensor(dst=place_P1, data1=per_row(t, drafted, 1), data2=base_P1, op=nl.subtract)
    nisa.memset(dst=total_P3, value=0.0)
    for chunk in chunks(t, LARGEST_CHUNK):
        value_P1, id_P1 = race(t, operands, chunk, place_P1, total_P3)
        nisa.tensor_scalar(dst=id_P1, data=id_P1, op0=nl.add, operand0=float(chunk[0]), op1=nl.add, operand1=base_P1)
        bests.append((value_P1, id_P1))
    best = best_of_chunks(bests)
    value_1R, id_1R = over_parts(t, best[0], best[1])
    whole_1R = nl.ndarray((1, rows), dtype=nl.int32)
    nisa.tensor_copy(dst=whole_1R, src=id_1R)
    nisa.dma_copy(dst=sums.ap([[rows, 3], [1, rows]], offset=core * 3 * rows), src=sum_over_parts(t, total_P3))
    store_per_row(values, core, value_1R)
    store_per_row(ids, core, whole_1R)
    return sums, values, ids
