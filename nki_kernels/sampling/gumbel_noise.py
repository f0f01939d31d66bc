"""Gumbel noise of (seed, position, token id) over a vocabulary shard, from a counter-based generator.

noise[r, i] = -log(-log u),  u = (top 23 bits of word id % 2 + 1/2) / 2^23,  id = start + i
words = Threefry-2x32(key = seed of r, counter = (id // 2, position of r + domain * 2^24))

R <= 128 rows, V = `columns` ids of a shard from `start` on. Noise does not depend on logits: one launch serves the
samples of draft and target at all positions of a step, off the critical path. A row's noise depends on its seed,
position and ids only.

Layouts: seeds (R, 2), positions (R, 1) and start (1, 1) int32, columns and domain compile-time integers; noise (R, V)
fp32. Two cores take half of the columns each.
Cost: about 80 passes of the Vector Engine over V / 2 (roofline.gumbel_noise). Source: Salmon, Moraes, Dror, Shaw, SC
2011; docs/sampling.md. Launched by every step and prefill graph.
"""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

from nki_kernels.checks import INT32, check, check_row_count, check_vocabulary, launcher, refuse
from nki_kernels.sampling.threefry import schedule, threefry
from nki_kernels.sampling.vocab_tiling import chunks, for_all, part_starts, per_row, store, vocab_tiling

# separates this noise from any other use of the same (seed, position, id)
GUMBEL_DOMAIN = 0
DOMAIN_SHIFT = 24
LARGEST_CHUNK = 1536


def pairs(t, pair_start_P1, chunk):
    """id // 2 of one chunk, and of one pair more for a shard that begins within a pair: uint32 (P, W / 2 + 1, 1)."""
    count = chunk[1] // 2 + 1
    index_PW = nl.ndarray((t.partitions(), count), dtype=nl.float32)
    pairs_PW1 = nl.ndarray((t.partitions(), count, 1), dtype=nl.uint32)
    nisa.iota(dst=index_PW, pattern=[[1, count]], offset=chunk[0] // 2, channel_multiplier=0)
    nisa.tensor_scalar(dst=pairs_PW1, data=index_PW, op0=nl.add, operand0=pair_start_P1)
    return pairs_PW1


def uniform_bits(words, size, odd_11):
    """The top 23 bits of `size` words in the order of ids, from the two words of each pair: uint32 (P, size)."""
    partitions, count = words[0].shape[0], words[0].shape[1]
    bits_PW2 = nl.ndarray((partitions, count, 2), dtype=nl.uint32)
    for i in range(2):
        nisa.tensor_scalar(dst=bits_PW2[:, :, i], data=words[i], op0=nl.right_shift, operand0=9)
    return bits_PW2.ap([[2 * count, partitions], [1, size]], offset=0, scalar_offset=odd_11, indirect_dim=2)


def gumbel(bits_PW, shape):
    """-log(-log((bits + 1/2) / 2^23)): fp32 (P, size)."""
    inner_PW, outer_PW = nl.ndarray(shape, nl.float32), nl.ndarray(shape, nl.float32)
    noise_PW, half_P1 = nl.ndarray(shape, nl.float32), nl.ndarray((shape[0], 1), dtype=nl.float32)
    nisa.memset(dst=half_P1, value=2.0**-24)
    nisa.activation(dst=inner_PW, op=nl.log, data=bits_PW, scale=2.0**-23, bias=half_P1)
    nisa.activation(dst=outer_PW, op=nl.log, data=inner_PW, scale=-1.0)
    nisa.activation(dst=noise_PW, op=nl.copy, data=outer_PW, scale=-1.0)
    return noise_PW


@nki.jit
def gumbel_noise_kernel(seeds, positions, start, columns, domain):
    """Return noise (R, columns) fp32."""
    rows = seeds.shape[0]
    noise = nl.ndarray((rows, columns), dtype=nl.float32, buffer=nl.shared_hbm)
    t = vocab_tiling(rows, columns)
    key_P2 = per_row(t, seeds, 2)
    # the second counter word: position + domain * 2^24
    second_P11, bits = nl.ndarray((t.partitions(), 1, 1), dtype=nl.uint32), per_row(t, positions, 1).view(nl.uint32)
    nisa.tensor_scalar(dst=second_P11, data=bits, op0=nl.bitwise_or, operand0=domain << DOMAIN_SHIFT)
    start_P1, column = for_all(t, start), (t.partitions(), 1)
    odd_P1, pair_start_P1 = nl.ndarray(column, dtype=nl.int32), nl.ndarray(column, dtype=nl.float32)
    pair_P1 = nl.ndarray(column, dtype=nl.int32)
    nisa.tensor_scalar(dst=odd_P1, data=start_P1, op0=nl.bitwise_and, operand0=1)
    nisa.tensor_scalar(dst=pair_P1, data=start_P1, op0=nl.right_shift, operand0=1)
    nisa.tensor_tensor(dst=pair_start_P1, data1=part_starts(t, 2), data2=pair_P1, op=nl.add)
    injections = schedule(key_P2.view(nl.uint32).reshape((t.partitions(), 2, 1)))
    for chunk in chunks(t, LARGEST_CHUNK):
        words = threefry(pairs(t, pair_start_P1, chunk), second_P11, injections)
        bits_PW = uniform_bits(words, chunk[1], odd_P1[0:1, 0:1])
        store(t, noise, chunk, gumbel(bits_PW, (t.partitions(), chunk[1])))
    return noise


def check_operands(seeds, positions, start, columns, domain):
    """Refuse operands that the kernel cannot serve."""
    rows, largest = seeds.shape[0], (1 << DOMAIN_SHIFT) - 1
    check_row_count(rows)
    check("seeds", seeds, (rows, 2), INT32)
    check("positions", positions, (rows, 1), INT32)
    check("start", start, (1, 1), INT32)
    check_vocabulary(columns)
    low, high = np.asarray(positions).min(), np.asarray(positions).max()
    refuse(
        low < 0 or high > largest,
        f"positions run from {low} to {high}, 0 to {largest} have noise: end the sequence before",
    )
    refuse(not 0 <= domain < 1 << 6, f"the domain is {domain}, 0 to 63 exist: pass 0, the model's")


gumbel_noise = launcher(gumbel_noise_kernel, check_operands)
