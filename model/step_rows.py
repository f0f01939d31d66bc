"""The rows of a step: the input id and k drafts after it, one by one in a draft's passes or all in the target's."""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from model.cache import AttentionMetadata
from model.ops import iota

# a GEMM of one row may sum in a different order than one of several rows
MIN_TARGET_ROWS = 2


class StepRows(NamedTuple):
    """k + 1 rows of each sequence; the target's pass, and `meta`, have at least MIN_TARGET_ROWS."""

    k: int
    meta: AttentionMetadata

    @classmethod
    def of(cls, k: int, positions_B: Tensor, block_table_BL: Tensor) -> StepRows:
        """The rows of a step whose input ids are at these positions."""
        rows_N = iota(max(k + 1, MIN_TARGET_ROWS), positions_B)
        return cls(k, AttentionMetadata(positions_B[:, None] + rows_N, block_table_BL))

    @property
    def sample_positions_BN(self) -> Tensor:
        """The positions of the tokens that the k + 1 rows sample."""
        return self.meta.positions_BN[:, : self.k + 1] + 1

    def pad(self, ids_BN: Tensor) -> Tensor:
        """The ids of the target's pass."""
        return F.pad(ids_BN, (0, self.meta.positions_BN.shape[1] - self.k - 1))
