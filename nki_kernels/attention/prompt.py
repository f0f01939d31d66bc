"""Prefill attention: C rows of one sequence, from any position on, attend its paged KV cache.

out[r] = sum_s exp(q[r].k[s] / sqrt(D) - m) v[s] / sum_s exp(q[r].k[s] / sqrt(D) - m),  s <= start + r

H query and G kv heads, C rows, D 64 or 128, S positions. append_rows has written the rows' keys and values to their
pages. Keys are processed in chunks of 4096 (fp32: 2048), aligned to absolute position; m is the row's running max, and
chunks are rescaled and added in ascending order. A chunk's weights are summed in spans of 2048, its weighted values in
key tiles of 128. A masked key adds exact zeros, so a row's bits depend only on its query and on the keys and values up
to its position: not on C, start, S, other rows, the order of pages or the number of cores.

Layouts: q and out (1, H, C, D), C a multiple of 128; pools (pages, G, 128, D); start (1, 1) int32, the position of row
0, start + C <= S; block_table (1, S / 128) int32, S a multiple of 1024. Each of two cores computes every second query
tile.
Cost: roofline.prompt_attention. Design: docs/kernels.md. Launched by every prefill graph.
"""

import nki
import nki.isa as nisa
import nki.language as nl

from nki_kernels.attention.kv_prefetch import KeyChunk
from nki_kernels.attention.paged_kv import PAGE, RUN, PagedKV, PageIndex
from nki_kernels.attention.prompt_tiles import (
    QueryTile,
    TileStep,
    accumulate_chunk,
    exponentials,
    load_query,
    multiply,
    score,
    transpose_rest,
    update_neg_max,
)
from nki_kernels.checks import INT32, check, check_floats, check_paged, check_rank, launcher, refuse
from nki_kernels.tiles import P, dma_static, preload_act_table, this_core

# query tiles of a batch, which attend a chunk one after the other; their weighted values stay in SBUF
TILES = 32
# steps from the prefetch of queries or keys to their use
PREFETCH_DISTANCE = 6
# steps from the scores to the weighted values
PV_LAG = 4


class Prompt(nl.NKIObject):
    """Shared by all steps: queries and result in HBM, pages, and constants of each row."""

    def __init__(self, q, out, pools, block_table):
        _, heads, count, dim = q.shape
        self.q_HCD = q.reshape((heads, count, dim))
        self.out_HCD = out.reshape((heads, count, dim))
        self.kv = PagedKV(pools, PageIndex(block_table, (0, 1), pools[0].shape[1], RUN))
        # the block table in SBUF: int32 (1, S / 128)
        self.table_1T = nl.ndarray(block_table.shape, dtype=block_table.dtype)
        dma_static(self.table_1T, block_table)
        # fp32 (128, 1)
        self.zero_R1 = nl.ndarray((P, 1), dtype=nl.float32)
        self.neg_scale_R1 = nl.ndarray((P, 1), dtype=nl.float32)
        nisa.memset(dst=self.zero_R1, value=0.0)
        nisa.memset(dst=self.neg_scale_R1, value=-(dim**-0.5))


def row_limits(start, count):
    """The last position that each row attends: fp32 (128, C / 128)."""
    tiles = count // P
    start_P1, limit_PT = nl.ndarray((P, 1), dtype=nl.int32), nl.ndarray((P, tiles), dtype=nl.float32)
    offset_P1 = nl.ndarray((P, 1), dtype=nl.float32)
    dma_static(start_P1, start.ap([[0, P], [1, 1]], offset=0))
    nisa.tensor_copy(dst=offset_P1, src=start_P1)
    nisa.iota(dst=limit_PT, pattern=[[P, tiles]], offset=0, channel_multiplier=1)
    nisa.tensor_scalar(dst=limit_PT, data=limit_PT, op0=nl.add, operand0=offset_P1)
    return limit_PT


def batches_of_core(first, heads, limit_PT):
    """This core's query tiles of `heads` heads from `first` on, in batches of up to TILES.

    In descending number of visible keys: the pipeline drains on the shortest one.
    """
    core, cores_of_launch = this_core()
    batches, number, tiles = [], 0, limit_PT.shape[1]
    for back in range(tiles):
        i = tiles - 1 - back
        for head in range(first, first + heads):
            if number % cores_of_launch == core:
                if len(batches) == 0 or len(batches[len(batches) - 1]) == TILES:
                    batches.append([])
                batches[len(batches) - 1].append(QueryTile(head, i * P, limit_PT[:, i : i + 1]))
            number = number + 1
    return batches


