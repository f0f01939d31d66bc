"""Reference attention of a tree's rows: each sees the text before the step and the rows on its own path.

A row's sums must have their keys where a chain's have them, at their positions in tiles aligned to absolute position:
that is what keeps its bits. So the two tiles that a path can reach are copied for each path, its keys and values are
written over them at their positions, and the path is attended as a sequence of its own; the tiles before are shared by
all paths. Nothing is written to the cache: which rows the text keeps is known after the target's draws.

J paths of L = k + 1 rows, of which (B J) are sequences; W = 2 tiles of keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model.attention import KEY_TILE, append, in_order, masked_scores, tile_sums
from model.cache import Cache, Paths, Placement
from model.ops import Ops, iota

_TILES = 2


def verify_attention(
    ops: Ops, q_BHND: Tensor, new: tuple[Tensor, Tensor], cache: Cache, placement: Placement
) -> tuple[Tensor, Cache]:
    """As `model.attention.verify_attention`, of the rows of `placement.paths`; in place of the cache it returns the
    rows' keys and values, (B, G, N, D)."""
    paths = placement.paths
    assert paths is not None
    position_B1 = placement.positions_BN[:, :1]
    first_B1 = position_B1 // KEY_TILE * KEY_TILE
    near, places_PL = _near(ops, cache, new, placement, paths)
    heads, (count, length) = new[0].shape[1], paths.rows_JL.shape
    q_PGRD = _of_paths(q_BHND, paths).unflatten(1, (heads, -1)).flatten(2, 3)
    place_PR = places_PL[:, None].expand(-1, q_PGRD.shape[2] // length, -1).flatten(1)
    visible_PGRW = iota(_TILES * KEY_TILE, first_B1) <= place_PR[:, None, :, None]
    within_PGRW = masked_scores(q_PGRD, near.k, visible_PGRW)
    far = Cache(*(c[:, :, : placement.keys_S.shape[0]] for c in cache))
    before_BGRS = masked_scores(_together(q_PGRD, count), far.k, (placement.keys_S < first_B1)[:, None, None])
    best_PGR1 = torch.maximum(_apart(before_BGRS.amax(-1, keepdim=True), count), within_PGRW.amax(-1, keepdim=True))
    sums = in_order(*tile_sums(before_BGRS, _together(best_PGR1, count), far.v))
    out_PGRD, total_PGR1 = (_apart(x, count) for x in (sums[0], sums[1][..., None]))
    out_PGRD, total_PGR = in_order(*tile_sums(within_PGRW, best_PGR1, near.v), (out_PGRD, total_PGR1[..., 0]))
    o_PGRD = out_PGRD / total_PGR[..., None]
    o_BHPD = o_PGRD.reshape(-1, count, q_BHND.shape[1], length, q_BHND.shape[3]).transpose(1, 2).flatten(2, 3)
    return o_BHPD.index_select(2, paths.places_N).to(q_BHND.dtype), Cache(*new)


def write_kept(ops: Ops, cache: Cache, rows: Cache, nodes_BL: Tensor, positions_BL: Tensor) -> Cache:
    """The cache with the keys and values of a tree's rows `nodes` at these positions."""
    slots_B = iota(nodes_BL.shape[0], nodes_BL)
    kept = (x.transpose(1, 2)[slots_B[:, None], nodes_BL].transpose(1, 2) for x in rows)
    return Cache(*(ops.append(c, x, slots_B, positions_BL) for c, x in zip(cache, kept, strict=True)))


def _near(
    ops: Ops, cache: Cache, new: tuple[Tensor, Tensor], placement: Placement, paths: Paths
) -> tuple[Cache, Tensor]:
    """The tiles that a path can reach, with its keys and values, and the places (B J, L) of its rows there."""
    position_B1, (count, length) = placement.positions_BN[:, :1], paths.rows_JL.shape
    first_B1 = position_B1 // KEY_TILE * KEY_TILE
    slots_B1 = iota(position_B1.shape[0], position_B1)[:, None]
    # a place past the end is one that no row sees
    keys_BW = (first_B1 + iota(_TILES * KEY_TILE, first_B1)).clamp(max=cache.v.shape[2] - 1)
    places_PL = (position_B1 - first_B1 + iota(length, position_B1)).repeat_interleave(count, 0)
    tiles = Cache(*(c[slots_B1, :, keys_BW].transpose(1, 2).repeat_interleave(count, 0) for c in cache))
    of_paths = (_of_paths(new[0], paths), _of_paths(new[1], paths))
    return append(ops, of_paths, tiles, placement, places_PL), places_PL


def _of_paths(x_BHND: Tensor, paths: Paths) -> Tensor:
    """(B J, H, L, D): the rows of each path."""
    x_BHJLD = x_BHND.index_select(2, paths.rows_JL.flatten()).unflatten(2, paths.rows_JL.shape)
    return x_BHJLD.transpose(1, 2).flatten(0, 1)


def _together(x_PGRD: Tensor, count: int) -> Tensor:
    """(B, G, J R, D): the rows of a sequence's paths, one path after the other."""
    return x_PGRD.unflatten(0, (-1, count)).transpose(1, 2).flatten(2, 3)


def _apart(x_BGRD: Tensor, count: int) -> Tensor:
    """The inverse of `_together`."""
    return x_BGRD.unflatten(2, (count, -1)).transpose(1, 2).flatten(0, 1)
