"""The one seam to the kernels: each operation of the step that a Trainium kernel serves, by one name.

`Kernels` is the reference in torch, the definition that every backing must equal; `model/nki/kernels.py` has the
same signatures and launches NKI kernels, served by nkisim or by the device.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from model import attention, sampling, scores
from model.cache import AttentionMetadata, Cache
from model.ops import Ops
from model.parallel import Shard
from model.sampling import Draw, Draws, Sampling


class Kernels:
    """The reference: torch alone."""

    def verify_attention(
        self, ops: Ops, q_BHND: Tensor, new: tuple[Tensor, Tensor], cache: Cache, meta: AttentionMetadata
    ) -> tuple[Tensor, Cache]:
        """See `model.attention.verify_attention`."""
        return attention.verify_attention(ops, q_BHND, new, cache, meta)

    def append(self, ops: Ops, new: tuple[Tensor, Tensor], cache: Cache, meta: AttentionMetadata) -> Cache:
        """The cache with rows that attend nothing: keys and values (B, G, N, D) at their places."""
        return attention.append(ops, new, cache, meta)

    def prepare(self, ops: Ops, asked: Sampling, positions_BN: Tensor, shard: Shard) -> Draw:
        """The draw of the tokens at these positions: the noise of the shard's ids, and the requests about them."""
        draw, of_rows = asked.draw(positions_BN), None
        if asked.asks is not None:
            join = functools.partial(self.join, ops)
            of_rows = asked.asks.of_rows(shard, len(draw.position_R), join)
        return draw._replace(noise_RV=self._noise(ops, draw, shard), asked=of_rows)

    def _noise(self, ops: Ops, draw: Draw, shard: Shard) -> Tensor:
        if shard.ids_V is not None:
            return ops.shared(_gumbel_of, draw.seed_R2, draw.position_R, shard.ids_V)
        return ops.shared(_gumbel, draw.seed_R2, draw.position_R, width=shard.width)

    def coupled_sample(self, ops: Ops, logits_RV: Tensor, draw: Draw) -> Draws:
        """See `model.sampling.coupled_sample`; `draw` comes from `prepare`."""
        ids_R = sampling.coupled_sample(ops, logits_RV, draw)
        return Draws(torch.zeros_like(ids_R, dtype=torch.float32)[None], ids_R[None])

    def scored_sample(self, ops: Ops, logits_RV: Tensor, draw: Draw) -> tuple[Draws, Tensor | None]:
        """The same, and in an asking graph the scores (R, C) of the drawn ids."""
        draws = self.coupled_sample(ops, logits_RV, draw)
        if draw.asked is None:
            return draws, None
        return draws, self.scores(ops, draw.asked.shown(logits_RV), draws.merged(), draw.asked.ids_V)

    def scores(self, ops: Ops, logits_RV: Tensor, own_R: Tensor, ids_V: Tensor) -> Tensor:
        """See `model.scores.scores`."""
        return scores.scores(ops, logits_RV, own_R, ids_V, functools.partial(self.join, ops))

    def join(self, ops: Ops, x_RC: Tensor) -> Tensor:
        """The numbers of all ranks that hold a part of the logits, side by side: here every rank has all logits."""
        return x_RC

    def accept(self, ops: Ops, drafts_BK: Tensor, draws: Draws, limit_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `model.sampling.accept`; the target's draws (M, B, N)."""
        return sampling.accept(drafts_BK, draws.merged(), limit_B)


def _gumbel(ops: Ops, seed_R2: Tensor, position_R: Tensor, width: int) -> Tensor:
    return sampling.gumbel(seed_R2, position_R, width)


def _gumbel_of(ops: Ops, seed_R2: Tensor, position_R: Tensor, ids_V: Tensor) -> Tensor:
    return sampling.gumbel_of(seed_R2, position_R, ids_V)
