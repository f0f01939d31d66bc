"""Reference coupled sampling: the filter, the counter-based Gumbel noise, the draw, the acceptance.

The rule is drafter-invariant speculative decoding (Daliri, Musco, Suresh, arXiv 2408.07978): draft
and target draw with the same noise at the same absolute position, so what is emitted is the
target's own draw, whatever the draft. docs/sampling.md specifies every step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from model.ops import Ops, State, first_argmax
from model.threefry import threefry2x32

# the domain word keeps this stream apart from those of other sampling rules
GUMBEL_DOMAIN = 0
_INFINITY_BITS = 0x7F800000
# above all ids
_PAST_IDS = 1 << 24


class Sampling(NamedTuple):
    """What each sequence's request asks; the neutral values switch a filter off."""

    temperature_B: Tensor
    top_k_B: Tensor
    top_p_B: Tensor
    min_p_B: Tensor
    seed_B2: Tensor

    def draw(self, positions_BN: Tensor) -> Draw:
        """What N rows of each sequence draw with, for the tokens at these positions."""
        asked_R = Sampling(*(t.repeat_interleave(positions_BN.shape[1], 0) for t in self))
        return Draw(*asked_R, positions_BN.flatten())


class Draw(NamedTuple):
    """What the rows of a pass draw with: R = B N rows, sequence-major.

    `position_R` is the absolute position of the token that a row draws. A backing that makes the noise once for all
    passes of a step has it in `noise_RV`, for the ids from `start_11`, int32, on.
    """

    temperature_R: Tensor
    top_k_R: Tensor
    top_p_R: Tensor
    min_p_R: Tensor
    seed_R2: Tensor
    position_R: Tensor
    noise_RV: Tensor | None = None
    start_11: Tensor | None = None

    def row(self, n: int, rows: int) -> Draw:
        """Row n of the `rows` rows of each sequence."""
        noise_RV = None if self.noise_RV is None else self.noise_RV[n::rows]
        return Draw._make([*(t[n::rows] for t in self[:6]), noise_RV, self.start_11])


class Draws(NamedTuple):
    """Each row's best score and the id that has it, on M shards in the order of ids: (M, ...) fp32 and int32."""

    values: Tensor
    ids: Tensor

    def merged(self) -> Tensor:
        """The drawn ids: those of the best scores over the shards, the smallest among equals."""
        if len(self.ids) == 1:
            return self.ids[0]
        return torch.where(self.values == self.values.amax(0), self.ids, _PAST_IDS).amin(0)


def coupled_sample(ops: Ops, logits_RV: Tensor, draw: Draw) -> Tensor:
    """(R,) int32 token ids: argmax over the filtered logits / temperature + Gumbel noise.

    The noise of a row is a function of (seed, absolute position of the token drawn, token id).
    Temperature 0 takes the argmax of the logits; ties go to the smallest id.
    """
    noisy = draw.temperature_R > 0
    scores = ops.cond(noisy.any(), lambda: _perturbed(ops, logits_RV, draw), lambda: logits_RV)
    return first_argmax(torch.where(noisy[:, None], scores, logits_RV))


def _perturbed(ops: Ops, logits_RV: Tensor, draw: Draw) -> Tensor:
    temperature = torch.where(draw.temperature_R > 0, draw.temperature_R, 1.0)
    scaled = logits_RV / temperature[:, None]
    scaled = scaled - scaled.amax(-1, keepdim=True)
    filtering = (draw.top_k_R > 0) | (draw.top_p_R < 1) | (draw.min_p_R > 0)
    kept = ops.cond(filtering.any(), lambda: filtered(ops, scaled, draw), lambda: scaled)
    kept = torch.where(filtering[:, None], kept, scaled)
    return kept + gumbel(draw.seed_R2, draw.position_R, logits_RV.shape[-1])


def filtered(ops: Ops, scaled_RV: Tensor, draw: Draw) -> Tensor:
    """Logits (scaled, maximum 0) with what min-p, then top-k, then top-p removes set to -inf.

    min-p keeps ids of at least min_p times the top probability; top-k those with fewer than k ids
    above them; top-p those with less than p of the remaining mass above them. Equal logits share
    their fate, so no rule depends on the order of ids.
    """
    mass = torch.exp(scaled_RV)
    mass = torch.where(mass >= draw.min_p_R[:, None], mass, 0.0)
    # the logits are not above 0, so the bits of their distance from 0 are int32 keys, best first
    keys = ops.bits(scaled_RV.abs())
    k = torch.where(draw.top_k_R > 0, draw.top_k_R, float("inf"))
    last = _last_kept(ops, keys, (mass > 0).float(), k)
    mass = torch.where(keys <= last[:, None], mass, 0.0)
    bound = torch.where(draw.top_p_R < 1, draw.top_p_R * mass.sum(-1), float("inf"))
    last = _last_kept(ops, keys, mass, bound)
    return torch.where((keys <= last[:, None]) & (mass > 0), scaled_RV, float("-inf"))


def _last_kept(ops: Ops, keys_RV: Tensor, weights_RV: Tensor, bound_R: Tensor) -> Tensor:
    """(R,) the largest key whose better keys weigh less than the bound in total.

    A bisection over the 31 bits of the key: exact, without a sort.
    """

    def halve(range_: State) -> State:
        low, high = range_
        middle = low + ((high - low) >> 1)
        better = torch.where(keys_RV < middle[:, None], weights_RV, 0.0).sum(-1)
        fits = better < bound_R
        return torch.where(fits, middle, low), torch.where(fits, high, middle)

    low = torch.zeros_like(bound_R, dtype=torch.int32)
    return ops.repeat(31, halve, (low, torch.full_like(low, _INFINITY_BITS + 1)))[0]


def gumbel(seed_R2: Tensor, positions_R: Tensor, vocabulary: int) -> Tensor:
    """(R, V) fp32 Gumbel(0, 1) noise of (seed, position, id), from Threefry-2x32.

    Counter (id // 2, position + domain * 2^24), key the seed's two words; the word of parity
    id % 2 gives u = (its top 23 bits + 1/2) / 2^23, and the noise is -log(-log u).
    """
    pairs = torch.arange((vocabulary + 1) // 2, dtype=torch.int32, device=positions_R.device)
    counter = positions_R.to(torch.int32) + (GUMBEL_DOMAIN << 24)
    words = threefry2x32(
        (seed_R2[:, :1], seed_R2[:, 1:]),
        (pairs[None].expand(counter.shape[0], -1), counter[:, None].expand(-1, pairs.shape[0])),
    )
    bits = torch.stack(words, -1).flatten(1)[:, :vocabulary]
    mantissa = (bits >> 9) & 0x7FFFFF
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
