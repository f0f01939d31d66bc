"""Reference sampler: counter-based Gumbel noise, Gumbel-max sampling, acceptance of drafts.

Drafter-invariant speculative decoding (Daliri, Musco, Suresh, arXiv 2408.07978): draft and target sample with the same
noise at the same absolute position, so each emitted id is the target's sample, whatever the draft. docs/sampling.md
specifies every step. Shapes: R rows, V ids in this rank's logits, B sequences, N = K + 1 rows per sequence.
"""

from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from model.filters import Filters
from model.logits_processors import LogitsProcessors
from model.ops import Ops, first_argmax, iota, shift_right
from model.threefry import threefry2x32

# separates this noise stream from streams of other uses of a seed
GUMBEL_DOMAIN = 0
# the sample of a row whose logits contain NaN or +inf, or are all -inf; -1 pads the emitted ids
NO_ID = -2
# larger than every id
_PAST_IDS = 1 << 24


class SamplingParams(NamedTuple):
    """Each row's sampling parameters; `filters` and `processors` are None in graphs without them."""

    temperature_R: Tensor
    seed_R2: Tensor
    filters: Filters | None
    processors: LogitsProcessors | None = None

    @property
    def filtering_R(self) -> Tensor | None:
        """(R,) whether a row uses top-k, top-p or min-p; None in a graph without filters."""
        return None if self.filters is None else self.filters.active_R & (self.temperature_R > 0)

    @property
    def divisor_R(self) -> Tensor:
        """(R,) the temperature; 1 for greedy rows, which ignore it."""
        return torch.where(self.temperature_R > 0, self.temperature_R, 1.0)

    def repeat(self, count: int) -> Self:
        """Repeats each row `count` times and drops the processors."""
        if count == 1:
            return self._replace(processors=None)
        temperature_R, seed_R2 = (t.repeat_interleave(count, 0) for t in self[:2])
        filters = self.filters and type(self.filters)._make(t.repeat_interleave(count, 0) for t in self.filters)
        return type(self)(temperature_R, seed_R2, filters)

    def rows(self, first: int, stop: int, drafts: list[Tensor]) -> Self:
        """The parameters of rows `first` to `stop` - 1 of each sequence, which follow the given drafts (B, 1)."""
        return self._replace(processors=self.processors and self.processors.rows(first, stop, drafts))

    def with_drafts(self, ids_BN: Tensor) -> Self:
        """The parameters of all N rows: row n follows drafts 1 to n. Column 0 of `ids_BN` is the input id."""
        return self._replace(processors=self.processors and self.processors.with_drafts(ids_BN))


class ShardArgmax(NamedTuple):
    """Each row's best score and its id on M vocabulary shards, in ascending order of ids: (M, ...) fp32 and int32."""

    values: Tensor
    ids: Tensor

    def token_ids(self) -> Tensor:
        """The sampled ids: the id of each row's best score over all shards; ties go to the smallest id."""
        if len(self.ids) == 1:
            return self.ids[0]
        return torch.where(self.values == self.values.amax(0), self.ids, _PAST_IDS).amin(0)


def gumbel_noise(ops: Ops, seed_R2: Tensor, position_R: Tensor, ids_V: Tensor) -> Tensor:
    """(R, V) fp32 Gumbel(0, 1) noise: a function of the seed, the sampled token's absolute position and the id.

    Threefry-2x32 with counter (id // 2, position + domain * 2^24) and the seed's two words as key. Output word id % 2
    gives u = (its top 23 bits + 1/2) / 2^23; the noise is -log(-log u).
    """
    counter_R1 = position_R.to(torch.int32)[:, None] + GUMBEL_DOMAIN * (1 << 24)
    pair_RV, counter_RV = torch.broadcast_tensors(shift_right(ids_V, 1)[None], counter_R1)
    even_RV, odd_RV = threefry2x32((seed_R2[:, :1], seed_R2[:, 1:]), (pair_RV, counter_RV))
    mantissa_RV = shift_right(torch.where((ids_V & 1) > 0, odd_RV, even_RV), 9) & 0x7FFFFF
    return -torch.log(-torch.log((mantissa_RV.float() + 0.5) * 2.0**-23))


def sample(ops: Ops, logits_RV: Tensor, params: SamplingParams, noise_RV: Tensor) -> Tensor:
    """(R,) int32 Gumbel-max samples: argmax(filtered logits / temperature + noise), argmax(logits) at temperature 0.

    Ties go to the smallest index; rows whose largest logit is not finite return NO_ID. The largest logit is subtracted
    before the division, so a filter cannot remove the best id by rounding.
    """
    best_R = logits_RV.amax(-1)
    shifted_RV = logits_RV - best_R[:, None]
    scores_RV = shifted_RV / params.divisor_R[:, None] + noise_RV
    if params.filters is not None and params.filtering_R is not None:
        keep_RV = ops.jit(_keep, params.filters, shifted_RV, params.divisor_R)
        scores_RV = torch.where(params.filtering_R[:, None] & ~keep_RV, float("-inf"), scores_RV)
    scores_RV = torch.where(params.temperature_R[:, None] > 0, scores_RV, logits_RV)
    return torch.where(is_finite(best_R), first_argmax(scores_RV), NO_ID)


def _keep(ops: Ops, filters: Filters, shifted_RV: Tensor, temperature_R: Tensor) -> Tensor:
    return filters.keep(ops, shifted_RV, temperature_R)


def is_finite(best_R: Tensor) -> Tensor:
    """(R,) whether a row has an id to sample: its largest logit is NaN if any logit is, and -inf if all are."""
    return (best_R > float("-inf")) & (best_R < float("inf"))


def accept(drafts_BK: Tensor, samples_BN: Tensor, max_accepted_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Accepts each sequence's drafts up to the first that differs from the target's sample, `max_accepted_B` at most.

    The emitted ids are the accepted drafts and the target's next sample. Returns them (B, N) padded with -1, their
    counts (B, 1) and the last id (B, 1).
    """
    k = drafts_BK.shape[1]
    index_N = iota(k + 1, samples_BN)
    equal_BN = F.pad(drafts_BK == samples_BN[:, :k], (0, 1))
    first_miss_B1 = torch.where(equal_BN, k, index_N).amin(-1, keepdim=True)
    count_B1 = torch.minimum(first_miss_B1, max_accepted_B[:, None]).to(torch.int32) + 1
    last_B1 = torch.where(index_N == count_B1 - 1, samples_BN, 0).sum(-1, keepdim=True).to(torch.int32)
    return torch.where(index_N < count_B1, samples_BN, -1), count_B1, last_B1
