"""Coupled sampling on a vocabulary shard: each row's best perturbed logit and the id that has it.

value[r] = max_i logits[r, i] / T[r] + noise[r, i] over ids with logits[r, i] >= floor[r];  id[r] the smallest such id

A row with T = 0 takes the best logit, without noise. `floor` carries top-k, top-p and min-p over the whole
vocabulary (filter_floor.py); the lowest fp32 number switches it off. The draft draws with the same kernel and
noise. Shards and cores are merged by accept_drafts.py.

Layouts: logits (R, V) fp32 or bf16, noise (R, V) fp32, temperature and floor (R, 1) fp32, start (1, 1) int32, the
shard's first id; values (cores, R) fp32, ids (cores, R) int32. R <= 128.
Source: Daliri, Musco, Suresh, arXiv 2408.07978. Cost: five passes over V (roofline.coupled_sample).
"""

import nki
import nki.isa as nisa
import nki.language as nl

from nki_kernels.sampling.best import best_column, over_parts, smallest_best
from nki_kernels.sampling.rows import LOWEST, chunks, for_all, load, part_starts, per_row, tiling

LARGEST_CHUNK = 2048


def scales(temperature):
    """Factors of logits and noise: 1 / T and 1, or 1 and 0 where T is 0: fp32 (P, 1) each."""
    shape = temperature.shape
    noisy, inverse = nl.ndarray(shape, nl.float32), nl.ndarray(shape, nl.float32)
    nisa.tensor_scalar(dst=noisy, data=temperature, op0=nl.greater, operand0=0.0)
    cold = nl.ndarray(shape, nl.float32)
    nisa.tensor_scalar(dst=cold, data=temperature, op0=nl.less_equal, operand0=0.0)
    nisa.tensor_tensor(dst=inverse, data1=temperature, data2=cold, op=nl.add)
    nisa.reciprocal(dst=inverse, data=inverse)
    return inverse, noisy


def scores(logits, noise, inverse, noisy, floor):
    """logits / T + noise, and LOWEST where a logit is below the floor: fp32 (P, W)."""
    made, removed = nl.ndarray(noise.shape, nl.float32), nl.ndarray(noise.shape, nl.float32)
    kept = nl.ndarray(noise.shape, nl.float32)
    nisa.activation(dst=kept, op=nl.copy, data=noise, scale=noisy)
    nisa.tensor_scalar(dst=removed, data=logits, op0=nl.less, operand0=floor, op1=nl.multiply, operand1=LOWEST)
    nisa.scalar_tensor_tensor(dst=made, data=logits, op0=nl.multiply, operand0=inverse, op1=nl.add, operand1=kept)
    nisa.tensor_tensor(dst=made, data1=made, data2=removed, op=nl.add)
    return made


def best_of_chunks(t, found):
    """The best of each partition over its chunks, from a list of (value, id) columns."""
    if len(found) == 1:
        return found[0]
    count = len(found)
    values, ids = nl.ndarray((t.partitions(), 1, count), nl.float32), nl.ndarray((t.partitions(), 1, count), nl.float32)
    for i in range(count):
        nisa.tensor_copy(dst=values[:, 0, i : i + 1], src=found[i][0])
        nisa.tensor_copy(dst=ids[:, 0, i : i + 1], src=found[i][1])
    return smallest_best(values, ids, (t.partitions(), 1, count))


@nki.jit
def coupled_sample_kernel(logits, noise, temperature, floor, start):
    """Values (cores, R) fp32 and ids (cores, R) int32 of this shard's best; a core's half is a shard of its own."""
    rows, core, cores = logits.shape[0], 0, 1
    if nl.program_ndim() > 0:
        core, cores = nl.program_id(0), nl.num_programs()
    values = nl.ndarray((cores, rows), dtype=nl.float32, buffer=nl.shared_hbm)
    ids = nl.ndarray((cores, rows), dtype=nl.int32, buffer=nl.shared_hbm)
    t = tiling(rows, logits.shape[1])
    parts = chunks(t, LARGEST_CHUNK)
    ahead = (load(t, logits, parts[0], LOWEST), load(t, noise, parts[0], 0.0))
    inverse, noisy = scales(per_row(t, temperature, 1))
    lowest, base = per_row(t, floor, 1), nl.ndarray((t.partitions(), 1), nl.float32)
    nisa.tensor_tensor(dst=base, data1=part_starts(t, 1), data2=for_all(t, start), op=nl.add)
    found = []
    for i in range(len(parts)):
        chunk, loaded = parts[i], ahead
        if i + 1 < len(parts):
            ahead = (load(t, logits, parts[i + 1], LOWEST), load(t, noise, parts[i + 1], 0.0))
        perturbed = scores(loaded[0], loaded[1], inverse, noisy, lowest)
        value, place = best_column(perturbed)
        nisa.tensor_scalar(dst=place, data=place, op0=nl.add, operand0=float(chunk[0]), op1=nl.add, operand1=base)
        found.append((value, place))
    best = best_of_chunks(t, found)
    top, winner = over_parts(t, best[0], best[1])
    whole = nl.ndarray((1, rows), dtype=nl.int32)
    nisa.tensor_copy(dst=whole, src=winner)
    nisa.dma_copy(dst=values.ap([[rows, 1], [1, rows]], offset=core * rows), src=top)
    nisa.dma_copy(dst=ids.ap([[rows, 1], [1, rows]], offset=core * rows), src=whole)
    return values, ids
