"""Logits processors of full-sampling graphs: allowed ids, logit bias, and penalties.

These graphs store in each slot how often each id occurs in the output, and whether it occurs in the prompt.
Formulas and order are vLLM's (apply_penalties of vllm/model_executor/layers/utils.py, vllm/v1/sample/sampler.py);
docs/sampling.md has them. Shapes: W words of 32 ids, M ids with a bias, V ids of this rank.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from model.ops import iota
from model.parallel import VocabShard

# the logit of a forbidden id in log-probabilities: below all others, and finite
FORBIDDEN = -1e25
# per sequence: presence, frequency and repetition penalty; 1 to compute log-probabilities over allowed ids only, else 0
NUM_PENALTY_FIELDS = 4
# the largest number of ids with a bias in one request
MAX_BIASES = 512
# this bit of an id's count is set if the id occurs in the prompt
PROMPT_FLAG = 1 << 30


class LogitsProcessors(NamedTuple):
    """The processors of N rows per sequence. `counts_BNV` counts the ids before each row; with one row (B, 1, V), those
    before the first row."""

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
        """From a graph's inputs. `bias`: ids (B, M), padded with -1, and their biases (B, M)."""
        ids_V, width = shard.ids_V, 32 * allowed_BNW.shape[-1]
        bias_B1V = _scattered(*bias, width).index_select(1, ids_V)[:, None]
        # id 32 w + b is bit b of word w
        bits_BNV = (torch.bitwise_right_shift(allowed_BNW[..., None], iota(32, allowed_BNW)) & 1).flatten(-2)
        allowed_BNV = bits_BNV.index_select(2, ids_V) > 0
        return cls(allowed_BNV, penalties_B4[:, None], bias_B1V, counts_B1V, ids_V)

    def rows(self, first: int, stop: int, drafts: list[Tensor]) -> Self:
        """The processors of rows `first` to `stop` - 1, which follow the given drafts (B, 1)."""
        counts_B1V = updated_counts(self.counts_BNV, torch.cat(drafts, 1), self.ids_V) if drafts else self.counts_BNV
        return self._replace(allowed_BNV=self.allowed_BNV[:, first:stop], counts_BNV=counts_B1V)

    def with_drafts(self, ids_BN: Tensor) -> Self:
        """Row n also counts drafts 1 to n; the input id, column 0, is already counted."""
        counts = [self.counts_BNV]
        for id_B1 in ids_BN.split(1, 1)[1:]:
            counts.append(updated_counts(counts[-1], id_B1, self.ids_V))
        return self._replace(counts_BNV=torch.cat(counts, 1))

    def process(self, logits_BNV: Tensor) -> Tensor:
        """Adds the bias, applies the penalties, and sets the logits of forbidden ids to -inf."""
        presence_B11, frequency_B11, repetition_B11, _ = (t.unsqueeze(-1) for t in self.penalties_B14.unbind(-1))
        new_BNV = (self.counts_BNV & (PROMPT_FLAG - 1)).float()
        logits_BNV = logits_BNV + self.bias_B1V
        factor_BNV = torch.where(self.counts_BNV > 0, repetition_B11, 1.0)
        logits_BNV = logits_BNV * torch.where(logits_BNV > 0, 1.0 / factor_BNV, factor_BNV)
        logits_BNV = logits_BNV - frequency_B11 * new_BNV
        logits_BNV = logits_BNV - presence_B11 * (new_BNV > 0).float()
        return torch.where(self.allowed_BNV, logits_BNV, float("-inf"))

    def visible(self, logits_BNV: Tensor) -> Tensor:
        """The logits for log-probabilities: unprocessed, but FORBIDDEN for ids that a grammar forbids."""
        return torch.where(self.allowed_BNV | (self.penalties_B14[..., 3:] == 0), logits_BNV, FORBIDDEN)


def updated_counts(counts_B1V: Tensor, accepted_BN: Tensor, ids_V: Tensor) -> Tensor:
    """(B, 1, V) counts after adding accepted ids, which are padded with -1."""
    return counts_B1V + (accepted_BN[..., None] == ids_V).sum(1, keepdim=True).to(torch.int32)


def _scattered(ids_BM: Tensor, values_BM: Tensor, width: int) -> Tensor:
    """(B, width) sums of the values by id. Values of id -1 are added to an extra column, which is dropped."""
    rows_B1, columns_BM = iota(len(ids_BM), ids_BM)[:, None], torch.where(ids_BM < 0, width, ids_BM)
    sums = torch.zeros((len(ids_BM), width + 1), dtype=values_BM.dtype, device=values_BM.device)
    return sums.index_put((rows_B1, columns_BM), values_BM, accumulate=True)[:, :width]
