"""Verification attention: N candidate rows per sequence over the cached prefix and themselves, in one pass.

out[r] = sum_s exp(q[r].k[s] / sqrt(D) - m) v[s] / sum_s exp(q[r].k[s] / sqrt(D) - m), s over r's visible slots

Row n of sequence b is in cache slot positions[b, 0] + n and is written there first. A chain's row sees
the slots up to its own; with `ancestors`, row n sees the prefix and the candidates j whose bit is set in
ancestors[b, n]. Keys come in chunks of 1024, aligned to absolute position, each with the running maximum m of
the row and merged in ascending order; in a chunk partition p holds keys 8p to 8p + 7, and its eight key tiles
are summed in order. An invisible key adds exact zeros, so that its bits depend on its own slot and cache
alone: not on N, its index, its neighbours, or the calls that wrote the prefix.

Layouts: q (B, H, N, D), new keys and values (B, G, N, D), k_cache (B, G, D, S) transposed, v_cache (B, G, S, D).
Cost: keys and values are read once (roofline.verify_attention). Design and timeline: docs/verify_attention.md.
"""

import nki

from nki_kernels.attention.append import append_values
from nki_kernels.attention.cache import Cache
from nki_kernels.attention.pipeline import attend, outputs, plan
from nki_kernels.attention.rows import first_slots, groups_of_core, tiling
from nki_kernels.attention.state import Launch


@nki.jit
def verify_attention_kernel(q, k_new, v_new, k_cache, v_cache, positions, ancestors=None, with_lse=False):
    """Append the new rows, then attend: out (B, H, N, D) in q's dtype, and with `with_lse` lse (B, H, N) fp32.

    positions (B, N) int32, ancestors (B, N) int32 or None; positions[b, 0] + N <= S. The caches change in place.
    """
    t = tiling(q.shape, v_cache.shape[1], v_cache.shape[2])
    out, lse = outputs(q, with_lse)
    first, last = groups_of_core(t)
    if first < last:
        slots_1B = first_slots(positions)
        append_values(v_cache, v_new, positions, t, (first, last))
        cache, chunks = Cache(k_cache, v_cache, slots_1B, t), plan(q, t, first, last)
        cache.load_new_keys(k_new, first, last)
        attend(Launch(t, cache, (positions, ancestors, slots_1B), (out, lse)), chunks)
    if with_lse:
        return out, lse
    return out
