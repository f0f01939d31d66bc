"""Approximate top-k, top-p and min-p for draft logits: two passes over 16 thresholds instead of the exact search.

Drafts never change the output, only the acceptance rate. The first pass evaluates 16 thresholds below the best logit,
the second 16 more between the two that enclose the cutoff. Drafting without filters needs 3.5 % more steps at
temperature 0.6 and top-p 0.95 (docs/decisions.md).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from model.filters import Filters
from model.ops import Ops, ordered_sum
from model.sampling import SamplingParams

# thresholds of the first pass: distances from the best logit in units of the temperature; the last is below all ids
STEPS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 9.0, 1e30)
_LOWEST = torch.finfo(torch.float32).min

# thresholds (R, J) -> (R, J) each: the number of ids above a threshold, and their mass relative to the best id's
Sums = Callable[[Tensor], tuple[Tensor, Tensor]]


def approximate(params: SamplingParams) -> SamplingParams:
    """The parameters for sampling drafts: approximate filters in place of the exact ones."""
    return params._replace(filters=params.filters and ApproxFilters._make(params.filters))


class ApproxFilters(Filters):
    """Filters whose cutoff is approximate."""

    __slots__ = ()

    def keep(self, ops: Ops, shifted_RV: Tensor, temperature_R: Tensor) -> Tensor:
        """See `Filters.keep`; the mask may retain a few more ids."""
        mass_RV = torch.exp(shifted_RV / temperature_R[:, None])

        def sums(thresholds_RJ: Tensor) -> tuple[Tensor, Tensor]:
            above_RJV = shifted_RV[:, None] > thresholds_RJ[:, :, None]
            return ordered_sum(above_RJV), ordered_sum(torch.where(above_RJV, mass_RV[:, None], 0.0))

        return shifted_RV >= self.floor(torch.zeros_like(temperature_R), temperature_R, sums)[:, None]

    def floor(self, best_R: Tensor, temperature_R: Tensor, sums: Sums) -> Tensor:
        """(R,) the smallest logit that a draft may sample: the exact filters' cutoff, or a little below it."""
        steps_J = torch.tensor(STEPS, device=best_R.device)
        best_R1 = best_R[:, None]
        top_k_R1 = torch.where(self.top_k_R > 0, self.top_k_R, float("inf"))[:, None]
        tried_RJ = best_R1 - temperature_R[:, None] * steps_J
        count_RJ, mass_RJ = sums(tried_RJ)
        bound_R1 = self.top_p_R[:, None] * _top_k_mass(count_RJ, mass_RJ, top_k_R1)
        bound_R1 = torch.where(self.top_p_R[:, None] < 1, bound_R1, float("inf"))
        keep_RJ = (count_RJ < top_k_R1) & (mass_RJ < bound_R1)
        passed_R1 = torch.where(keep_RJ, tried_RJ, best_R1).amin(-1, keepdim=True)
        removed_R1 = torch.where(keep_RJ, tried_RJ[:, -1:], tried_RJ).amax(-1, keepdim=True)
        parts_J = torch.arange(1, len(STEPS) + 1, device=best_R.device).float() / len(STEPS)
        tried_RJ = passed_R1 - (passed_R1 - removed_R1) * parts_J
        count_RJ, mass_RJ = sums(tried_RJ)
        keep_RJ = (count_RJ < top_k_R1) & (mass_RJ < bound_R1)
        floor_R = torch.where(keep_RJ, removed_R1, tried_RJ).amax(-1)
        # top-k 1 is greedy
        floor_R = torch.where(self.top_k_R == 1, best_R, floor_R)
        min_p_R = (best_R + temperature_R * torch.log(self.min_p_R)).clamp(min=_LOWEST)
        return torch.minimum(torch.maximum(floor_R, min_p_R), best_R)


def _top_k_mass(count_RJ: Tensor, mass_RJ: Tensor, top_k_R1: Tensor) -> Tensor:
    """(R, 1) the mass of the top k ids, interpolated by count between the two thresholds that enclose the k-th id."""
    inside_RJ = count_RJ < top_k_R1
    count_R1, mass_R1 = (torch.where(inside_RJ, t, 0.0).amax(-1, keepdim=True) for t in (count_RJ, mass_RJ))
    next_R1 = (torch.where(inside_RJ, t[:, -1:], t).amin(-1, keepdim=True) for t in (count_RJ, mass_RJ))
    next_count_R1, next_mass_R1 = next_R1
    share_R1 = (top_k_R1 - count_R1) / (next_count_R1 - count_R1).clamp(min=1)
    return mass_R1 + share_R1.clamp(max=1) * (next_mass_R1 - mass_R1)
