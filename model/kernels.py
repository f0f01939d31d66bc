"""The one seam to the kernels: each operation of the step that a Trainium kernel serves, by one name.

`Kernels` is the reference in torch, the definition that every backing must equal; `model/nki/kernels.py` has the
same signatures and launches NKI kernels, served by nkisim or by the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model import attention, sampling, sequence
from model.cache import Cache, Placement
from model.ops import Ops
from model.parallel import Shard
from model.sampling import Draw, Draws, Sampling


class Kernels:
    """The reference: torch alone."""

    def verify_attention(
        self, ops: Ops, q_BHND: Tensor, new: tuple[Tensor, Tensor], cache: Cache, placement: Placement
    ) -> tuple[Tensor, Cache]:
        """See `model.attention.verify_attention`, and `model.sequence` for a cache that holds a slice."""
        if placement.slice_1 is not None:
            return sequence.verify_attention(ops, q_BHND, new, cache, placement)
        return attention.verify_attention(ops, q_BHND, new, cache, placement)

    def prepare(self, ops: Ops, asked: Sampling, positions_BN: Tensor, shard: Shard) -> Draw:
        """What the tokens at these positions are drawn with, the noise of the shard's ids among it."""
        draw = asked.draw(positions_BN)
        return draw._replace(noise_RV=sampling.gumbel(draw.seed_R2, draw.position_R, shard.width))

    def coupled_sample(self, ops: Ops, logits_RV: Tensor, draw: Draw) -> Draws:
        """See `model.sampling.coupled_sample`; `draw` comes from `prepare`."""
        ids_R = sampling.coupled_sample(ops, logits_RV, draw)
        return Draws(torch.zeros_like(ids_R, dtype=torch.float32)[None], ids_R[None])

    def accept(self, ops: Ops, drafts_BK: Tensor, draws: Draws, limit_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `model.sampling.accept`; the target's draws (M, B, N)."""
        return sampling.accept(drafts_BK, draws.merged(), limit_B)
