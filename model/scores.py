"""Log-probabilities: of drawn ids and the best ids beside them, and of a prompt's ids.

A row has C = 2 + 2 `TOP` numbers: the log-probability of its own id and that id's rank, counted from 1, then the best
ids' log-probabilities, falling, and these ids, which are exact in fp32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from model.asks import Join
from model.ops import Ops, State, iota, ordered_sum

# source: max_logprobs of vllm/config/model.py (vllm-project/vllm), the most that its API and OpenAI's give
TOP = 20
COLUMNS = 2 + 2 * TOP
# rows of a prompt whose logits are there at once; a loop of a graph has at most a thousand rounds
_BLOCK, _MOST_BLOCKS = 128, 1000
_LOWEST = torch.finfo(torch.float32).min
_PAST_IDS = 1 << 24


def scores(ops: Ops, logits_RV: Tensor, own_R: Tensor, ids_V: Tensor, join: Join) -> Tensor:
    """(R, C) of each row's own id, by the logits of a rank's ids; `join` puts the ranks' numbers beside each other."""
    own_R1 = torch.where(ids_V == own_R.unsqueeze(1), logits_RV, _LOWEST).amax(-1, keepdim=True)
    best = best_ids(ops, logits_RV, ids_V.expand_as(logits_RV))
    parts_RMC = _of_ranks(join, torch.cat((own_R1, best[0], best[1].float()), 1))
    own_R1, values, ids = parts_RMC[..., :1].amax(1), parts_RMC[..., 1 : 1 + TOP], parts_RMC[..., 1 + TOP :]
    if parts_RMC.shape[1] > 1:
        values, ids = best_ids(ops, values.flatten(1), ids.flatten(1).to(torch.int32))
    else:
        values, ids = values[:, 0], ids[:, 0]
    first_R1 = values[:, :1]
    mass_R1, rank_R1 = (ordered_sum(t)[:, None] for t in (torch.exp(logits_RV - first_R1), logits_RV >= own_R1))
    # added by halves: the order of a reduction may depend on the number of rows
    parts_RM2 = _of_ranks(join, torch.cat((mass_R1, rank_R1), 1))
    while parts_RM2.shape[1] > 1:
        lower, upper = parts_RM2.chunk(2, 1)
        parts_RM2 = lower + upper
    mass_R1, rank_R1 = (t.unsqueeze(1) for t in parts_RM2.squeeze(1).unbind(-1))
    below_R1 = first_R1 + torch.log(mass_R1)
    return torch.cat((own_R1 - below_R1, rank_R1, values - below_R1, ids.float()), 1)


def best_ids(ops: Ops, logits_RV: Tensor, ids_RV: Tensor) -> tuple[Tensor, Tensor]:
    """(R, TOP) the best logits, falling, and their ids; of equal logits the smaller id is first.

    Each round takes the best of G groups, then looks through that group's W members for its next one.
    """
    rows, count = logits_RV.shape
    members = 1 << (count.bit_length() // 2)
    groups = -(-count // members)
    spare = (0, members * groups - count)
    logits_RWG = F.pad(logits_RV, spare, value=_LOWEST).unflatten(1, (members, groups))
    ids_RWG = F.pad(ids_RV, spare, value=_PAST_IDS).unflatten(1, (members, groups))

    def first(values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        best = values.amax(1)
        return best, torch.where(values == best.unsqueeze(1), ids, _PAST_IDS).amin(1).to(torch.int32)

    def take(state: State) -> State:
        at, best_RG, first_RG, values, ids = state
        value_R1, token_R1 = (t.unsqueeze(1) for t in first(best_RG, first_RG))
        group_R = torch.where(first_RG == token_R1, iota(groups, token_R1), groups).amin(1).clamp(max=groups - 1)
        places = (iota(rows, token_R1).unsqueeze(1), iota(members, token_R1), group_R.unsqueeze(1))
        member_RW, id_RW = logits_RWG[places], ids_RWG[places]
        later = (member_RW < value_R1) | ((member_RW == value_R1) & (id_RW > token_R1))
        following, its_id = first(torch.where(later, member_RW, _LOWEST), torch.where(later, id_RW, _PAST_IDS))
        here = iota(groups, token_R1) == group_R.unsqueeze(1)
        best_RG = torch.where(here, following.unsqueeze(1), best_RG)
        first_RG = torch.where(here, its_id.unsqueeze(1), first_RG)
        now = iota(TOP, token_R1) == at
        return at + 1, best_RG, first_RG, torch.where(now, value_R1, values), torch.where(now, token_R1, ids)

    best_RG, first_RG = first(logits_RWG, ids_RWG)
    empty = torch.zeros((rows, TOP), device=logits_RV.device)
    *_, values, ids = ops.repeat(TOP, take, (iota(1, ids_RV), best_RG, first_RG, empty, empty.to(torch.int32)))
    return values, ids


def blocks(rows: int) -> int:
    """How many blocks of a prompt's rows are scored one after the other."""
    return min(-(-rows // _BLOCK), _MOST_BLOCKS)


def _of_ranks(join: Join, numbers_RC: Tensor) -> Tensor:
    """(R, M, C) the numbers of each of M ranks."""
    return join(numbers_RC).unflatten(-1, (-1, numbers_RC.shape[1]))
