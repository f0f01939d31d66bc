"""The logit from which on a row's ids are kept by min-p, top-k and top-p: a search that needs sums alone.

The bits of fp32 numbers, read as integers whose order is the numbers', are found four at a time from the top: each
pass asks for the weight above fifteen thresholds. Weights come from a callable, of this rank's ids; ranks exchange
sums, and no logit leaves its shard. Definitions: docs/sampling.md.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from model.ops import Ops
from model.sampling import Sampling
from nki_kernels.limits import NO_FLOOR

_BITS, _THRESHOLDS = 4, 15
# of one call over several ranks: the rows' best logits, the passes of two searches, the mass between them
ALL_GATHERS = 1 + 2 * (32 // _BITS) + 1
# keys of the lowest and the highest finite number
_LOWEST_KEY, _HIGHEST_KEY = -0x7F800000, 0x7F7FFFFF
_SIGN = -(1 << 31)

# (logits (R, V), scale, bias, floor (R,), thresholds (R, J)) -> (R, J): the sums of weights_above
Weigh = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def filter_floor(ops: Ops, logits_RV: Tensor, sampling: Sampling, weigh: Weigh) -> Tensor:
    """(R,) fp32: the smallest kept logit of each row, or the lowest number for a row without filters."""
    temperature = torch.where(sampling.temperature_R > 0, sampling.temperature_R, 1.0)
    best = best_logit(ops, logits_RV)
    none, forever = torch.zeros_like(best), torch.full_like(best, float("inf"))
    floor = (best + temperature * torch.log(sampling.min_p_R)).clamp(min=NO_FLOOR)
    top_k = torch.where(sampling.top_k_R > 0, sampling.top_k_R, forever)
    kept = _smallest_kept(ops, logits_RV, (none, none, floor), top_k, weigh)
    floor = torch.maximum(floor, kept)
    probability = (1 / temperature, -best / temperature, floor)
    mass = over_ranks(ops, weigh(logits_RV, *probability, torch.full_like(best, NO_FLOOR)[:, None]))[:, 0]
    top_p = torch.where(sampling.top_p_R < 1, sampling.top_p_R * mass, forever)
    return torch.maximum(floor, _smallest_kept(ops, logits_RV, probability, top_p, weigh))


def best_logit(ops: Ops, logits_RV: Tensor) -> Tensor:
    """(R,) each row's best logit over all ranks."""
    return ops.all_gather(logits_RV.float().amax(-1, keepdim=True)).amax(-1)


def over_ranks(ops: Ops, sums_RJ: Tensor) -> Tensor:
    """(R, J) the ranks' sums added up.

    Ranks are added by halves: an all-reduce promises no order, which might hang on the number of rows, and every
    rank must come to the same bits.
    """
    parts_RMJ = ops.all_gather(sums_RJ).unflatten(-1, (-1, sums_RJ.shape[1]))
    while parts_RMJ.shape[1] > 1:
        lower, upper = parts_RMJ.chunk(2, 1)
        parts_RMJ = lower + upper
    return parts_RMJ[:, 0]


def _smallest_kept(
    ops: Ops, logits_RV: Tensor, weights: tuple[Tensor, Tensor, Tensor], bound_R: Tensor, weigh: Weigh
) -> Tensor:
    """(R,) the smallest number above which there is less weight than the bound."""
    found = torch.zeros_like(bound_R, dtype=torch.int32)
    digits = torch.arange(1, _THRESHOLDS + 1, dtype=torch.int32, device=bound_R.device)
    for shift in range(32 - _BITS, -1, -_BITS):
        candidates_RJ = found[:, None] | (digits << shift)
        # a candidate is passed if even the number before it has too much weight above
        before = _number(ops, candidates_RJ - 1)
        passed = over_ranks(ops, weigh(logits_RV, *weights, before)) >= bound_R[:, None]
        found = found | (passed.sum(-1).to(torch.int32) << shift)
    return _number(ops, found)


def _number(ops: Ops, code: Tensor) -> Tensor:
    """The finite fp32 number that stands at a place of the order, counted in 32 unsigned bits."""
    key = (code ^ _SIGN).clamp(_LOWEST_KEY, _HIGHEST_KEY)
    return ops.number(torch.where(key < 0, key ^ 0x7FFFFFFF, key))
