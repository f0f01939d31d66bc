"""Reference coupled sampling: the filter, the counter-based Gumbel noise, the draw, the acceptance.

The rule is drafter-invariant speculative decoding (Daliri, Musco, Suresh, arXiv 2408.07978): draft
and target draw with the same noise at the same absolute position, so each emitted id is the
target's own draw, whatever the draft. docs/sampling.md specifies every step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from model.asks import Asked, Asks
from model.filters import Filters
from model.ops import Ops, first_argmax, shift_right
from model.threefry import threefry2x32

# the domain word keeps this stream apart from those of other sampling rules
GUMBEL_DOMAIN = 0
# above all ids
_PAST_IDS = 1 << 24
# drawn by a row whose logits hold NaN or +inf, or leave no id to draw; -1 fills up what a step emits
NO_ID = -2


class Sampling(NamedTuple):
    """Each sequence's sampling parameters; a graph for sequences of which none filters has no `filters`.

    Only an asking graph has `asks`.
    """

    temperature_B: Tensor
    seed_B2: Tensor
    filters: Filters | None
    asks: Asks | None = None

    def draw(self, positions_BN: Tensor) -> Draw:
        """The draw of N rows of each sequence, for the tokens at these positions."""
        rows = positions_BN.shape[1]
        temperature_R, seed_R2 = (t.repeat_interleave(rows, 0) for t in (self.temperature_B, self.seed_B2))
        filters = self.filters and self.filters.each(lambda t: t.repeat_interleave(rows, 0))
        return Draw(temperature_R, seed_R2, positions_BN.flatten(), filters)


class Draw(NamedTuple):
    """The inputs to the draws of a pass: R = B N rows, sequence-major.

    `position_R` is the absolute position of the token that a row draws. A backing makes the noise of all passes of a
    step once, `noise_RV`, for this rank's ids; `start_11`, int32, is the first of them where logits stay on their
    ranks. `asked` changes the logits that are drawn from, in an asking graph.
    """

    temperature_R: Tensor
    seed_R2: Tensor
    position_R: Tensor
    filters: Filters | None
    noise_RV: Tensor | None = None
    start_11: Tensor | None = None
    asked: Asked | None = None

    @property
    def filtering_R(self) -> Tensor | None:
        """(R,) whether a row filters; None where none does."""
        return None if self.filters is None else self.filters.active_R & (self.temperature_R > 0)

    @property
    def heat_R(self) -> Tensor:
        """(R,) the temperature to divide by: 1 for a greedy row, whose draw does not use it."""
        return torch.where(self.temperature_R > 0, self.temperature_R, 1.0)

    def row(self, n: int, rows: int) -> Draw:
        """Row n of the `rows` rows of each sequence."""
        return self._of_rows(lambda t: t[n::rows])

    def first(self, count: int, rows: int) -> Draw:
        """The first `count` of the `rows` rows of each sequence."""
        return self._of_rows(lambda t: t.unflatten(0, (-1, rows))[:, :count].flatten(0, 1))

    def after(self, drafts: list[Tensor]) -> Draw:
        """The draw of a row of each sequence, behind these drafts (B, 1)."""
        return self._replace(asked=self.asked and self.asked.after(drafts))

    def along(self, candidates_BN: Tensor) -> Draw:
        """The draw of all rows, each behind the candidates before it."""
        return self._replace(asked=self.asked and self.asked.along(candidates_BN))

    def adjusted(self, logits_RV: Tensor) -> Tensor:
        """The logits that are drawn from."""
        return logits_RV if self.asked is None else self.asked.adjusted(logits_RV)

    def _of_rows(self, taken: Callable[[Tensor], Tensor]) -> Draw:
        named = {name: taken(t) for name, t in self._asdict().items() if "_R" in name and t is not None}
        filters, asked = self.filters and self.filters.each(taken), self.asked and self.asked.each(taken)
        return self._replace(**named, filters=filters, asked=asked)


class Draws(NamedTuple):
    """Each row's best score and the id that has it, on M shards in the order of ids: (M, ...) fp32 and int32."""

    values: Tensor
    ids: Tensor

    def each(self, change: Callable[[Tensor], Tensor]) -> Draws:
        """The same change of both tensors."""
        return Draws._make(map(change, self))

    def merged(self) -> Tensor:
        """The drawn ids: those of the best scores over the shards, the smallest among equals."""
        if len(self.ids) == 1:
            return self.ids[0]
        return torch.where(self.values == self.values.amax(0), self.ids, _PAST_IDS).amin(0)


