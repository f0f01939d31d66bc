"""Logits processors: allowed ids, a bias, and penalties by the ids of a text; in full-sampling graphs only.

Such a graph stores for each slot how often each id occurs in the request's new ids, and whether in its prompt.
The formulas and their order are vLLM's (apply_penalties of vllm/model_executor/layers/utils.py, and
vllm/v1/sample/sampler.py); docs/sampling.md has them. Shapes: W words of 32 ids, M ids with a bias, V ids of this rank.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from model.ops import iota
from model.parallel import VocabShard

# a forbidden id's logit where log-probabilities are returned: below all others, and finite
FORBIDDEN = -1e25
# numbers of a sequence: presence, frequency and repetition penalty, 1 where log-probabilities are of allowed ids only
NUM_PENALTY_FIELDS = 4
# the most ids of a request that have a bias
MAX_BIASES = 512
# of an id's count: it occurs in the prompt
PROMPT_FLAG = 1 << 30


class LogitsProcessors(NamedTuple):
    """The processors of N rows of B sequences; `counts` of the ids before each row, or before the first one."""

    allowed_BNV: Tensor
    penalties_B14: Tensor
    bias_B1V: Tensor
    counts_BNV: Tensor
    ids_V: Tensor

    @classmethod
    def of(
        cls, allowed_BNW: Tensor, penalties_B4: Tensor, bias: tuple[Tensor, Tensor], counts_B1V: Tensor,
        shard: VocabShard,
    ) -> Self:  # fmt: skip
        """Those of a graph's inputs: words of allowed ids, ids (B, M), -1 for none, and their biases, counts."""
        ids_V, width = shard.ids_V, 32 * allowed_BNW.shape[-1]
        bias_B1V = _scattered(*bias, width).index_select(1, ids_V)[:, None]
        # id 32 w + b is bit b of word w
        bits_BNV = (torch.bitwise_right_shift(allowed_BNW[..., None], iota(32, allowed_BNW)) & 1).flatten(-2)
        allowed_BNV = bits_BNV.index_select(2, ids_V) > 0
        return cls(allowed_BNV, penalties_B4[:, None], bias_B1V, counts_B1V, ids_V)

    def rows(self, first: int, stop: int, drafts: list[Tensor]) -> Self:
        """Those of some rows, after these drafts (B, 1)."""
        counts_B1V = updated_counts(self.counts_BNV, torch.cat(drafts, 1), self.ids_V) if drafts else self.counts_BNV
        return self._replace(allowed_BNV=self.allowed_BNV[:, first:stop], counts_BNV=counts_B1V)

    def with_drafts(self, ids_BN: Tensor) -> Self:
        """Those of all rows: row n is after the ids 1 to n; the first one is counted already."""
        counts = [self.counts_BNV]
        for id_B1 in ids_BN.split(1, 1)[1:]:
            counts.append(updated_counts(counts[-1], id_B1, self.ids_V))
        return self._replace(counts_BNV=torch.cat(counts, 1))

    def process(self, logits_BNV: Tensor) -> Tensor:
        """The logits that a row samples from: the bias first, then the penalties; -inf for forbidden ids."""
        presence_B11, frequency_B11, repetition_B11, _ = (t.unsqueeze(-1) for t in self.penalties_B14.unbind(-1))
        new_BNV = (self.counts_BNV & (PROMPT_FLAG - 1)).float()
        logits_BNV = logits_BNV + self.bias_B1V
        factor_BNV = torch.where(self.counts_BNV > 0, repetition_B11, 1.0)
        logits_BNV = logits_BNV * torch.where(logits_BNV > 0, 1.0 / factor_BNV, factor_BNV)
        logits_BNV = logits_BNV - frequency_B11 * new_BNV
        logits_BNV = logits_BNV - presence_B11 * (new_BNV > 0).float()
        return torch.where(self.allowed_BNV, logits_BNV, float("-inf"))

    def visible(self, logits_BNV: Tensor) -> Tensor:
        """The logits whose log-probabilities are returned: the model's own, less those that a grammar forbids."""
        return torch.where(self.allowed_BNV | (self.penalties_B14[..., 3:] == 0), logits_BNV, FORBIDDEN)


def updated_counts(counts_B1V: Tensor, accepted_BN: Tensor, ids_V: Tensor) -> Tensor:
    """(B, 1, V) the counts with emitted ids, padded with -1."""
    return counts_B1V + (accepted_BN[..., None] == ids_V).sum(1, keepdim=True).to(torch.int32)


def _scattered(ids_BM: Tensor, values_BM: Tensor, width: int) -> Tensor:
    """(B, width) the sums of the values at their ids; those at -1 go into a last column, which is cut off."""
    rows_B1, columns_BM = iota(len(ids_BM), ids_BM)[:, None], torch.where(ids_BM < 0, width, ids_BM)
    sums = torch.zeros((len(ids_BM), width + 1), dtype=values_BM.dtype, device=values_BM.device)
    return sums.index_put((rows_B1, columns_BM), values_BM, accumulate=True)[:, :width]
