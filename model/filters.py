"""Exact min-p, top-k and top-p (docs/sampling.md has the definitions).

The cutoff is bisected with sums: a graph needs neither a sort nor a bit cast.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from model.ops import Ops, State, ordered_sum

_SMALLEST = 2.0**-126
_MANTISSA_BITS = 23


class Filters(NamedTuple):
    """Each row's top-k (0 disables it), top-p (1 disables it) and min-p (0 disables it), fp32 (R,)."""

    top_k_R: Tensor
    top_p_R: Tensor
    min_p_R: Tensor

    @property
    def active_R(self) -> Tensor:
        """(R,) whether any filter of a row is on."""
        return (self.top_k_R > 0) | (self.top_p_R < 1) | (self.min_p_R > 0)

    def keep(self, ops: Ops, shifted_RV: Tensor, temperature_R: Tensor) -> Tensor:
        """(R, V) mask of the ids after min-p, then top-k, then top-p; `shifted_RV` is the logits minus the row's max.

        min-p retains ids with at least min_p times the top probability, top-k ids with fewer than k ids above them, and
        top-p ids with less than p of the remaining mass above them. Ids with equal logits are treated alike, so no rule
        depends on the order of ids. The best id is retained by comparison, whatever the rounding of masses.
        """
        distance_RV, mass_RV = -shifted_RV, torch.exp(shifted_RV / temperature_R[:, None])
        keep_RV = (mass_RV >= self.min_p_R[:, None]) | (distance_RV == 0)
        top_k_R = torch.where(self.top_k_R > 0, self.top_k_R, float("inf"))
        cutoff_R = _cutoff(ops, distance_RV, keep_RV.float(), top_k_R)
        mass_RV = torch.where(keep_RV & (distance_RV <= cutoff_R[:, None]), mass_RV, 0.0)
        bound_R = torch.where(self.top_p_R < 1, self.top_p_R * ordered_sum(mass_RV), float("inf"))
        cutoff_R = torch.minimum(cutoff_R, _cutoff(ops, distance_RV, mass_RV, bound_R))
        return keep_RV & (distance_RV <= cutoff_R[:, None])


def _cutoff(ops: Ops, distance_RV: Tensor, weights_RV: Tensor, bound_R: Tensor) -> Tensor:
    """(R,) the largest distance d for which the ids with a distance below d weigh less than `bound_R`.

    Bisects d bit by bit from the top: the 8 exponent bits by multiplication with powers of two, the mantissa bits by
    addition, all exact. d starts at 2^-126: no two different logits are closer.
    """

    def advance(candidate_R: Tensor, cutoff_R: Tensor) -> Tensor:
        weight_R = ordered_sum(torch.where(distance_RV < candidate_R[:, None], weights_RV, 0.0))
        return torch.where(weight_R < bound_R, candidate_R, cutoff_R)

    def add_bit(state: State) -> State:
        cutoff_R, step_R = state
        return advance(cutoff_R + step_R, cutoff_R), step_R * 0.5

    cutoff_R = torch.full_like(bound_R, _SMALLEST)
    for power in (128, 64, 32, 16, 8, 4, 2, 1):
        # 2^128 is no fp32 number
        candidate_R = cutoff_R * 2.0**64 * 2.0**64 if power == 128 else cutoff_R * 2.0**power
        cutoff_R = advance(candidate_R, cutoff_R)
    return ops.fori_loop(_MANTISSA_BITS, add_bit, (cutoff_R, cutoff_R * 0.5))[0]
