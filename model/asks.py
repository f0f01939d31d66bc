"""Requests beyond sampling parameters: allowed ids, a bias of logits, penalties by the ids of a text.

A graph that serves them is `asking` (`model/graph_key.py`). It keeps for each slot how often each id occurs in the
request's new ids, and whether it occurs in its prompt. The formulas and their order are vLLM's (apply_penalties of
vllm/model_executor/layers/utils.py, vllm/v1/sample/sampler.py); docs/sampling.md has them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from model.ops import iota
from model.parallel import Shard

# a forbidden id's logit where log-probabilities are returned: below all others, and finite
FORBIDDEN = -1e25
# numbers of a sequence: its penalties, and whether its log-probabilities are among the allowed ids
ASKED = 4
# the most ids of a request that have a bias
BIASES = 512
# of an id's count: it occurs in the prompt
IN_PROMPT = 1 << 30
# x of this rank's ids -> those of all ranks, side by side
Join = Callable[[Tensor], Tensor]


class Asks(NamedTuple):
    """The inputs and the state of an asking graph, B sequences.

    `allowed` are words of 32 bits, one for each id that a row may draw. `asked` are a sequence's presence, frequency
    and repetition penalty, and 1 where its log-probabilities are among the allowed ids. `bias_ids` are M ids, -1 where
    there are fewer, and `bias` is added to their logits. `counts` are of the ids of this rank's logits.
    """

    allowed_BNW: Tensor
    asked_B4: Tensor
    bias_ids_BM: Tensor
    bias_BM: Tensor
    counts_B1V: Tensor

    def of_rows(self, shard: Shard, rows: int, join: Join) -> Asked:
        """The requests of R rows, sequence-major, for a shard's ids; `join` where it has ids of other ranks' counts."""
        ids_V, counts_BV = ids_of(shard), self.counts_B1V.squeeze(1)
        if shard.ids_V is not None:
            counts_BV = join(counts_BV).index_select(1, ids_V)
        width = 32 * self.allowed_BNW.shape[-1]
        bias_BV = _placed(self.bias_ids_BM, self.bias_BM, width).index_select(1, ids_V)
        each = rows // len(counts_BV)
        asked_R4, bias_RV, counts_RV = (t.repeat_interleave(each, 0) for t in (self.asked_B4, bias_BV, counts_BV))
        return Asked(allowed_ids(self.allowed_BNW, shard, rows), asked_R4, bias_RV, counts_RV, ids_V)

    def of_prompt(self, occurred_1V: Tensor, shard: Shard) -> Asks:
        """The same for a prompt, whose ids the host has counted, of all ids: counts (1, 1, V)."""
        return self._replace(counts_B1V=occurred_1V.index_select(1, ids_of(shard)).unsqueeze(1))

    def counted(self, accepted_BN: Tensor, shard: Shard) -> Tensor:
        """(B, 1, V) the counts with emitted ids, padded with -1."""
        return self.counts_B1V + _hot(accepted_BN, ids_of(shard)).sum(1, keepdim=True).to(torch.int32)


class Asked(NamedTuple):
    """The requests of R rows for the V ids of a rank's logits: `Asks`, each row with the counts before it."""

    allowed_RV: Tensor
    asked_R4: Tensor
    bias_RV: Tensor
    counts_RV: Tensor
    ids_V: Tensor

    def each(self, taken: Callable[[Tensor], Tensor]) -> Asked:
        """Some of the rows."""
        return Asked(
            taken(self.allowed_RV), taken(self.asked_R4), taken(self.bias_RV), taken(self.counts_RV), self.ids_V
        )

    def after(self, drafts: list[Tensor]) -> Asked:
        """A row of each sequence behind these drafts (B, 1)."""
        if not drafts:
            return self
        return self._replace(counts_RV=self.counts_RV + _hot(torch.cat(drafts, 1), self.ids_V).sum(1).to(torch.int32))

    def along(self, candidates_BN: Tensor) -> Asked:
        """All rows of each sequence: row n is behind the candidates 1 to n, since the first one is counted already."""
        hot_BNV = _hot(candidates_BN, self.ids_V).to(torch.int32)
        before = [torch.zeros_like(hot_BNV[:, 0])]
        for n in range(1, candidates_BN.shape[1]):
            before.append(before[-1] + hot_BNV[:, n])
        return self._replace(counts_RV=self.counts_RV + torch.stack(before, 1).flatten(0, 1))

    def adjusted(self, logits_RV: Tensor) -> Tensor:
        """The logits that a row draws from: the bias first, then the penalties; -inf for forbidden ids."""
        presence_R1, frequency_R1, repetition_R1, _ = (t.unsqueeze(1) for t in self.asked_R4.unbind(-1))
        often_RV = (self.counts_RV & (IN_PROMPT - 1)).float()
        logits_RV = logits_RV + self.bias_RV
        factor_RV = torch.where(self.counts_RV > 0, repetition_R1, 1.0)
        logits_RV = logits_RV * torch.where(logits_RV > 0, 1.0 / factor_RV, factor_RV)
        logits_RV = logits_RV - frequency_R1 * often_RV
        logits_RV = logits_RV - presence_R1 * (often_RV > 0).float()
        return torch.where(self.allowed_RV, logits_RV, float("-inf"))

    def shown(self, logits_RV: Tensor) -> Tensor:
        """The logits whose log-probabilities are returned: the model's own, less those that a grammar forbids."""
        return torch.where(self.allowed_RV | (self.asked_R4[:, 3:] == 0), logits_RV, FORBIDDEN)


def ids_of(shard: Shard) -> Tensor:
    """(V,) int32 the target's ids whose logits a rank has."""
    return shard.start[0] + iota(shard.width, shard.start) if shard.ids_V is None else shard.ids_V


def allowed_ids(words_BNW: Tensor, shard: Shard, rows: int) -> Tensor:
    """(R, V) whether masks allow a shard's ids; a mask of one row serves all rows of its sequence."""
    words_MW = words_BNW.flatten(0, -2)
    bits_MV = (torch.bitwise_right_shift(words_MW[:, :, None], iota(32, words_MW)) & 1).flatten(1)
    return (bits_MV.index_select(1, ids_of(shard)) > 0).repeat_interleave(rows // len(words_MW), 0)


def _hot(ids_BN: Tensor, ids_V: Tensor) -> Tensor:
    """(B, N, V) whether an id is this one."""
    return ids_BN.unsqueeze(-1) == ids_V


def _placed(ids_BM: Tensor, values_BM: Tensor, width: int) -> Tensor:
    """(B, width) the sums of the values at their ids; those at -1 go into a column of their own, which is cut off."""
    rows_B1, places_BM = iota(len(ids_BM), ids_BM).unsqueeze(1), torch.where(ids_BM < 0, width, ids_BM)
    sums = torch.zeros((len(ids_BM), width + 1), dtype=values_BM.dtype, device=values_BM.device)
    return sums.index_put((rows_B1, places_BM), values_BM, accumulate=True)[:, :width]
