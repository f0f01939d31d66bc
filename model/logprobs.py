"""Log-probabilities of each row's id and of the TOP best ids.

Layout of a row, C = 2 + 2 TOP numbers: the id's log-probability, its rank counted from 1, the best ids'
log-probabilities in descending order, and the best ids, which are exact in fp32.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from model.context import Context
from model.drafter import PrefillChunk
from model.ops import Ops, State, add_halves, iota, ordered_sum
from model.parallel import VocabShard
from model.qwen3 import Qwen3

# source: max_logprobs of vllm/config/model.py; OpenAI's API has the same limit
TOP = 20
COLUMNS = 2 + 2 * TOP
_LOWEST = torch.finfo(torch.float32).min
_PAST_IDS = 1 << 24
# rows per block, and the largest number of loop iterations in a graph
_ROWS, _MAX_BLOCKS = 128, 1000


def logprobs(ctx: Context, logits_RV: Tensor, id_R: Tensor, shard: VocabShard) -> Tensor:
    """(R, C) scores of the ids `id_R`, from this rank's logits."""

    def gather(x_RC: Tensor) -> Tensor:
        return ctx.all_gather_vocab(x_RC, shard).unflatten(-1, (-1, x_RC.shape[1]))

    ids_V = shard.ids_V
    logit_R1 = torch.where(ids_V == id_R.unsqueeze(1), logits_RV, _LOWEST).amax(-1, keepdim=True)
    values, ids = best_ids(ctx.ops, logits_RV, ids_V.expand_as(logits_RV))
    parts_RMC = gather(torch.cat((logit_R1, values, ids.float()), 1))
    logit_R1, values, ids = parts_RMC[..., :1].amax(1), *(t.flatten(1) for t in parts_RMC[..., 1:].split(TOP, -1))
    if parts_RMC.shape[1] > 1:
        values, ids = best_ids(ctx.ops, values, ids.to(torch.int32))
    first_R1 = values[:, :1]
    sums = (ordered_sum(t)[:, None] for t in (torch.exp(logits_RV - first_R1), logits_RV >= logit_R1))
    mass_R1, rank_R1 = add_halves(gather(torch.cat(tuple(sums), 1)), 1).squeeze(1).split(1, -1)
    log_sum_exp_R1 = first_R1 + torch.log(mass_R1)
    return torch.cat((logit_R1 - log_sum_exp_R1, rank_R1, values - log_sum_exp_R1, ids.float()), 1)


def prompt_logprobs(
    target: Qwen3, chunk: PrefillChunk, next_prompt_id_1: Tensor, x_1SE: Tensor, sampled_1C: Tensor
) -> Tensor:
    """(1, S, C): row i has the scores of id i + 1 of the prompt; rows after the last valid one are invalid.

    The last valid row's id is `next_prompt_id`, or, if that is negative, the sampled id with scores `sampled_1C`.
    Computed in blocks of rows: the logits of all rows would not fit in memory.
    """
    rows = chunk.ids_1S.shape[1]
    blocks = min(-(-rows // _ROWS), _MAX_BLOCKS)
    block, row_S = -(-rows // blocks), iota(rows, chunk.length_1)
    is_last_S = row_S == chunk.length_1 - 1
    next_S = torch.where(is_last_S, chunk.next_11[0], chunk.ids_1S.roll(-1, 1).squeeze(0))

    def fill(state: State) -> State:
        first_1, scores_SC = state
        index_R = (first_1 + iota(block, first_1)).clamp(max=rows - 1)
        logits_RV = target.logits(x_1SE.index_select(1, index_R)).squeeze(0)
        scores_RC = logprobs(target.ctx, logits_RV, next_S.index_select(0, index_R), target.shard)
        return first_1 + block, scores_SC.index_put((index_R,), scores_RC)

    start = torch.zeros_like(chunk.length_1), torch.zeros_like(sampled_1C).expand(rows, -1)
    scores_SC = target.ctx.ops.fori_loop(blocks, fill, start)[1]
    return torch.where((is_last_S & (next_prompt_id_1 < 0))[:, None], sampled_1C, scores_SC)[None]


def best_ids(ops: Ops, logits_RV: Tensor, ids_RV: Tensor) -> tuple[Tensor, Tensor]:
    """(R, TOP) the best logits in descending order, and their ids; ties are in ascending order of ids.

    Columns form G groups of W members. Each round selects the group with the best logit, then that group's next best.
    """
    rows, count = logits_RV.shape
    members = 1 << (count.bit_length() // 2)
    groups = -(-count // members)
    padding = (0, members * groups - count)
    logits_RWG = F.pad(logits_RV, padding, value=_LOWEST).unflatten(1, (members, groups))
    ids_RWG = F.pad(ids_RV, padding, value=_PAST_IDS).unflatten(1, (members, groups))

    def first(values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        best = values.amax(1)
        return best, torch.where(values == best.unsqueeze(1), ids, _PAST_IDS).amin(1).to(torch.int32)

    def take(state: State) -> State:
        n, best_RG, first_RG, values, ids = state
        value_R1, token_R1 = (t.unsqueeze(1) for t in first(best_RG, first_RG))
        group_R = torch.where(first_RG == token_R1, iota(groups, token_R1), groups).amin(1).clamp(max=groups - 1)
        places = (iota(rows, token_R1).unsqueeze(1), iota(members, token_R1), group_R.unsqueeze(1))
        member_RW, id_RW = logits_RWG[places], ids_RWG[places]
        later = (member_RW < value_R1) | ((member_RW == value_R1) & (id_RW > token_R1))
        next_value, next_id = first(torch.where(later, member_RW, _LOWEST), torch.where(later, id_RW, _PAST_IDS))
        here = iota(groups, token_R1) == group_R.unsqueeze(1)
        best_RG = torch.where(here, next_value.unsqueeze(1), best_RG)
        first_RG = torch.where(here, next_id.unsqueeze(1), first_RG)
        now = iota(TOP, token_R1) == n
        return n + 1, best_RG, first_RG, torch.where(now, value_R1, values), torch.where(now, token_R1, ids)

    best_RG, first_RG = first(logits_RWG, ids_RWG)
    empty = torch.zeros((rows, TOP), device=logits_RV.device)
    *_, values, ids = ops.fori_loop(TOP, take, (iota(1, ids_RV), best_RG, first_RG, empty, empty.to(torch.int32)))
    return values, ids
