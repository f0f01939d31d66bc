"""The rows of a step: the input id and k drafts after it, alone in a pass or all together."""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from model.cache import AttentionMetadata
from model.ops import iota
from model.sampling import Draw

# a matrix product of one row may be summed in a different order than one of several rows
MIN_TARGET_ROWS = 2


class Window(NamedTuple):
    """The rows of a step: the input id at its position and k drafts after it.

    The target's pass has at least MIN_TARGET_ROWS rows: `padded` adds what k lacks, `cut` takes it off again.
    """

    k: int
    meta: AttentionMetadata

    @classmethod
    def of(cls, k: int, positions_B: Tensor, table_BL: Tensor) -> Window:
        """The window of a step from these positions on."""
        rows_N = iota(max(k + 1, MIN_TARGET_ROWS), positions_B)
        return cls(k, AttentionMetadata(positions_B[:, None] + rows_N, table_BL))

    @property
    def drawn_BN(self) -> Tensor:
        """(B, N) the positions of the tokens that the rows draw."""
        return self.meta.positions_BN + 1

    def row(self, n: int, draw: Draw, drafts: list[Tensor]) -> tuple[AttentionMetadata, Draw]:
        """Where row n of each sequence is, alone in a pass of the draft, and its draw behind the drafts (B, 1)."""
        positions_BN = self.meta.positions_BN
        meta = self.meta._replace(positions_BN=positions_BN[:, n : n + 1])
        return meta, draw.row(n, positions_BN.shape[1]).after(drafts)

    def of_drafts(self, draw: Draw) -> Draw:
        """The draw of the k drafts, where one pass draws them all."""
        return draw.first(self.k, self.meta.positions_BN.shape[1])

    def padded(self, candidates_BN: Tensor) -> Tensor:
        """The ids of the target's pass."""
        return F.pad(candidates_BN, (0, max(0, MIN_TARGET_ROWS - self.k - 1)))

    def cut(self, x_XR: Tensor) -> Tensor:
        """(X, B, k + 1): the numbers of the step's rows, out of all rows of the target's pass."""
        return x_XR.unflatten(1, self.meta.positions_BN.shape)[..., : self.k + 1]
