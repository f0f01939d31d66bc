"""The one seam to the kernels: each operation that a Trainium kernel serves, by one name.

`Kernels` is the reference in torch, the definition that every backing must equal; `model/nki/backing.py` has the
same signatures and launches NKI kernels, served by nkisim or by the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from model import attention, rejection, sampling, sequence
from model.cache import Cache, Layout, Rows
from model.config import Qwen3Config
from model.ops import Ops
from model.packing import Packing
from model.parallel import Shard
from model.rejection import Drafted
from model.sampling import Draws, Sampling


class Kernels:
    """The reference backing: torch alone."""

    layout = Layout()
    # whether logits stay on their ranks: a draw is then a merge of the shards' best
    sharded = False

    @staticmethod
    def packing(config: Qwen3Config, tp: int) -> Packing:
        """The weights that this backing wants packed."""
        return Packing()

    def halves(self, config: Qwen3Config, parallel: Any) -> tuple[Any, Any] | None:
        """The two halves of a layer on one rank, if this backing's differ from the plain ones."""
        return None

    def length(self, cache: Cache) -> int:
        """Positions that a cache can hold."""
        return cache.v.shape[2] - self.layout.margin

    def prepare(self, ops: Ops, drawn: Sampling, positions_BN: Tensor, shard: Shard) -> Sampling:
        """The parameters with what the draws at these positions of a step share: those from this shard alone."""
        return drawn

    def attention_half(self, ops: Ops, norm: Any, half: Any, x_BNE: Tensor, *rows: Any) -> tuple[Tensor, Cache]:
        """What a layer adds first: `half`, an Attention, of the normed rows; rows are angles, cache and Rows."""
        added, cache = half(norm(x_BNE), *rows)
        return added, cache

    def mlp_half(self, ops: Ops, norm: Any, half: Any, x_BNE: Tensor) -> Tensor:
        """What a layer adds then: `half`, an MLP, of the normed rows."""
        added: Tensor = half(norm(x_BNE))
        return added

    def verify_attention(
        self, ops: Ops, q_BHND: Tensor, new: tuple[Tensor, Tensor], cache: Cache, rows: Rows
    ) -> tuple[Tensor, Cache]:
        """See `model.attention.verify_attention`, and `model.sequence` for a cache that holds a slice."""
        if rows.slice_1 is not None:
            return sequence.verify_attention(ops, q_BHND, new, cache, rows)
        return attention.verify_attention(ops, q_BHND, new, cache, rows)

    def coupled_sample(self, ops: Ops, logits_RV: Tensor, drawn: Sampling, positions_R: Tensor) -> Draws:
        """See `model.sampling.coupled_sample`; `drawn` comes from `prepare`."""
        ids_R = sampling.coupled_sample(ops, logits_RV, drawn, positions_R)
        return Draws(torch.zeros_like(ids_R, dtype=torch.float32)[None], ids_R[None])

    def accept(self, ops: Ops, drafts_BK: Tensor, draws: Draws, limit_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `model.sampling.accept`; the target's draws (M, B, N)."""
        return sampling.accept(drafts_BK, draws.merged(), limit_B)

    def rejection_sample(
        self, ops: Ops, target_BNV: Tensor, drafted: Drafted, drawn: Sampling, positions_B1: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `model.rejection.rejection_sample`."""
        return rejection.rejection_sample(ops, target_BNV, drafted, drawn, positions_B1)


REFERENCE = Kernels()
