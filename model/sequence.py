"""KV sharded over the sequence: each rank that shares a kv head holds a slice of its positions.

Position p is in tile t = p // 128. Of M slices slice t % M holds that tile, as its tile t // M, so that every one holds
1/M of a sequence of any length, up to a tile. A rank attends the queries of all M ranks over its slice:

part[m, r] = sum_s exp(score[r, s] - best[m, r]) v[s] / sum_s exp(score[r, s] - best[m, r]), s of slice m that r sees
lse[m, r]  = best[m, r] + log(sum_s exp(score[r, s] - best[m, r])), -inf where r sees nothing of slice m
out[r]     = sum_m w[m, r] part[m, r] / sum_m w[m, r],  w[m, r] = exp(lse[m, r] - max_m lse[m, r])

Slices are added in ascending order, and a slice that a row does not see adds an exact zero: a row's result depends on
its own position and the cache alone. J are the ranks that share the kv head, as many as slices. docs/artifacts.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model import attention
from model.attention import KEY_TILE
from model.cache import Cache, Placement
from model.ops import EAGER, Ops


def sliced(placement: Placement, slice_1: Tensor, slices: int) -> Placement:
    """The placement as a cache of slice `slice_1`, int32 (1,), of the positions takes them."""
    count = -(-placement.keys_S.shape[0] // (KEY_TILE * slices)) * KEY_TILE
    place_S = torch.arange(count, dtype=torch.int32, device=slice_1.device)
    keys_S = (place_S // KEY_TILE * slices + slice_1) * KEY_TILE + place_S % KEY_TILE
    tile_BN = placement.positions_BN // KEY_TILE
    places_BN = tile_BN // slices * KEY_TILE + placement.positions_BN % KEY_TILE
    places_BN = torch.where(tile_BN % slices == slice_1, places_BN, -1)
    return placement._replace(keys_S=keys_S, places_BN=places_BN, slice_1=slice_1)


def verify_attention(
    ops: Ops, q_BHND: Tensor, new: tuple[Tensor, Tensor], cache: Cache, placement: Placement
) -> tuple[Tensor, Cache]:
    """As `model.attention.verify_attention`, of one kv head whose slices the ranks of `ops` hold."""
    assert placement.places_BN is not None
    assert placement.slice_1 is not None
    cache = attention.append(ops, new, cache, placement, placement.places_BN)
    q_JBHND = _gather(ops, q_BHND)
    of_all = attended(q_JBHND.transpose(0, 1).flatten(1, 2), cache, placement, ops)
    # (M, B, J, H, N, D + 1): a rank keeps the parts of its own heads
    parts = _gather(ops, of_all.unflatten(1, (ops.ranks, -1)))
    own = parts.index_select(2, placement.slice_1)[:, :, 0]
    return merge(own).to(q_BHND.dtype), cache


def attended(q_BHND: Tensor, cache: Cache, placement: Placement, ops: Ops = EAGER) -> Tensor:
    """(B, H, N, D + 1) fp32: attention over this slice, and its log-sum-exp as the last column."""
    out, total_BGR, best_BGR = attention.weighted(q_BHND, cache, placement, ops)
    # avoid log(0): devices disagree about it
    total = torch.where(total_BGR > 0, total_BGR, 1.0)
    part, lse = out / total[..., None], best_BGR + torch.log(total)
    return torch.cat((part, lse[..., None]), -1).reshape(*q_BHND.shape[:3], -1)


def merge(parts: Tensor) -> Tensor:
    """(..., D) fp32: attention over the union of the slices, from (M, ..., D + 1) of `attended`."""
    lse = parts[..., -1:]
    weights, values = torch.exp(lse - lse.amax(0)), parts[..., :-1]
    out, total = weights[0] * values[0], weights[0]
    for m in range(1, parts.shape[0]):
        out, total = out + weights[m] * values[m], total + weights[m]
    return out / total


def _gather(ops: Ops, x: Tensor) -> Tensor:
    """The group's x stacked along a new first axis."""
    return ops.all_gather(x.flatten()).unflatten(0, (ops.ranks, *x.shape))
