"""The rows of a step: where the input id and its k drafts are, alone in a pass or all together."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from model.cache import Placement
from model.ops import iota
from model.sampling import Draw, Draws

# a matrix product of one row may be summed in another order than one of several rows
MIN_TARGET_ROWS = 2


class Window(NamedTuple):
    """The rows of a step: the input id at its position and k drafts after it, over the keys of the bucket.

    What a platform asks for is dealt with here: the target's pass has at least MIN_TARGET_ROWS rows, those beyond
    the drafts are cut off again, and no draft is accepted that would go beyond the context's end.
    """

    k: int
    placement: Placement

    @classmethod
    def of(cls, k: int, position_B1: Tensor, bucket: int) -> Window:
        """The window of a step from these positions on, in a bucket of so many keys."""
        keys_S = iota(bucket, position_B1)
        rows_N = iota(max(k + 1, MIN_TARGET_ROWS), position_B1)
        return cls(k, Placement(position_B1 + rows_N, keys_S))

    def row(self, n: int, draw: Draw) -> tuple[Placement, Draw]:
        """Where row n of each sequence is, alone in a pass of the draft, and what it draws with."""
        positions_BN = self.placement.positions_BN
        return self.placement._replace(positions_BN=positions_BN[:, n : n + 1]), draw.row(n, positions_BN.shape[1])

    def padded(self, candidates_BN: Tensor) -> Tensor:
        """The ids of the target's pass."""
        return F.pad(candidates_BN, (0, max(0, MIN_TARGET_ROWS - self.k - 1)))

    def cut(self, draws: Draws) -> Draws:
        """The draws after the N rows of the step."""
        return draws.each(lambda t: t[..., : self.k + 1])

    def mask(self, next_pos_B1: Tensor) -> Tensor:
        """(B, S) the attention mask of the next step."""
        return (self.placement.keys_S < next_pos_B1).to(torch.int32)

    def limit(self, k_limits_B: Tensor, length: int) -> Tensor:
        """(B,) drafts that may be accepted: the last position that a token may take is length - 1."""
        room_B = length - 2 - self.placement.positions_BN[:, 0]
        return torch.minimum(k_limits_B, room_B).clamp(min=0)
