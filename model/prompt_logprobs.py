"""Log-probabilities of prompt ids, computed in blocks of rows: the logits of all rows would not fit in memory."""

import torch
from torch import Tensor

from model.drafter import PrefillChunk
from model.logprobs import logprobs
from model.ops import State, iota
from model.qwen3 import Qwen3

# rows per block, and the largest number of loop iterations in a graph
_ROWS, _MAX_BLOCKS = 128, 1000


def prompt_logprobs(
    target: Qwen3, chunk: PrefillChunk, next_prompt_id_1: Tensor, x_1SE: Tensor, sampled_1C: Tensor
) -> Tensor:
    """(1, S, C): row i has the log-probabilities of id i + 1 of the prompt; rows after the last valid one are invalid.

    The last valid row's id is `next_prompt_id`, or, if that is negative, the sampled id with scores `sampled_1C`.
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
