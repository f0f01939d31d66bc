"""The filters of sampling: what min-p, top-k and top-p keep, exactly for the target and roughly for a draft.

The target's rows get the definitions of docs/sampling.md, by a search that needs sums alone: no sort, no bits of a
number. A draft's draw has no say in what is emitted, only in how often it is accepted, so its filters are tried at
a few logits below the best one, all at once, and at as many between two of these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from model.ops import Ops, State

if TYPE_CHECKING:
    from model.sampling import Draw

# distances below the best logit, in temperatures, at which a draft's filters are tried; the last is below all ids
GUESSED_STEPS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 9.0, 1e30)
_SMALLEST = 2.0**-126
_LOWEST = torch.finfo(torch.float32).min
_MANTISSA_BITS = 23

# thresholds (R, J) -> (R, J) each: how many ids are above them, and their mass relative to the best id's
Sums = Callable[[Tensor], tuple[Tensor, Tensor]]


def filtered(ops: Ops, scaled_RV: Tensor, draw: Draw) -> Tensor:
    """Logits (scaled, maximum 0) with what min-p, then top-k, then top-p removes set to -inf.

    min-p keeps ids of at least min_p times the top probability; top-k those with fewer than k ids
    above them; top-p those with less than p of the remaining mass above them. Equal logits share
    their fate, so no rule depends on the order of ids.
    """
    mass = torch.exp(scaled_RV)
    if draw.guess_J is not None:
        best, one = torch.zeros_like(draw.temperature_R), torch.ones_like(draw.temperature_R)
        floor = guessed_floor(best, draw._replace(temperature_R=one), lambda t: _sums_above(scaled_RV, mass, t))
        return torch.where(scaled_RV >= floor[:, None], scaled_RV, float("-inf"))
    assert draw.top_k_R is not None
    assert draw.top_p_R is not None
    assert draw.min_p_R is not None
    mass = torch.where(mass >= draw.min_p_R[:, None], mass, 0.0)
    distance = scaled_RV.abs()
    k = torch.where(draw.top_k_R > 0, draw.top_k_R, float("inf"))
    last = _last_kept(ops, distance, (mass > 0).float(), k)
    mass = torch.where(distance <= last[:, None], mass, 0.0)
    bound = torch.where(draw.top_p_R < 1, draw.top_p_R * mass.sum(-1), float("inf"))
    last = _last_kept(ops, distance, mass, bound)
    return torch.where((distance <= last[:, None]) & (mass > 0), scaled_RV, float("-inf"))


def _last_kept(ops: Ops, distance_RV: Tensor, weights_RV: Tensor, bound_R: Tensor) -> Tensor:
    """(R,) the largest distance below which there is less weight than the bound.

    The bits of the distance are found from the top, eight of its exponent by products with powers of two and those of
    its mantissa by sums, all of them exact. No distance of two logits lies between 0 and the smallest one here.
    """

    def further(candidate_R: Tensor, distance_R: Tensor) -> Tensor:
        nearer = torch.where(distance_RV < candidate_R[:, None], weights_RV, 0.0).sum(-1)
        return torch.where(nearer < bound_R, candidate_R, distance_R)

    def add(range_: State) -> State:
        distance, step = range_
        return further(distance + step, distance), step * 0.5

    distance = torch.full_like(bound_R, _SMALLEST)
    # 2^128 is no fp32 number
    for factors in ((2.0**64, 2.0**64), *((2.0 ** (1 << bit),) for bit in range(6, -1, -1))):
        candidate = distance
        for factor in factors:
            candidate = candidate * factor
        distance = further(candidate, distance)
    return ops.repeat(_MANTISSA_BITS, add, (distance, distance * 0.5))[0]


def guessed_floor(best_R: Tensor, draw: Draw, sums: Sums) -> Tensor:
    """(R,) the logit from which on a draft's ids are kept: that of the exact filters or a little below it.

    The filters are tried at the steps, then at as many numbers between the last one that they keep and the next.
    """
    assert draw.guess_J is not None
    assert draw.top_k_R is not None
    assert draw.top_p_R is not None
    assert draw.min_p_R is not None
    heat, best_R1 = draw.heat_R, best_R[:, None]
    top_k_R1 = torch.where(draw.top_k_R > 0, draw.top_k_R, float("inf"))[:, None]
    tried_RJ = best_R1 - heat[:, None] * draw.guess_J
    count_RJ, mass_RJ = sums(tried_RJ)
    mass_R1 = _mass_of_top_k(count_RJ, mass_RJ, top_k_R1)
    bound_R1 = torch.where(draw.top_p_R[:, None] < 1, draw.top_p_R[:, None] * mass_R1, float("inf"))
    kept_RJ = (count_RJ < top_k_R1) & (mass_RJ < bound_R1)
    kept_R1 = torch.where(kept_RJ, tried_RJ, best_R1).amin(-1, keepdim=True)
    removed_R1 = torch.where(kept_RJ, tried_RJ[:, -1:], tried_RJ).amax(-1, keepdim=True)
    parts_J = torch.arange(1, len(GUESSED_STEPS) + 1, device=best_R.device).float() / len(GUESSED_STEPS)
    tried_RJ = kept_R1 - (kept_R1 - removed_R1) * parts_J
    count_RJ, mass_RJ = sums(tried_RJ)
    kept_RJ = (count_RJ < top_k_R1) & (mass_RJ < bound_R1)
    floor = torch.where(kept_RJ, removed_R1, tried_RJ).amax(-1)
    # NxDI's greedy
    floor = torch.where(draw.top_k_R == 1, best_R, floor)
    of_min_p = (best_R + heat * torch.log(draw.min_p_R)).clamp(min=_LOWEST)
    return torch.minimum(torch.maximum(floor, of_min_p), best_R)


def _mass_of_top_k(count_RJ: Tensor, mass_RJ: Tensor, top_k_R1: Tensor) -> Tensor:
    """(R, 1) the mass that top-k leaves: that above the last tried number, and a share of what the next one adds."""
    inside_RJ = count_RJ < top_k_R1
    count_R1, mass_R1 = (torch.where(inside_RJ, t, 0.0).amax(-1, keepdim=True) for t in (count_RJ, mass_RJ))
    next_count_R1, next_mass_R1 = (
        torch.where(inside_RJ, t[:, -1:], t).amin(-1, keepdim=True) for t in (count_RJ, mass_RJ)
    )
    share_R1 = (top_k_R1 - count_R1) / (next_count_R1 - count_R1).clamp(min=1)
    return mass_R1 + share_R1.clamp(max=1) * (next_mass_R1 - mass_R1)


def _sums_above(scaled_RV: Tensor, mass_RV: Tensor, tried_RJ: Tensor) -> tuple[Tensor, Tensor]:
    above_RJV = scaled_RV[:, None] > tried_RJ[:, :, None]
    return above_RJV.float().sum(-1), torch.where(above_RJV, mass_RV[:, None], 0.0).sum(-1)
