"""The filters of sampling: the ids that min-p, top-k and top-p keep.

The definitions are those of docs/sampling.md; the search needs sums alone, neither a sort nor a number's bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from model.ops import Ops, State, ordered_sum

_SMALLEST = 2.0**-126
_MANTISSA_BITS = 23


class Filters(NamedTuple):
    """Each row's filters keep its top k ids (0: all), its top p of the mass, and ids above min_p of the best one's."""

    top_k_R: Tensor
    top_p_R: Tensor
    min_p_R: Tensor

    @property
    def active_R(self) -> Tensor:
        """(R,) whether any filter of a row is on."""
        return (self.top_k_R > 0) | (self.top_p_R < 1) | (self.min_p_R > 0)

    def each(self, change: Callable[[Tensor], Tensor]) -> Filters:
        """The same change of every filter."""
        return type(self)(*map(change, self))

    def kept(self, ops: Ops, below_RV: Tensor, heat_R: Tensor) -> Tensor:
        """(R, V) whether min-p, then top-k, then top-p keep an id, whose logit is `below` the best one, `heat` hot.

        min-p keeps ids of at least min_p times the top probability; top-k those with fewer than k ids
        above them; top-p those with less than p of the remaining mass above them. Equal logits are
        kept or removed together, so no rule depends on the order of ids. A distance of 0 is kept by comparison
        alone, whatever the rounding of masses.
        """
        mass = torch.exp(-below_RV / heat_R[:, None])
        kept = (mass >= self.min_p_R[:, None]) | (below_RV == 0)
        k = torch.where(self.top_k_R > 0, self.top_k_R, float("inf"))
        last = _last_kept(ops, below_RV, kept.float(), k)
        mass = torch.where(kept & (below_RV <= last[:, None]), mass, 0.0)
        bound = torch.where(self.top_p_R < 1, self.top_p_R * ordered_sum(mass), float("inf"))
        last = torch.minimum(last, _last_kept(ops, below_RV, mass, bound))
        return kept & (below_RV <= last[:, None])


def _last_kept(ops: Ops, distance_RV: Tensor, weights_RV: Tensor, bound_R: Tensor) -> Tensor:
    """(R,) the largest distance below which there is less weight than the bound.

    The bits of the distance are found from the top, eight of its exponent by products with powers of two and those of
    its mantissa by sums, all of them exact. No distance of two logits lies between 0 and the smallest one here.
    """

    def further(candidate_R: Tensor, distance_R: Tensor) -> Tensor:
        nearer = ordered_sum(torch.where(distance_RV < candidate_R[:, None], weights_RV, 0.0))
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
