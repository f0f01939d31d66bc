"""Prompt attention: C rows of one sequence at any position over its keys in a pool of blocks, their own among them.

out[r] = sum_s exp(q[r].k[s] / sqrt(D) - m) v[s] / sum_s exp(q[r].k[s] / sqrt(D) - m),  s <= start + r

The rows' keys and values are in their blocks before the launch. Keys come in chunks of 4096 (of fp32: 2048), aligned
to absolute position, each with the running maximum m of the row and merged in ascending order; a chunk's weights are
summed in spans of 2048, its weighted values in tiles of 128. A hidden key adds exact zeros, so that a row's bits
depend on its own query and on the keys and values up to its own position alone: not on C, start, S, neighbours or
cores.

Layouts: q (1, H, C, D), pools of keys and values (blocks, G, 128, D), start (1, 1), block_table (1, S / 128); position
s is in block block_table[0, s // 128] at place s % 128.
Cost: roofline.prompt_attention. Design and timeline: docs/verify_attention.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import nki
import nki.isa as nisa
import nki.language as nl

from nki_kernels.attention.blocks import BLOCK
from nki_kernels.attention.host import DIMS, MAX_ADDRESS, check_dtypes
from nki_kernels.attention.key_chunks import KeyChunk, Pool
from nki_kernels.attention.query_tiles import (
    PIECE,
    QueryTile,
    Visit,
    divided,
    exponentials,
    load_query,
    merge,
    raise_shift,
    score,
    turn_by_dma,
    turn_rest,
    weigh,
)
from nki_kernels.attention.rows import RUN
from nki_kernels.tiles import P, absent, move, this_core, warm_up

# query tiles that visit a chunk one after the other: they carry their values in SBUF
TILES = 32
# visits from the request for queries or keys to their use
AHEAD = 6
# visits from the scores to the weighted values
LAG = 4


class Prompt(nl.NKIObject):
    """Shared by all visits: queries and result in HBM, and constants of each row."""

    def __init__(self, q_HCD, out_HCD):
        self.q_HCD = q_HCD
        self.out_HCD = out_HCD
        # fp32 (128, 1)
        self.zero_R1 = nl.ndarray((P, 1), dtype=nl.float32)
        self.scale_R1 = nl.ndarray((P, 1), dtype=nl.float32)
        nisa.memset(dst=self.zero_R1, value=0.0)
        nisa.memset(dst=self.scale_R1, value=-(q_HCD.shape[2] ** -0.5))


def limits(start, count):
    """The last position that each row sees: fp32 (128, C / 128)."""
    tiles = count // P
    first_P1, limit_PT = nl.ndarray((P, 1), dtype=nl.int32), nl.ndarray((P, tiles), dtype=nl.float32)
    offset_P1 = nl.ndarray((P, 1), dtype=nl.float32)
    move(first_P1, start.ap([[0, P], [1, 1]], offset=0))
    nisa.tensor_copy(dst=offset_P1, src=first_P1)
    nisa.iota(dst=limit_PT, pattern=[[P, tiles]], offset=0, channel_multiplier=1)
    nisa.tensor_scalar(dst=limit_PT, data=limit_PT, op0=nl.add, operand0=offset_P1)
    return limit_PT


def batches_of_core(heads, limit_PT):
    """This core's query tiles of the heads `heads`, in batches of up to TILES: of two cores every second tile.

    Those that see least come last, so that little is left to do after the last scores.
    """
    core, cores = this_core()
    batches, number, tiles = [], 0, limit_PT.shape[1]
    for back in range(tiles):
        i = tiles - 1 - back
        for head in range(heads[0], heads[1]):
            if number % cores == core:
                if len(batches) == 0 or len(batches[len(batches) - 1]) == TILES:
                    batches.append([])
                batches[len(batches) - 1].append(QueryTile(head, i * P, limit_PT[:, i : i + 1]))
            number = number + 1
    return batches


def visits_of(batch, group, pool, count):
    """Every visit of a batch of tiles, chunk by chunk, without the keys that no row of a tile can see.

    The rows are at the end of the cache at the latest; where they are earlier, masks hide the rest.
    """
    visits = []
    for index in range(-(-pool.slots // BLOCK // pool.chunk)):
        chunk = KeyChunk(pool, group, index)
        for tile in batch:
            visible = (pool.slots - count + tile.row + P) // BLOCK
            if visible > chunk.first:
                last = visible <= chunk.first + chunk.tiles
                visits.append(Visit(tile, chunk, min(visible - chunk.first, chunk.tiles), last))
    return visits


def requests(visits):
    """For each visit the (chunk, piece) that are asked for with it: the next chunk's, spread over the visits of one."""
    plan, starts = [], []
    for i in range(len(visits)):
        plan.append([])
        if i == 0 or visits[i].chunk.first != visits[i - 1].chunk.first:
            starts.append(i)
    for j in range(1, len(starts)):
        chunk, first = visits[starts[j]].chunk, starts[j - 1]
        for piece in range(chunk.pieces):
            plan[first + piece * (starts[j] - first) // chunk.pieces].append((chunk, piece))
    return plan


def begin(visits, prompt):
    """Ask for the first chunk and the first queries; keys come first."""
    chunk = visits[0].chunk
    load_query(visits[0].tile, prompt.q_HCD)
    while len(chunk.rows) < chunk.pieces:
        chunk.fetch_keys()
    for i in range(1, min(len(visits), AHEAD)):
        if absent(visits[i].tile.q_DR):
            load_query(visits[i].tile, prompt.q_HCD)
    for piece in range(chunk.pieces):
        chunk.fetch_values(piece)
    chunk.turn_until(chunk.pieces)


def look_ahead(visits, plan, i, prompt):
    """Ask for what visit i + AHEAD and the next chunk need, and turn the keys that were asked for AHEAD visits ago."""
    if i < len(visits):
        for entry in plan[i]:
            entry[0].fetch_keys()
            entry[0].fetch_values(entry[1])
    if i >= AHEAD and i - AHEAD < len(visits):
        for entry in plan[i - AHEAD]:
            entry[0].turn_until(entry[1] + 1)
    if i + AHEAD < len(visits) and absent(visits[i + AHEAD].tile.q_DR):
        load_query(visits[i + AHEAD].tile, prompt.q_HCD)


def attend(visits, prompt):
    """All visits as a software pipeline: turn i scores visit i, piece by piece, between the stages of earlier ones."""
    plan, count, pieces = requests(visits), len(visits), visits[0].chunk.pool.chunk // PIECE
    begin(visits, prompt)
    for i in range(count + LAG):
        look_ahead(visits, plan, i, prompt)
        if i >= 1 and i - 1 < count:
            raise_shift(visits[i - 1], prompt.scale_R1)
        for piece in range(pieces):
            if i < count and piece * PIECE < visits[i].tiles:
                visits[i].chunk.turn_until(piece + 1)
                score(visits[i], piece, prompt.zero_R1)
            if i >= LAG and piece * PIECE < visits[i - LAG].tiles:
                weigh(visits[i - LAG], piece)
            if i >= 2 and i - 2 < count and piece < len(visits[i - 2].spans):
                exponentials(visits[i - 2], piece)
                turn_by_dma(visits[i - 2], piece)
        if i >= 3 and i - 3 < count:
            turn_rest(visits[i - 3])
        if i >= LAG:
            finish(visits[i - LAG], prompt)


def finish(visit, prompt):
    """Merge a visit into its tile, and store the tile after its last one."""
    merge(visit)
    if visit.last:
        tile = visit.tile
        move(prompt.out_HCD[tile.head, tile.row : tile.row + P, :], divided(tile, prompt.out_HCD.dtype))


@nki.jit
def prompt_attention_kernel(q, k_pages, v_pages, start, block_table):
    """out (1, H, C, D) in q's dtype; start (1, 1) int32 is the position of row 0, start + C <= S."""
    _, heads, count, dim = q.shape
    out = nl.ndarray(q.shape, dtype=q.dtype, buffer=nl.shared_hbm)
    pool, limit_PT = Pool(k_pages, v_pages, block_table), limits(start, count)
    prompt = Prompt(q.reshape((heads, count, dim)), out.reshape((heads, count, dim)))
    per = heads // pool.kv_heads
    warm_up(nl.exp)
    for group in range(pool.kv_heads):
        for batch in batches_of_core((group * per, (group + 1) * per), limit_PT):
            attend(visits_of(batch, group, pool, count), prompt)
    return out


def prompt_attention(
    q: Any,
    pools: tuple[Any, Any],
    start: Any,
    block_table: Any,
    *,
    lnc: int = 1,
    run: Callable[[Any], Any] = nki.simulate,
) -> Any:
    """Attend q (1, H, C, D), rows start to start + C - 1 of a sequence, to its keys and values up to their own.

    pools are keys and values (blocks, G, 128, D), start is int32 (1, 1), block_table int32 (1, S / 128); entries
    beyond the last row's block may name any block. Returns out (1, H, C, D) in q's dtype. `run` makes a launched
    kernel callable: nki.simulate here, the identity on a Trainium machine.

    Raises:
        ValueError: an operand does not fit; nothing was run.
    """
    check(q, pools, start, block_table)
    if lnc not in (1, 2):
        raise ValueError(f"lnc is {lnc}, 1 or 2 cores share a launch on trn2: pass one of them")
    return run(prompt_attention_kernel[lnc])(q, *pools, start, block_table)


def check(q: Any, pools: tuple[Any, Any], start: Any, block_table: Any) -> None:
    """Refuse operands that the kernel cannot serve, in one sentence each."""
    if len(q.shape) != 4 or q.shape[0] != 1 or q.shape[2] % P:
        raise ValueError(f"q is {tuple(q.shape)}, (1, H, C, D) with C a multiple of {P} is needed: pad the prompt")
    _, heads, count, dim = q.shape
    if dim not in DIMS:
        raise ValueError(f"head dim D is {dim}, the kernel serves 64 and 128: use the reference for this model")
    keys, values = (tuple(pool.shape) for pool in pools)
    if keys != values or len(keys) != 4 or keys[2:] != (BLOCK, dim) or heads % keys[1]:
        raise ValueError(
            f"pools are {keys} and {values}, (blocks, G, {BLOCK}, {dim}) with H = {heads} a multiple of G are needed: "
            "pass keys before any transpose"
        )
    if keys[0] * keys[1] * BLOCK // RUN >= MAX_ADDRESS:
        raise ValueError(f"{keys[0]} blocks of {keys[1]} kv heads cannot be addressed in fp32: use a smaller pool")
    check_dtypes(q, pools)
    table, piece = tuple(block_table.shape), PIECE * BLOCK
    if "int32" not in str(block_table.dtype) or len(table) != 2 or table[0] != 1 or table[1] * BLOCK % piece:
        raise ValueError(
            f"block_table is {block_table.dtype} {table}, int32 (1, S / {BLOCK}) with S a multiple of {piece} is "
            "needed: fill it with block 0"
        )
    if tuple(start.shape) != (1, 1) or "int32" not in str(start.dtype):
        raise ValueError(f"start is {start.dtype} {tuple(start.shape)}, int32 (1, 1) is needed: reshape it")
    if not 0 <= int(start[0, 0]) <= table[1] * BLOCK - count:
        raise ValueError(
            f"rows {int(start[0, 0])} to {int(start[0, 0]) + count - 1} do not lie in {table[1] * BLOCK} slots: "
            "use a longer block table"
        )