def coupled_sample(ops: Ops, logits_RV: Tensor, draw: Draw) -> Tensor:
    """(R,) int32 token ids: those of the best perturbed scores; ties go to the smallest id; NO_ID where none is."""
    logits_RV = draw.adjusted(logits_RV)
    best_R = logits_RV.amax(-1)
    ids_R = first_argmax(ops.shared(perturbed, logits_RV, best_R, draw._replace(asked=None)))
    return torch.where(is_number(best_R), ids_R, NO_ID)


def perturbed(ops: Ops, logits_RV: Tensor, best_R: Tensor, draw: Draw) -> Tensor:
    """(R, V) the scores whose argmax is drawn: filtered logits / temperature + Gumbel noise.

    The noise of a row is a function of (seed, absolute position of the token drawn, token id).
    Temperature 0 takes the logits. The best logit's distance is 0 before any division, so no rounding removes it.
    """
    below_RV = best_R[:, None] - logits_RV
    noise = draw.noise_RV
    if noise is None:
        noise = gumbel(draw.seed_R2, draw.position_R, logits_RV.shape[-1])
    scores_RV = noise - below_RV / draw.heat_R[:, None]
    filtering_R = draw.filtering_R
    if filtering_R is not None and draw.filters is not None:
        removed_RV = ops.shared(removed_by_filters, filtering_R, draw.filters, below_RV, draw.heat_R)
        scores_RV = torch.where(removed_RV, float("-inf"), scores_RV)
    return torch.where(draw.temperature_R[:, None] > 0, scores_RV, logits_RV)


def removed_by_filters(ops: Ops, filtering_R: Tensor, filters: Filters, below_RV: Tensor, heat_R: Tensor) -> Tensor:
    """(R, V) the ids that a filter removes; none of a row that does not filter."""
    return filtering_R[:, None] & ~filters.kept(ops, below_RV, heat_R)


def is_number(best_R: Tensor) -> Tensor:
    """(R,) whether a row's largest logit can be drawn: it is NaN if any is, and -inf if all are."""
    return (best_R > float("-inf")) & (best_R < float("inf"))


def gumbel(seed_R2: Tensor, positions_R: Tensor, vocabulary: int) -> Tensor:
    """(R, V) fp32 Gumbel(0, 1) noise of (seed, position, id), from Threefry-2x32.

    Counter (id // 2, position + domain * 2^24), key the seed's two words; the word of parity
    id % 2 gives u = (its top 23 bits + 1/2) / 2^23, and the noise is -log(-log u).
    """
    pairs = torch.arange((vocabulary + 1) // 2, dtype=torch.int32, device=positions_R.device)
    counter = positions_R.to(torch.int32) + GUMBEL_DOMAIN * (1 << 24)
    words = threefry2x32(
        (seed_R2[:, :1], seed_R2[:, 1:]),
        (pairs[None].expand(counter.shape[0], -1), counter[:, None].expand(-1, pairs.shape[0])),
    )
    return _gumbel(torch.stack(words, -1).flatten(1)[:, :vocabulary])


def gumbel_of(seed_R2: Tensor, positions_R: Tensor, ids_V: Tensor) -> Tensor:
    """(R, V) fp32: the noise of `gumbel` for these ids, in any order."""
    counter = positions_R.to(torch.int32) + GUMBEL_DOMAIN * (1 << 24)
    rows, width = counter.shape[0], ids_V.shape[0]
    even, odd = threefry2x32(
        (seed_R2[:, :1], seed_R2[:, 1:]),
        (shift_right(ids_V, 1)[None].expand(rows, -1), counter[:, None].expand(-1, width)),
    )
    return _gumbel(torch.where((ids_V & 1) > 0, odd, even))


def _gumbel(bits: Tensor) -> Tensor:
    mantissa = shift_right(bits, 9) & 0x7FFFFF
    uniform_RV = (mantissa.float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform_RV))


def accept(drafts_BK: Tensor, targets_BN: Tensor, limit_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Accept drafts while they equal the target's draws, at most `limit_B` of them.

    Returns the emitted ids (B, N) padded with -1, their counts (B, 1) and the last of them (B, 1):
    the accepted drafts and one more draw of the target's.
    """
    k = drafts_BK.shape[1]
    index_N = torch.arange(k + 1, dtype=torch.int32, device=targets_BN.device)
    accepted_BN = torch.nn.functional.pad(drafts_BK == targets_BN[:, :k], (0, 1))
    first_miss_B1 = torch.where(accepted_BN, k, index_N).amin(-1, keepdim=True)
    count_B1 = torch.minimum(first_miss_B1, limit_B[:, None]).to(torch.int32) + 1
    last_B1 = torch.where(index_N == count_B1 - 1, targets_BN, 0).sum(-1, keepdim=True).to(torch.int32)
    return torch.where(index_N < count_B1, targets_BN, -1), count_B1, last_B1
