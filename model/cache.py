"""The KV cache of a fixed size, and where a pass writes and reads its rows in it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from model.draft_config import DraftConfig
from model.ops import Ops, iota
from model.parallel import Parallel


class Cache(NamedTuple):
    """Keys and values of one layer on one rank, each (B, G, S, D) in the reference's layout."""

    k: Tensor
    v: Tensor


class Paths(NamedTuple):
    """A tree's J paths from the input id to a leaf, int32: the L rows of each, and where each of N rows is in these.

    Each path is a sequence of its own, path j of sequence b with cache b J + j: a candidate's key is at its position,
    in the tiles in which a chain has it, so a row's sums have a chain's bits.
    """

    rows_JL: Tensor
    places_N: Tensor


class Placement(NamedTuple):
    """Where the rows of a pass are.

    Row n of sequence b is written at absolute position `positions_BN[b, n]` of its cache slot and
    attends the keys of that slot whose position, listed in `keys_S`, is not greater. Slots are
    `slots_B`, or sequence b's own slot b when None. Where the cache holds slice `slice_1` of the positions
    (`model/sequence.py`), `keys_S` are that slice's and row n is written at its place `places_BN[b, n]`, if
    that is not negative.
    """

    positions_BN: Tensor
    keys_S: Tensor
    slots_B: Tensor | None = None
    places_BN: Tensor | None = None
    slice_1: Tensor | None = None
    paths: Paths | None = None

    def by_path(self, x_BNF: Tensor) -> Tensor:
        """(B J, L, F): the rows as attention has them, those of each path; all as they are without paths."""
        if self.paths is None:
            return x_BNF
        rows_JL = self.paths.rows_JL
        return x_BNF.index_select(1, rows_JL.flatten()).unflatten(1, rows_JL.shape).flatten(0, 1)

    def by_row(self, x_PLF: Tensor) -> Tensor:
        """(B, N, F): the inverse of `by_path`."""
        if self.paths is None:
            return x_PLF
        together_BRF = x_PLF.unflatten(0, (-1, self.paths.rows_JL.shape[0])).flatten(1, 2)
        return together_BRF.index_select(1, self.paths.places_N)

    def of_paths(self) -> Placement:
        """Where the rows of the paths are, each path's as a chain's."""
        if self.paths is None:
            return self
        count, length = self.paths.rows_JL.shape
        places_BL = self.positions_BN[:, :1] + iota(length, self.positions_BN)
        return self._replace(positions_BN=places_BL.repeat_interleave(count, 0), paths=None)


class Layout(NamedTuple):
    """How a backing of the kernels keeps a cache of S positions.

    Keys (B, G, S, D) as the values, or transposed to (B, G, D, S); `margin` slots more, for rows past the last
    position, where nothing reads them.
    """

    transposed_keys: bool = False
    margin: int = 0

    def length(self, cache: Cache) -> int:
        """Positions that a cache on one rank can hold."""
        return cache.v.shape[2] - self.margin


PLAIN = Layout()
Shape = tuple[int, int, int, int]


def cache_shapes(
    config: DraftConfig, parallel: Parallel, batch: int, length: int, layout: Layout = PLAIN
) -> tuple[Shape, Shape]:
    """The shapes of one key and one value cache on one rank."""
    heads, dim = parallel.heads(config).kv_per_rank, config.head_dim
    slots = length // parallel.slices(config) + layout.margin
    values = (batch, heads, slots, dim)
    return ((batch, heads, dim, slots) if layout.transposed_keys else values), values


class Copies(NamedTuple):
    """The caches of each sequence, one for each of the `paths` of the build's tree, which hold the same between passes.

    Slot b has caches b J to b J + J - 1, in a backing's layout.
    """

    paths: int = 1
    layout: Layout = PLAIN

    def one(self, slots_B: Tensor) -> Tensor:
        """(B,) a cache of each slot."""
        return slots_B * self.paths

    def alike(self, ops: Ops, cache: Cache, slots_B: Tensor, source_B: Tensor, places_BL: Tensor) -> Cache:
        """The cache where each copy of a slot holds at these places what copy `source` of it does."""
        if self.paths == 1:
            return cache
        slots_P = (self.one(slots_B)[:, None] + iota(self.paths, slots_B)).flatten()
        places_PL = places_BL.repeat_interleave(self.paths, 0)
        inside_BL, from_B1 = places_BL.clamp(max=cache.v.shape[2] - 1), (self.one(slots_B) + source_B)[:, None]
        parts = []
        for x, axis in zip(cache, (3 if self.layout.transposed_keys else 2, 2), strict=True):
            places: Any = (from_B1, *(slice(None),) * (axis - 1), inside_BL)
            rows_BLGD = x[places]
            rows_PGLD = rows_BLGD.transpose(1, 2).repeat_interleave(self.paths, 0)
            parts.append(ops.append(x, rows_PGLD, slots_P, places_PL, axis))
        return Cache(*parts)


ONE_CACHE = Copies()


def empty_caches(
    config: DraftConfig, parallel: Parallel, batch: int, length: int, dtype: torch.dtype, layout: Layout = PLAIN
) -> list[Cache]:
    """Zeroed caches, one per layer."""
    shapes = cache_shapes(config, parallel, batch, length, layout)
    return [Cache(*(torch.zeros(s, dtype=dtype) for s in shapes)) for _ in range(config.num_hidden_layers)]
