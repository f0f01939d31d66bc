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
from model.sampling import Draw, Draws, Join, Sampling, allowed_ids


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
        """The draw of the tokens at these positions: the noise of the shard's ids, and those that a mask allows."""
        draw = asked.draw(positions_BN)
        allowed_RV = None
        if asked.allowed is not None:
            allowed_RV = allowed_ids(asked.allowed, shard, len(draw.position_R))
        return draw._replace(noise_RV=self._noise(draw, shard), allowed_RV=allowed_RV)

    def _noise(self, draw: Draw, shard: Shard) -> Tensor:
        if shard.ids_V is not None:
            return sampling.gumbel_of(draw.seed_R2, draw.position_R, shard.ids_V)
        return sampling.gumbel(draw.seed_R2, draw.position_R, shard.width)

    def coupled_sample(self, ops: Ops, logits_RV: Tensor, draw: Draw) -> Draws:
        """See `model.sampling.coupled_sample`; `draw` comes from `prepare`."""
        ids_R = sampling.coupled_sample(ops, logits_RV, draw)
        return Draws(torch.zeros_like(ids_R, dtype=torch.float32)[None], ids_R[None])

    def scored_sample(self, ops: Ops, logits_RV: Tensor, draw: Draw) -> tuple[Draws, Tensor | None]:
        """The same, and in a graph that takes masks `model.sampling.scores` of the drawn ids, (2, R)."""
        draws = self.coupled_sample(ops, logits_RV, draw)
        if draw.allowed_RV is None:
            return draws, None
        ids_V = torch.arange(logits_RV.shape[1], dtype=torch.int32, device=logits_RV.device)
        if draw.start_11 is not None:
            ids_V = ids_V + draw.start_11[0]
        own_RV = ids_V == draws.merged()[:, None]
        return draws, sampling.scores(sampling.only_allowed(logits_RV, draw), own_RV, *self.joins(ops))

    def joins(self, ops: Ops) -> tuple[Join, Join]:
        """The largest of numbers of several ranks, and their sum: every rank has all logits here."""
        return _same, _same

    def accept(self, ops: Ops, drafts_BK: Tensor, draws: Draws, limit_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `model.sampling.accept`; the target's draws (M, B, N)."""
        return sampling.accept(drafts_BK, draws.merged(), limit_B)


def _same(x: Tensor) -> Tensor:
    return x
