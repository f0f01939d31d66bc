"""Coupled sampling on a vocabulary shard: each row's largest perturbed logit and its token id.

value[r] = max_i logits[r, i] / T[r] + noise[r, i] over ids with logits[r, i] >= floor[r];  id[r] the smallest such id

R <= 128 rows, V ids of the shard. A row with T = 0 takes the largest logit, without noise. `floor` carries top-k, top-p
and min-p over the full vocabulary (filter_floor.py); the lowest fp32 number disables it. The draft samples with the
same kernel and noise. accept_drafts.py merges shards and cores. A row's bits do not depend on other rows.

Layouts: logits (R, V) fp32 or bf16, noise (R, V) fp32, temperature and floor (R, 1) fp32, start (1, 1) int32, the
shard's first id; values (cores, R) fp32, ids (cores, R) int32: a core's half of the columns is a shard too.
Cost: five passes over V (roofline.coupled_sample). Source: Daliri, Musco, Suresh, arXiv 2408.07978. Launched by every
step and prefill graph.
"""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

from nki_kernels.checks import FP32, INT32, check, check_logits, launcher, refuse
from nki_kernels.sampling.argmax import argmax_of_chunks, argmax_of_columns, argmax_of_parts
from nki_kernels.sampling.vocab_tiling import chunks, for_all, load, part_starts, per_row, store_per_row, vocab_tiling
from nki_kernels.tiles import LOWEST, this_core

LARGEST_CHUNK = 2048


def scales(temperature_P1):
    """Factors of logits and noise: 1 / T and 1, or 1 and 0 where T is 0: fp32 (P, 1) each."""
    shape = temperature_P1.shape
    noisy_P1, inverse_P1 = nl.ndarray(shape, nl.float32), nl.ndarray(shape, nl.float32)
    nisa.tensor_scalar(dst=noisy_P1, data=temperature_P1, op0=nl.greater, operand0=0.0)
    greedy_P1 = nl.ndarray(shape, nl.float32)
    nisa.tensor_scalar(dst=greedy_P1, data=temperature_P1, op0=nl.less_equal, operand0=0.0)
    nisa.tensor_tensor(dst=inverse_P1, data1=temperature_P1, data2=greedy_P1, op=nl.add)
    nisa.reciprocal(dst=inverse_P1, data=inverse_P1)
    return inverse_P1, noisy_P1


def scores(logits_PW, noise_PW, inverse_P1, noisy_P1, floor_P1):
    """logits / T + noise, and LOWEST where a logit is below the floor: fp32 (P, W)."""
    shape = noise_PW.shape
    scores_PW, removed_PW = nl.ndarray(shape, nl.float32), nl.ndarray(shape, nl.float32)
    scaled_PW = nl.ndarray(shape, nl.float32)
    nisa.activation(dst=scaled_PW, op=nl.copy, data=noise_PW, scale=noisy_P1)
    nisa.tensor_scalar(dst=removed_PW, data=logits_PW, op0=nl.less, operand0=floor_P1, op1=nl.multiply, operand1=LOWEST)
    nisa.scalar_tensor_tensor(
        dst=scores_PW, data=logits_PW, op0=nl.multiply, operand0=inverse_P1, op1=nl.add, operand1=scaled_PW
    )
    nisa.tensor_tensor(dst=scores_PW, data1=scores_PW, data2=removed_PW, op=nl.add)
    return scores_PW


@nki.jit
def coupled_sample_kernel(logits, noise, temperature, floor, start):
    """Return values and ids, (cores, R) each."""
    rows = logits.shape[0]
    core, cores = this_core()
    values = nl.ndarray((cores, rows), dtype=nl.float32, buffer=nl.shared_hbm)
    ids = nl.ndarray((cores, rows), dtype=nl.int32, buffer=nl.shared_hbm)
    t = vocab_tiling(rows, logits.shape[1])
    sizes = chunks(t, LARGEST_CHUNK)
    ahead = (load(t, logits, sizes[0], LOWEST), load(t, noise, sizes[0], 0.0))
    inverse_P1, noisy_P1 = scales(per_row(t, temperature, 1))
    floor_P1, base_P1 = per_row(t, floor, 1), nl.ndarray((t.partitions(), 1), nl.float32)
    nisa.tensor_tensor(dst=base_P1, data1=part_starts(t, 1), data2=for_all(t, start), op=nl.add)
    maxima = []
    for i in range(len(sizes)):
        loaded = ahead
        if i + 1 < len(sizes):
            ahead = (load(t, logits, sizes[i + 1], LOWEST), load(t, noise, sizes[i + 1], 0.0))
        value_P1, id_P1 = argmax_of_columns(scores(loaded[0], loaded[1], inverse_P1, noisy_P1, floor_P1))
        nisa.tensor_scalar(dst=id_P1, data=id_P1, op0=nl.add, operand0=float(sizes[i][0]), op1=nl.add, operand1=base_P1)
        maxima.append((value_P1, id_P1))
    best = argmax_of_chunks(maxima)
    value_1R, id_1R = argmax_of_parts(t, best[0], best[1])
    int_id_1R = nl.ndarray((1, rows), dtype=nl.int32)
    nisa.tensor_copy(dst=int_id_1R, src=id_1R)
    store_per_row(values, core, value_1R)
    store_per_row(ids, core, int_id_1R)
    return values, ids


def check_operands(logits, noise, temperature, floor, start):
    """Refuse operands that the kernel cannot serve."""
    rows, columns = check_logits(logits)
    check("noise", noise, (rows, columns), FP32)
    check("temperature", temperature, (rows, 1), FP32)
    check("floor", floor, (rows, 1), FP32)
    check("start", start, (1, 1), INT32)
    good = (np.asarray(temperature) >= 0).all()
    refuse(not good, "a temperature is negative or NaN, 0 or more is needed: pass 0 for greedy rows")


coupled_sample = launcher(coupled_sample_kernel, check_operands)
