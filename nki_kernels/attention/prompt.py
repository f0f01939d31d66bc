"""Prefill attention: C rows of one sequence, from any position on, attend its paged KV cache.

out[r] = sum_s exp(q[r].k[s] - m) v[s] / sum_s exp(q[r].k[s] - m),  s <= start + r

H query and G kv heads, C rows, D 64, 128 or 256, S positions; q includes the factor 1 / sqrt(D). append_rows has
written the rows' keys and values to their pages. Keys are processed in chunks of 4096 (fp32: 2048), aligned to absolute
position; m is the row's running max, and chunks are rescaled and added in ascending order. In a chunk the weighted
values, and the sum of weights as one more column, accumulate over key tiles in ascending order: tile 4t + j has the 128
positions 512t + 4p + j. A masked key adds exact zeros, so a row's bits depend only on its query and on the keys and
values up to its position: not on C, start, S, other rows, the order of pages or the number of cores.

Layouts: q and out (1, H, C, D), C a multiple of 128; pools (pages, G, 128, D); start (1, 1) int32, the position of row
0, start + C <= S; block_table (1, S / 128) int32, S a multiple of 1024. Each of two cores computes every second query
tile.
Cost: roofline.prompt_attention. Design: docs/kernels.md. Launched by every prefill graph.
"""

import nki
import nki.isa as nisa
import nki.language as nl

