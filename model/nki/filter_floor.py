"""Exact cutoff of min-p, top-k and top-p over sharded logits: a radix search over sums.

The cutoff is an fp32 number, searched as an integer with the same order, 4 bits per pass from the top: each pass sums
the weights above 15 thresholds with the kernel `weights_above`. Ranks exchange sums; logits stay on their shards.
docs/sampling.md has the definitions.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from model.filters import Filters
from model.ops import Ops, add_halves, shift_left, shift_right
from nki_kernels.limits import NO_FLOOR

_BITS, _THRESHOLDS = 4, 15
# keys of the lowest and the highest finite fp32 number
_LOWEST_KEY, _HIGHEST_KEY = -0x7F800000, 0x7F7FFFFF
_SIGN = -(1 << 31)

# the kernel weights_above: (logits (R, V), scale, bias, floor (R,), thresholds (R, J)) -> sums (R, J)
Weigh = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
# all-gather: (R, J) of this rank -> (R, ranks * J)
Gather = Callable[[Tensor], Tensor]


def filter_floor(ops: Ops, rank_11: Tensor, logits_RV: Tensor, params: tuple[Tensor, Filters], weigh: Weigh) -> Tensor:
    """(R,) fp32 cutoff: a row samples ids whose logit is at least this; NO_FLOOR for rows without filters.

    `params`: temperature and filters. The cutoff is at most the row's best logit, whatever the rounding of masses.
    """
    temperature, filters = params
    gather = functools.partial(ops.all_gather, rank_11=rank_11)
    best = best_logit(gather, logits_RV)
    zero, infinity = torch.zeros_like(best), torch.full_like(best, float("inf"))
    floor = (best + temperature * torch.log(filters.min_p_R)).clamp(min=NO_FLOOR)
    top_k = torch.where(filters.top_k_R > 0, filters.top_k_R, infinity)
    # a weight is exp(scale * logit + bias): 1 to count ids
    floor = torch.maximum(floor, _cutoff(gather, logits_RV, (zero, zero, floor), top_k, weigh))
    probability = (1 / temperature, -best / temperature, floor)
    mass = sum_over_ranks(gather, weigh(logits_RV, *probability, torch.full_like(best, NO_FLOOR)[:, None]))[:, 0]
    top_p = torch.where(filters.top_p_R < 1, filters.top_p_R * mass, infinity)
    floor = torch.maximum(floor, _cutoff(gather, logits_RV, probability, top_p, weigh))
    return torch.minimum(floor, best)


def count_and_mass(
    gather: Gather, logits_RV: Tensor, params: tuple[Tensor, Tensor], weigh: Weigh, tried_RJ: Tensor
) -> tuple[Tensor, Tensor]:
    """(R, J) each: the number of ids above each threshold and their mass, in one launch of 2 R rows.

    `params`: 1 / temperature and the best logit.
    """
    inverse, best = params
    zero, rows = torch.zeros_like(best), logits_RV.shape[0]
    scale, bias = torch.cat((zero, inverse)), torch.cat((zero, -best * inverse))
    twice, floor = torch.cat((logits_RV, logits_RV)), torch.full_like(scale, NO_FLOOR)
    sums = sum_over_ranks(gather, weigh(twice, scale, bias, floor, torch.cat((tried_RJ, tried_RJ))))
    return sums[:rows], sums[rows:]


def best_logit(gather: Gather, logits_RV: Tensor) -> Tensor:
    """(R,) the largest logit over all ranks."""
    return gather(logits_RV.float().amax(-1, keepdim=True)).amax(-1)


def sum_over_ranks(gather: Gather, sums_RJ: Tensor) -> Tensor:
    """(R, J) the sum over all ranks, added by halves: an all-reduce's order may depend on the number of rows."""
    return add_halves(gather(sums_RJ).unflatten(-1, (-1, sums_RJ.shape[1])), 1)[:, 0]


def _cutoff(
    gather: Gather, logits_RV: Tensor, weights: tuple[Tensor, Tensor, Tensor], bound_R: Tensor, weigh: Weigh
) -> Tensor:
    """(R,) the smallest number for which the ids above it weigh less than `bound_R`."""
    prefix = torch.zeros_like(bound_R, dtype=torch.int32)
    for shift in range(32 - _BITS, -1, -_BITS):
        # as int32: the highest bit is the sign
        digits = [((digit << shift) + (1 << 31)) % (1 << 32) - (1 << 31) for digit in range(1, _THRESHOLDS + 1)]
        candidates_RJ = prefix[:, None] | torch.tensor(digits, dtype=torch.int32, device=prefix.device)
        # the cutoff is at least a candidate if the number before it still has too much weight above
        before = _number(candidates_RJ - 1)
        passed = sum_over_ranks(gather, weigh(logits_RV, *weights, before)) >= bound_R[:, None]
        prefix = prefix | shift_left(passed.sum(-1).to(torch.int32), shift)
    return _number(prefix)


def _number(code: Tensor) -> Tensor:
    """The finite fp32 number with this 32-bit unsigned rank in ascending order, given as int32.

    A graph has no bit cast: the exponent is applied by exact multiplications with powers of two. Subnormals are 0.
    """
    key = (code ^ _SIGN).clamp(_LOWEST_KEY, _HIGHEST_KEY)
    # the order of negative numbers is reversed
    bits = torch.where(key < 0, -1 - key, key)
    size = (1 + (bits & 0x7FFFFF).float() * 2.0**-23) * 2.0**-126
    exponent = shift_right(bits, 23)
    # 2^128 is not an fp32 number: apply the highest bit as two factors
    for bit, factor in ((7, 2.0**64), (7, 2.0**64), *((b, 2.0 ** (1 << b)) for b in range(6, -1, -1))):
        size = torch.where((shift_right(exponent - 1, bit) & 1) > 0, size * factor, size)
    size = torch.where(exponent > 0, size, 0.0)
    return torch.where(key < 0, -size, size)
