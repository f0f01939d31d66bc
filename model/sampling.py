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
    """The sampling parameters of each row; the neutral values switch a filter off.

    `noise_BNV` is the noise of a step's positions, if a backing makes it once for all draws of the step;
    `start_11` is the first id of the shard that it draws from, int32, or None for 0.
    """

    temperature_R: Tensor
    top_k_R: Tensor
    top_p_R: Tensor
    min_p_R: Tensor
    seed_R2: Tensor
    noise_BNV: Tensor | None = None
    start_11: Tensor | None = None

    def rows(self, count: int) -> Sampling:
        """The same parameters for `count` rows of each sequence, sequence-major, with the noise of the first ones."""
        whole = ("noise_BNV", "start_11")
        each = {name: t.repeat_interleave(count, 0) for name, t in self._asdict().items() if name not in whole}
        noise = None if self.noise_BNV is None else self.noise_BNV[:, :count]
        return Sampling(**each, noise_BNV=noise, start_11=self.start_11)

    def at(self, row: int) -> Sampling:
        """The parameters of a pass whose only row is the step's row `row`."""
        return self if self.noise_BNV is None else self._replace(noise_BNV=self.noise_BNV[:, row : row + 1])


class Draws(NamedTuple):
    """Each row's best score and the id that has it, on M shards in the order of ids: (M, ...) fp32 and int32."""

    values: Tensor
    ids: Tensor

    def merged(self) -> Tensor:
        """The drawn ids: those of the best scores over the shards, the smallest among equals."""
        if len(self.ids) == 1:
            return self.ids[0]
        return torch.where(self.values == self.values.amax(0), self.ids, _PAST_IDS).amin(0)


def coupled_sample(ops: Ops, logits_RV: Tensor, sampling: Sampling, positions_R: Tensor) -> Tensor:
    """(R,) int32 token ids: argmax over the filtered logits / temperature + Gumbel noise.

    The noise of a row is a function of (seed, absolute position of the token drawn, token id).
    Temperature 0 takes the argmax of the logits; ties go to the smallest id.
    """
    noisy = sampling.temperature_R > 0
    scores = ops.cond(noisy.any(), lambda: _perturbed(ops, logits_RV, sampling, positions_R), lambda: logits_RV)
    return first_argmax(torch.where(noisy[:, None], scores, logits_RV))


def _perturbed(ops: Ops, logits_RV: Tensor, sampling: Sampling, positions_R: Tensor) -> Tensor:
    temperature = torch.where(sampling.temperature_R > 0, sampling.temperature_R, 1.0)
    scaled = logits_RV / temperature[:, None]
    scaled = scaled - scaled.amax(-1, keepdim=True)
    filtering = (sampling.top_k_R > 0) | (sampling.top_p_R < 1) | (sampling.min_p_R > 0)
    kept = ops.cond(filtering.any(), lambda: filtered(ops, scaled, sampling), lambda: scaled)
    kept = torch.where(filtering[:, None], kept, scaled)
    return kept + gumbel(sampling.seed_R2, positions_R, logits_RV.shape[-1])


def filtered(ops: Ops, scaled_RV: Tensor, sampling: Sampling) -> Tensor:
    """Logits (scaled, maximum 0) with what min-p, then top-k, then top-p removes set to -inf.

    min-p keeps ids of at least min_p times the top probability; top-k those with fewer than k ids
    above them; top-p those with less than p of the remaining mass above them. Equal logits share
    their fate, so no rule depends on the order of ids.
    """
    mass = torch.exp(scaled_RV)
    mass = torch.where(mass >= sampling.min_p_R[:, None], mass, 0.0)
    # the logits are not above 0, so the bits of their distance from 0 are int32 keys, best first
    keys = ops.bits(scaled_RV.abs())
    k = torch.where(sampling.top_k_R > 0, sampling.top_k_R, float("inf"))
    last = _last_kept(ops, keys, (mass > 0).float(), k)
    mass = torch.where(keys <= last[:, None], mass, 0.0)
    bound = torch.where(sampling.top_p_R < 1, sampling.top_p_R * mass.sum(-1), float("inf"))
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


def gumbel(seed_R2: Tensor, positions_R: Tensor, vocabulary: int, domain: int = GUMBEL_DOMAIN) -> Tensor:
    """(R, V) fp32 Gumbel(0, 1) noise of (seed, position, id), from Threefry-2x32.

    Counter (id // 2, position + domain * 2^24), key the seed's two words; the word of parity
    id % 2 gives u = (its top 23 bits + 1/2) / 2^23, and the noise is -log(-log u).
    """
    return -torch.log(-torch.log(uniform(seed_R2, positions_R, vocabulary, domain)))


def uniform(seed_R2: Tensor, positions_R: Tensor, count: int, domain: int) -> Tensor:
    """(R, count) fp32 numbers strictly between 0 and 1, of (seed, position, index) in a domain of the generator."""
    pairs = torch.arange((count + 1) // 2, dtype=torch.int32, device=positions_R.device)
    counter = positions_R.to(torch.int32) + (domain << 24)
    words = threefry2x32(
        (seed_R2[:, :1], seed_R2[:, 1:]),
        (pairs[None].expand(counter.shape[0], -1), counter[:, None].expand(-1, pairs.shape[0])),
    )
    bits = torch.stack(words, -1).flatten(1)[:, :count]
    mantissa = (bits >> 9) & 0x7FFFFF
    return (mantissa.float() + 0.5) * 2.0**-23


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
