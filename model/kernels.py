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
from model.sampling import Draws, Sampling


class Kernels:
    """The reference: torch alone."""

    def verify_attention(
        self, ops: Ops, q_BHND: Tensor, new: tuple[Tensor, Tensor], cache: Cache, placement: Placement
    ) -> tuple[Tensor, Cache]:
        """See `model.attention.verify_attention`, and `model.sequence` for a cache that holds a slice."""
        if placement.slice_1 is not None:
            return sequence.verify_attention(ops, q_BHND, new, cache, placement)
        return attention.verify_attention(ops, q_BHND, new, cache, placement)

    def prepare(self, ops: Ops, drawn: Sampling, positions_BN: Tensor, shard: Shard) -> Sampling:
        """The parameters with what the draws at these positions of a step share: the noise of the shard's ids."""
        positions_R, seeds_R2 = positions_BN.flatten(), drawn.seed_R2.repeat_interleave(positions_BN.shape[1], 0)
        noise = sampling.gumbel(seeds_R2, positions_R, shard.width)
        return drawn._replace(noise_BNV=noise.unflatten(0, positions_BN.shape))

    def coupled_sample(self, ops: Ops, logits_RV: Tensor, drawn: Sampling, positions_R: Tensor) -> Draws:
        """See `model.sampling.coupled_sample`; `drawn` comes from `prepare`."""
        ids_R = sampling.coupled_sample(ops, logits_RV, drawn, positions_R)
        return Draws(torch.zeros_like(ids_R, dtype=torch.float32)[None], ids_R[None])

    def accept(self, ops: Ops, drafts_BK: Tensor, draws: Draws, limit_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `model.sampling.accept`; the target's draws (M, B, N)."""
        return sampling.accept(drafts_BK, draws.merged(), limit_B)
