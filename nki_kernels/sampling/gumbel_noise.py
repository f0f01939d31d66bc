"""Gumbel noise of (seed, position, token id) over a vocabulary shard, from a counter-based generator.

noise[r, i] = -log(-log u),  u = (top 23 bits of word id % 2 + 1/2) / 2^23,  id = start + i
words = Threefry-2x32(key = seed of r, counter = (id // 2, position of r + domain * 2^24))

Layouts: seeds (R, 2) int32, positions (R, 1) int32, start (1, 1) int32; noise (R, V) fp32. It does not depend on
logits: one launch serves the draws of draft and target at all positions of a step, off the path of the logits.
Spec: docs/sampling.md. Cost: about 80 passes of the Vector Engine over V / 2 (roofline.gumbel_noise).
"""

import nki
import nki.isa as nisa
import nki.language as nl

from nki_kernels.sampling.rows import chunks, for_all, part_starts, per_row, store, tiling
from nki_kernels.sampling.threefry import schedule, threefry

GUMBEL_DOMAIN = 0
DOMAIN_SHIFT = 24
LARGEST_CHUNK = 1536


def counters(positions, domain):
    """The second counter word of each partition: position + domain * 2^24, uint32 (P, 1, 1)."""
    made = nl.ndarray((positions.shape[0], 1, 1), dtype=nl.uint32)
    nisa.tensor_scalar(dst=made, data=positions.view(nl.uint32), op0=nl.bitwise_or, operand0=domain << DOMAIN_SHIFT)
    return made


def pairs(t, pair_start, chunk):
    """id // 2 of one chunk, and of one pair more for a shard that begins within a pair: uint32 (P, W / 2 + 1, 1)."""
    count = chunk[1] // 2 + 1
    index = nl.ndarray((t.partitions(), count), dtype=nl.float32)
    made = nl.ndarray((t.partitions(), count, 1), dtype=nl.uint32)
    nisa.iota(dst=index, pattern=[[1, count]], offset=chunk[0] // 2, channel_multiplier=0)
    nisa.tensor_scalar(dst=made, data=index, op0=nl.add, operand0=pair_start)
    return made


def uniform_bits(words, size, odd):
    """The top 23 bits of `size` words in the order of ids, from the two words of each pair: uint32 (P, size)."""
    partitions, count = words[0].shape[0], words[0].shape[1]
    made = nl.ndarray((partitions, count, 2), dtype=nl.uint32)
    for i in range(2):
        nisa.tensor_scalar(dst=made[:, :, i], data=words[i], op0=nl.right_shift, operand0=9)
    return made.ap([[2 * count, partitions], [1, size]], offset=0, scalar_offset=odd, indirect_dim=2)


def gumbel(bits, shape):
    """-log(-log((bits + 1/2) / 2^23)): fp32 (P, size)."""
    inner, outer, made = nl.ndarray(shape, nl.float32), nl.ndarray(shape, nl.float32), nl.ndarray(shape, nl.float32)
    half = nl.ndarray((shape[0], 1), dtype=nl.float32)
    nisa.memset(dst=half, value=2.0**-24)
    nisa.activation(dst=inner, op=nl.log, data=bits, scale=2.0**-23, bias=half)
    nisa.activation(dst=outer, op=nl.log, data=inner, scale=-1.0)
    nisa.activation(dst=made, op=nl.copy, data=outer, scale=-1.0)
    return made


@nki.jit
def gumbel_noise_kernel(seeds, positions, start, columns, domain):
    """Noise (R, columns) fp32 of R <= 128 rows; columns and domain are compile-time integers."""
    rows = seeds.shape[0]
    noise = nl.ndarray((rows, columns), dtype=nl.float32, buffer=nl.shared_hbm)
    t = tiling(rows, columns)
    key = per_row(t, seeds, 2)
    second = counters(per_row(t, positions, 1), domain)
    first = for_all(t, start)
    odd, pair_start = nl.ndarray((t.partitions(), 1), dtype=nl.int32), nl.ndarray((t.partitions(), 1), dtype=nl.float32)
    pair = nl.ndarray((t.partitions(), 1), dtype=nl.int32)
    nisa.tensor_scalar(dst=odd, data=first, op0=nl.bitwise_and, operand0=1)
    nisa.tensor_scalar(dst=pair, data=first, op0=nl.right_shift, operand0=1)
    nisa.tensor_tensor(dst=pair_start, data1=part_starts(t, 2), data2=pair, op=nl.add)
    injections = schedule(key.view(nl.uint32).reshape((t.partitions(), 2, 1)))
    for chunk in chunks(t, LARGEST_CHUNK):
        words = threefry(pairs(t, pair_start, chunk), second, injections)
        bits = uniform_bits(words, chunk[1], odd[0:1, 0:1])
        store(t, noise, chunk, gumbel(bits, (t.partitions(), chunk[1])))
    return noise