def steps_of(batch, group, prompt):
    """All (tile, chunk) steps of a batch, without chunks beyond the causal bound of the latest possible start."""
    steps, first, index, count, length = [], 0, 0, prompt.q_HCD.shape[1], prompt.table_1T.shape[1]
    while first < length:
        chunk = KeyChunk(prompt.kv, prompt.table_1T, group, index)
        first, index = first + chunk.tiles, index + 1
        for tile in batch:
            visible = length - (count - tile.row - P) // PAGE
            if visible > chunk.first:
                last = visible <= chunk.first + chunk.tiles
                steps.append(TileStep(tile, chunk, min(visible - chunk.first, chunk.tiles), last))
    return steps


def prefetch_schedule(steps):
    """For each step the (chunk, subchunk) to prefetch: the next chunk's, spread over the steps of a chunk."""
    schedule, starts = [], []
    for i in range(len(steps)):
        schedule.append([])
        if i == 0 or steps[i].chunk.first != steps[i - 1].chunk.first:
            starts.append(i)
    for j in range(1, len(starts)):
        chunk, first = steps[starts[j]].chunk, starts[j - 1]
        for subchunk in range(chunk.subchunks):
            schedule[first + subchunk * (starts[j] - first) // chunk.subchunks].append((chunk, subchunk))
    return schedule


def prefetch_first(steps, prompt):
    """Prefetch the first chunk and the first queries; keys come first."""
    chunk = steps[0].chunk
    load_query(steps[0].tile, prompt.q_HCD)
    for _ in range(chunk.subchunks):
        chunk.prefetch_keys()
    for i in range(1, min(len(steps), PREFETCH_DISTANCE)):
        load_query(steps[i].tile, prompt.q_HCD)
    for subchunk in range(chunk.subchunks):
        chunk.prefetch_values(subchunk)
    chunk.transpose_until(chunk.subchunks)


def issue_prefetches(steps, schedule, i, prompt):
    """Issue what step i + PREFETCH_DISTANCE and the next chunk need; transpose the keys that were issued earlier."""
    before = i - PREFETCH_DISTANCE
    if i < len(steps):
        for entry in schedule[i]:
            entry[0].prefetch_keys()
            entry[0].prefetch_values(entry[1])
    if 0 <= before < len(steps):
        for entry in schedule[before]:
            entry[0].transpose_until(entry[1] + 1)
    if i + PREFETCH_DISTANCE < len(steps):
        load_query(steps[i + PREFETCH_DISTANCE].tile, prompt.q_HCD)


def attend(steps, prompt):
    """Run all steps as a software pipeline: iteration i runs a stage on step i - lag, some by subchunk."""
    schedule, count = prefetch_schedule(steps), len(steps)
    prefetch_first(steps, prompt)
    for i in range(count + PV_LAG):
        issue_prefetches(steps, schedule, i, prompt)
        if 0 <= i - 1 < count:
            update_neg_max(steps[i - 1], prompt)
        for subchunk in range(steps[0].chunk.subchunks):
            for entry in ((0, score), (PV_LAG, multiply), (2, exponentials)):
                if 0 <= i - entry[0] < count:
                    entry[1](steps[i - entry[0]], subchunk, prompt)
        for entry in ((3, transpose_rest), (PV_LAG, accumulate_chunk)):
            if 0 <= i - entry[0] < count:
                entry[1](steps[i - entry[0]], prompt)


@nki.jit
def prompt_attention_kernel(q, k_pages, v_pages, start, block_table):
    """Return out in q's dtype."""
    out = nl.ndarray(q.shape, dtype=q.dtype, buffer=nl.shared_hbm)
    kv_heads = k_pages.shape[1]
    prompt, limit_PT = Prompt(q, out, (k_pages, v_pages), block_table), row_limits(start, q.shape[2])
    per_group = q.shape[1] // kv_heads
    preload_act_table(nl.exp)
    for group in range(kv_heads):
        for batch in batches_of_core(group * per_group, per_group, limit_PT):
            attend(steps_of(batch, group, prompt), prompt)
    return out


def check_operands(q, k_pages, v_pages, start, block_table):
    """Refuse operands that the kernel cannot serve."""
    batch, heads, count, dim = check_rank("q", q, "1, H, C, D")
    refuse(batch != 1 or count % P > 0, f"q is {tuple(q.shape)}, C a multiple of {P} is needed: pad the prompt")
    check_paged(k_pages, v_pages, block_table, dim, (1, heads, 1))
    check_floats(q, k_pages, v_pages)
    check("start", start, (1, 1), INT32)
    first, length = int(start[0, 0]), block_table.shape[1] * PAGE
    refuse(
        not 0 <= first <= length - count,
        f"rows {first} to {first + count - 1} do not lie in {length} positions: use a longer block table",
    )


prompt_attention = launcher(prompt_attention_kernel, check_operands)
