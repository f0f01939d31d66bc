"""The rows of a step: where the input id and its candidates are, alone in a pass or all together."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from model.cache import ONE_CACHE, Cache, Copies, Paths, Placement
from model.kernels import Kernels
from model.ops import Ops, first_argmax, iota
from model.sampling import Draw, Draws
from model.tree import Tree

# a matrix product of one row may be summed in another order than one of several rows
MIN_TARGET_ROWS = 2


class Walk(NamedTuple):
    """What a step keeps: the emitted ids, padded with -1, their count and the last of them; and the rows (B, k + 1) of
    the candidates before them, the kept ones first, on path `path` of a tree. None are the first k + 1 rows."""

    accepted_BL: Tensor
    count_B1: Tensor
    next_B1: Tensor
    rows_BL: Tensor | None = None
    path_B: Tensor | None = None

    def of(self, x_BN: Tensor) -> Tensor:
        """(B, k + 1, ...): what belongs to these rows."""
        if self.rows_BL is None:
            return x_BN.narrow(1, 0, self.accepted_BL.shape[1])
        return x_BN[iota(len(x_BN), x_BN)[:, None], self.rows_BL]


class Window(NamedTuple):
    """The rows of a step: the input id at its position and k drafts after it, over the keys of the bucket.

    What a platform asks for is dealt with here: the target's pass has at least MIN_TARGET_ROWS rows, those beyond
    the drafts are cut off again, and no draft is accepted that would go beyond the context's end.
    """

    k: int
    placement: Placement
    tree: Tree | None = None
    # caches of each sequence in the target's pass
    copies: Copies = ONE_CACHE

    @classmethod
    def of(
        cls, k: int, position_B1: Tensor, bucket: int, tree: Tree | None = None, copies: Copies = ONE_CACHE
    ) -> Window:
        """The window of a step from these positions on, in a bucket of so many keys."""
        keys_S = iota(bucket, position_B1)
        rows_N = iota(max(k + 1, MIN_TARGET_ROWS), position_B1)
        return (TreeWindow if tree else Window)(k, Placement(position_B1 + rows_N, keys_S), tree, copies)

    def row(self, n: int, draw: Draw) -> tuple[Placement, Draw]:
        """Where row n of each sequence is, alone in a pass of the draft, and what it draws with."""
        positions_BN = self.placement.positions_BN
        return self.placement._replace(positions_BN=positions_BN[:, n : n + 1]), draw.row(n, positions_BN.shape[1])

    def candidates(self, ids_B1: Tensor, drafts_CBk: Tensor) -> Tensor:
        """(B, N) the ids of the step's rows: the input id and, of a position's drafts, the best."""
        return torch.cat((ids_B1, drafts_CBk[0]), 1)

    def target_rows(self) -> Placement:
        """Where the rows of the target's pass are: in each of a sequence's caches, if there are several."""
        if self.copies.paths == 1:
            return self.placement
        rows_N = iota(self.placement.positions_BN.shape[1], self.placement.positions_BN)
        return self.placement._replace(paths=Paths(rows_N.expand(self.copies.paths, -1), rows_N))

    def target_draw(self, draw: Draw) -> Draw:
        """What the rows of the target's pass draw with, from the draw of the window's positions."""
        return draw

    def padded(self, candidates_BN: Tensor) -> Tensor:
        """The ids of the target's pass."""
        return F.pad(candidates_BN, (0, max(0, MIN_TARGET_ROWS - self.k - 1)))

    def cut(self, draws: Draws) -> Draws:
        """The draws after the N rows of the step."""
        return draws.each(lambda t: t[..., : self.k + 1])

    def walk(self, kernels: Kernels, ops: Ops, candidates_BN: Tensor, draws: Draws, limit_B: Tensor) -> Walk:
        """From the input id on to the candidate that the target draws, at most `limit` times."""
        return Walk(*kernels.accept(ops, candidates_BN[:, 1:], draws, limit_B))

    def kept(self, ops: Ops, caches: list[Cache], walk: Walk) -> list[Cache]:
        """The target's caches after its pass, with the kept rows in all that a sequence has."""
        return caches

    def mask(self, next_pos_B1: Tensor) -> Tensor:
        """(B, S) the attention mask of the next step."""
        return (self.placement.keys_S < next_pos_B1).to(torch.int32)

    def limit(self, k_limits_B: Tensor, length: int) -> Tensor:
        """(B,) drafts that may be accepted: the last position that a token may take is length - 1."""
        room_B = length - 2 - self.placement.positions_BN[:, 0]
        return torch.minimum(k_limits_B, room_B).clamp(min=0)


class TreeWindow(Window):
    """A step whose candidates are a tree: several ids for a position, each behind its own text.

    The target draws after every row, with the noise of the row's position, and its own draws lead from the input id to
    a leaf or to a miss. Each path is accepted as a chain; those that share the rows of the longest keep the same ids.
    """

    __slots__ = ()

    def _constant(self, numbers: object) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self.placement.positions_BN.device)

    def candidates(self, ids_B1: Tensor, drafts_CBk: Tensor) -> Tensor:
        assert self.tree is not None
        # (B, 1 + C k): the input id, then all drafts of each rank
        all_BD = torch.cat((ids_B1, *drafts_CBk), 1)
        places = [rank * self.k + depth for rank, depth in zip(self.tree.ranks, self.tree.depths, strict=True)]
        return all_BD.index_select(1, self._constant(places))

    def target_rows(self) -> Placement:
        assert self.tree is not None
        position_B1, rows = self.placement.positions_BN[:, :1], self.tree.paths
        # a smaller tree than the build's has fewer paths: the first fills the other caches
        rows += rows[:1] * (self.copies.paths - len(rows))
        paths = Paths(self._constant(rows), self._constant(self.tree.places))
        return self.placement._replace(positions_BN=position_B1 + self._constant(self.tree.depths), paths=paths)

    def target_draw(self, draw: Draw) -> Draw:
        assert self.tree is not None
        return draw.rows(self._constant(self.tree.depths), self.k + 1)

    def padded(self, candidates_BN: Tensor) -> Tensor:
        return candidates_BN

    def cut(self, draws: Draws) -> Draws:
        return draws

    def walk(self, kernels: Kernels, ops: Ops, candidates_BN: Tensor, draws: Draws, limit_B: Tensor) -> Walk:
        assert self.tree is not None
        rows_JL, batch = self._constant(self.tree.paths), len(candidates_BN)

        def by_path(x: Tensor) -> Tensor:
            return x.index_select(-1, rows_JL.flatten()).unflatten(-1, rows_JL.shape).flatten(-3, -2)

        drafts_count = self._constant([len(branch) - 1 for branch in self.tree.branches])
        limit_P = torch.minimum(limit_B[:, None], drafts_count).flatten()
        accepted = kernels.accept(ops, by_path(candidates_BN)[:, 1:], draws.each(by_path), limit_P)
        best_B = first_argmax(accepted[1].unflatten(0, (batch, -1)).squeeze(-1))
        slots_B = iota(batch, best_B)
        accepted_BL, count_B1, next_B1 = (x.unflatten(0, (batch, -1))[slots_B, best_B] for x in accepted)
        return Walk(accepted_BL, count_B1, next_B1, rows_JL[best_B], best_B)

    def kept(self, ops: Ops, caches: list[Cache], walk: Walk) -> list[Cache]:
        assert walk.path_B is not None
        slots_B, places_BL = iota(len(walk.path_B), walk.path_B), self.placement.positions_BN
        return [self.copies.alike(ops, cache, slots_B, walk.path_B, places_BL) for cache in caches]