from nki_kernels.attention.kv_prefetch import PARITIES, KeyChunk
from nki_kernels.attention.paged_kv import PAGE, TILE_RUN, PagedKV, PageIndex
from nki_kernels.attention.prompt_tiles import (
    QUARTERS,
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
from nki_kernels.tiles import P, absent, dma_static, preload_act_table, this_core

# columns of weighted values that stay in SBUF: a batch of 32 query tiles, for D 256 of 16, attends a chunk
BATCH_COLUMNS = 4096
# steps from the prefetch of queries or keys to their use
PREFETCH_DISTANCE = 6
# steps from the scores to the weighted values
PV_LAG = 5


class Prompt(nl.NKIObject):
    """Shared by all steps: queries and result in HBM, pages, and constants of each row."""

    def __init__(self, q, out, pools, block_table):
        _, heads, count, dim = q.shape
        self.q_HCD = q.reshape((heads, count, dim))
        self.out_HCD = out.reshape((heads, count, dim))
        self.kv = PagedKV(pools, PageIndex(block_table, (0, 1), pools[0].shape[1], TILE_RUN))
        # key tiles of the block table
        self.length = block_table.shape[1]
        # fp32 (128, 1)
        self.zero_R1 = nl.ndarray((P, 1), dtype=nl.float32)
        nisa.memset(dst=self.zero_R1, value=0.0)


def row_limits(start, count):
    """Bounds of the even positions 2i and the odd positions 2i + 1 of each row: fp32 (128, C / 128, 2), exact.

    A row at position p attends i <= p / 2 and i <= (p - 1) / 2.
    """
    tiles = count // P
    start_P1, limit_PT2 = nl.ndarray((P, 1), dtype=nl.int32), nl.ndarray((P, tiles, PARITIES), dtype=nl.float32)
    offset_P1 = nl.ndarray((P, 1), dtype=nl.float32)
    dma_static(start_P1, start.ap([[0, P], [1, 1]], offset=0))
    nisa.tensor_copy(dst=offset_P1, src=start_P1)
    nisa.iota(dst=limit_PT2, pattern=[[P, tiles], [-1, PARITIES]], offset=0, channel_multiplier=1)
    nisa.tensor_scalar(dst=limit_PT2, data=limit_PT2, op0=nl.add, operand0=offset_P1, op1=nl.multiply, operand1=0.5)
    return limit_PT2


def batches_of_core(first, heads, dim, limit_PT2):
    """This core's query tiles of `heads` heads from `first` on, in batches of up to BATCH_COLUMNS.

    In descending number of visible keys: the pipeline drains on the shortest one.
    """
    core, cores_of_launch = this_core()
    batches, tiles = [], limit_PT2.shape[1]
    number, largest = first * tiles, BATCH_COLUMNS // max(dim, P)
    for back in range(tiles):
        i = tiles - 1 - back
        for head in range(first, first + heads):
            if number % cores_of_launch == core:
                if len(batches) == 0 or len(batches[len(batches) - 1]) == largest:
                    batches.append([])
                batches[len(batches) - 1].append(QueryTile(head, i * P, limit_PT2[:, i, :]))
            number = number + 1
    return batches


def steps_of(batch, group, prompt):
    """All (tile, chunk) steps of a batch, without chunks beyond the causal bound of the latest possible start."""
    steps, first, index, count, length = [], 0, 0, prompt.q_HCD.shape[1], prompt.length
    while first < length:
        chunk = KeyChunk(prompt.kv, group, index, length)
        first, index = first + chunk.tiles, index + 1
        for tile in batch:
            visible = length - (count - tile.row - P) // PAGE
            if visible > chunk.first:
                last = visible <= chunk.first + chunk.tiles
                steps.append(TileStep(tile, chunk, min(visible - chunk.first, chunk.tiles), last))
    return steps


def prefetch_schedule(steps):
    """For each step the (chunk, gather) to prefetch: the next chunk's, spread over the steps of a chunk."""
    schedule, starts = [], []
    for i in range(len(steps)):
        schedule.append([])
        if absent(steps[i].chunk.step):
            steps[i].chunk.step = i
            starts.append(i)
    for j in range(1, len(starts)):
        chunk, first = steps[starts[j]].chunk, starts[j - 1]
        for t in range(chunk.gathers):
            schedule[first + t * (starts[j] - first) // chunk.gathers].append((chunk, t))
    return schedule


def prefetch_first(steps, prompt):
    """Prefetch the first chunk and the first queries; keys come first."""
    chunk = steps[0].chunk
    load_query(steps[0].tile, prompt.q_HCD)
    for _ in range(chunk.gathers):
        chunk.prefetch_keys()
    for i in range(1, min(len(steps), PREFETCH_DISTANCE)):
        load_query(steps[i].tile, prompt.q_HCD)
    for t in range(chunk.gathers):
        chunk.prefetch_values(t)


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
    """Run all steps as a software pipeline: iteration i runs a stage on step i - lag, some by quarter."""
    schedule, count = prefetch_schedule(steps), len(steps)
    prefetch_first(steps, prompt)
    for i in range(count + PV_LAG + 1):
        issue_prefetches(steps, schedule, i, prompt)
        if 0 <= i - 1 < count:
            update_neg_max(steps[i - 1], prompt)
        for quarter in range(QUARTERS):
            for entry in ((0, score), (PV_LAG, multiply), (2, exponentials)):
                if 0 <= i - entry[0] < count:
                    entry[1](steps[i - entry[0]], quarter, prompt)
        for entry in ((3, transpose_rest), (PV_LAG + 1, accumulate_chunk)):
            if 0 <= i - entry[0] < count:
                entry[1](steps[i - entry[0]], prompt)


@nki.jit
def prompt_attention_kernel(q, k_pages, v_pages, start, block_table):
    """Return out in q's dtype."""
    out = nl.ndarray(q.shape, dtype=q.dtype, buffer=nl.shared_hbm)
    steps, kv_heads = [], k_pages.shape[1]
    prompt, limit_PT2 = Prompt(q, out, (k_pages, v_pages), block_table), row_limits(start, q.shape[2])
    per_group = q.shape[1] // kv_heads
    preload_act_table(nl.exp)
    for group in range(kv_heads):
        for batch in batches_of_core(group * per_group, per_group, q.shape[3], limit_PT2):
            steps.extend(steps_of(batch, group, prompt))
    if len(steps) > 0:
        attend(steps, prompt)
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
