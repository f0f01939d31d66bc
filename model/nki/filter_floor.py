"""The smallest logit of a row that min-p, top-k and top-p keep: a search that needs sums alone.

The bits of fp32 numbers, read as integers whose order is the numbers', are found four at a time from the top: each
pass computes the weight above fifteen thresholds. Weights come from a callable, of this rank's ids; ranks exchange
sums, and no logit leaves its shard. Definitions: docs/sampling.md.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from model.filters import Filters
from model.ops import Ops, add_halves, shift_left, shift_right
from nki_kernels.limits import NO_FLOOR

_BITS, _THRESHOLDS = 4, 15
# keys of the lowest and the highest finite number
_LOWEST_KEY, _HIGHEST_KEY = -0x7F800000, 0x7F7FFFFF
_SIGN = -(1 << 31)

# (logits (R, V), scale, bias, floor (R,), thresholds (R, J)) -> (R, J): the sums of weights_above
Weigh = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
# (R, J) of this rank -> (R, ranks * J) of all ranks
Gather = Callable[[Tensor], Tensor]


def filter_floor(ops: Ops, rank_11: Tensor, logits_RV: Tensor, by: tuple[Tensor, Filters], weigh: Weigh) -> Tensor:
    """(R,) fp32: each row's smallest kept logit, `by` its temperature and filters; without any, NO_FLOOR.

    It is never above the row's best logit, whatever the rounding of masses.
    """
    temperature, filters = by
    gather = functools.partial(ops.all_gather, rank_11=rank_11)
    best = best_logit(gather, logits_RV)
    none, forever = torch.zeros_like(best), torch.full_like(best, float("inf"))
    floor = (best + temperature * torch.log(filters.min_p_R)).clamp(min=NO_FLOOR)
    top_k = torch.where(filters.top_k_R > 0, filters.top_k_R, forever)
    floor = torch.maximum(floor, _smallest_kept(gather, logits_RV, (none, none, floor), top_k, weigh))
    probability = (1 / temperature, -best / temperature, floor)
    mass = over_ranks(gather, weigh(logits_RV, *probability, torch.full_like(best, NO_FLOOR)[:, None]))[:, 0]
    top_p = torch.where(filters.top_p_R < 1, filters.top_p_R * mass, forever)
    floor = torch.maximum(floor, _smallest_kept(gather, logits_RV, probability, top_p, weigh))
    return torch.minimum(floor, best)


def count_and_mass(
    gather: Gather, logits_RV: Tensor, by: tuple[Tensor, Tensor], weigh: Weigh, tried_RJ: Tensor
) -> tuple[Tensor, Tensor]:
    """(R, J) each: how many ids are above each number, and their mass, `by` 1 / T and the best logit: one launch."""
    inverse, best = by
    none, rows = torch.zeros_like(best), logits_RV.shape[0]
    scale, bias = torch.cat((none, inverse)), torch.cat((none, -best * inverse))
    twice, floor = torch.cat((logits_RV, logits_RV)), torch.full_like(scale, NO_FLOOR)
    sums = over_ranks(gather, weigh(twice, scale, bias, floor, torch.cat((tried_RJ, tried_RJ))))
    return sums[:rows], sums[rows:]


def best_logit(gather: Gather, logits_RV: Tensor) -> Tensor:
    """(R,) each row's best logit over all ranks."""
    return gather(logits_RV.float().amax(-1, keepdim=True)).amax(-1)


def over_ranks(gather: Gather, sums_RJ: Tensor) -> Tensor:
    """(R, J) the ranks' sums added up.

    Ranks are added by halves, with the same bits on each: the order of an all-reduce may depend on the number of rows.
    """
    return add_halves(gather(sums_RJ).unflatten(-1, (-1, sums_RJ.shape[1])), 1)[:, 0]


def _smallest_kept(
    gather: Gather, logits_RV: Tensor, weights: tuple[Tensor, Tensor, Tensor], bound_R: Tensor, weigh: Weigh
) -> Tensor:
    """(R,) the smallest number above which there is less weight than the bound."""
    found = torch.zeros_like(bound_R, dtype=torch.int32)
    for shift in range(32 - _BITS, -1, -_BITS):
        # as int32: the highest bit is the sign
        digits = [((digit << shift) + (1 << 31)) % (1 << 32) - (1 << 31) for digit in range(1, _THRESHOLDS + 1)]
        candidates_RJ = found[:, None] | torch.tensor(digits, dtype=torch.int32, device=found.device)
        # a candidate is passed if even the number before it has too much weight above
        before = _number(candidates_RJ - 1)
        passed = over_ranks(gather, weigh(logits_RV, *weights, before)) >= bound_R[:, None]
        found = found | shift_left(passed.sum(-1).to(torch.int32), shift)
    return _number(found)


def _number(code: Tensor) -> Tensor:
    """The finite fp32 number that has a place of the order, counted in 32 unsigned bits.

    Its 31 bits become a number by products with powers of two, which are exact; numbers below 2^-126 are 0.
    """
    key = (code ^ _SIGN).clamp(_LOWEST_KEY, _HIGHEST_KEY)
    # the bits below the sign are inverted in negative numbers
    bits = torch.where(key < 0, -1 - key, key)
    size = (1 + (bits & 0x7FFFFF).float() * 2.0**-23) * 2.0**-126
    exponent = shift_right(bits, 23)
    # 2^128 is no fp32 number: the highest bit is two factors
    for bit, factor in ((7, 2.0**64), (7, 2.0**64), *((b, 2.0 ** (1 << b)) for b in range(6, -1, -1))):
        size = torch.where((shift_right(exponent - 1, bit) & 1) > 0, size * factor, size)
    size = torch.where(exponent > 0, size, 0.0)
    return torch.where(key < 0, -size, size)
