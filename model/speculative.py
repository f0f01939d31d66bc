"""The fused speculative step: draft k tokens, verify k + 1 rows, emit the target's own draws.

Drafter-invariant speculative decoding (Daliri, Musco, Suresh, arXiv 2408.07978). The outputs keep
the order of NxDI's fused graphs: accepted ids, next id, next mask, next position, caches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from model.cache import Cache, Rows
from model.graph_io import StepInputs, StepOutputs
from model.ops import Ops
from model.qwen3 import Qwen3
from model.sampling import Draws, Sampling

# a matrix product of one row may be summed in another order than one of several rows
MIN_TARGET_ROWS = 2


class Pair(nn.Module):
    """A target and its draft, built on the same operations; without a draft, the target alone."""

    def __init__(self, target: Qwen3, draft: Qwen3 | None, ops: Ops) -> None:
        super().__init__()
        self.target_model, self.draft_model, self.ops = target, draft, ops

    def forward(self, stage: Callable[..., StepOutputs], *args: Any) -> StepOutputs:
        """Run a stage, `Pair.step` or `Pair.prefill`, on this pair's weights."""
        return stage(self, *args)

    def step(self, k: int, inputs: StepInputs, draft_caches: list[Cache], target_caches: list[Cache]) -> StepOutputs:
        """One step of every sequence: k drafts, N = k + 1 verified rows, 1 .. N emitted ids."""
        position_B1, keys_S = inputs.position_ids, _iota(inputs.attention_mask.shape[1], inputs.position_ids)
        padding = max(0, MIN_TARGET_ROWS - k - 1)
        rows = Rows(position_B1 + _iota(k + 1 + padding, position_B1), keys_S)
        kernels = self.target_model.kernels
        sampling, drafting = self._prepared(inputs.sampling, rows.positions_BN + 1)
        candidates_BN, draft_caches = self._draft(k, inputs, drafting, keys_S, draft_caches)
        rows_BN = torch.nn.functional.pad(candidates_BN, (0, padding))
        draws, target_caches = self.ops.call(self.target_model, rows_BN, target_caches, rows, sampling)
        draws = Draws(*(t[..., : k + 1] for t in draws))
        # the last position that a token may take is S - 1: what lies beyond is not emitted
        room_B = self.target_model.length(target_caches) - 2 - position_B1[:, 0]
        limit_B = torch.minimum(inputs.k_limits, room_B).clamp(min=0)
        accepted_BN, count_B1, next_ids = kernels.accept(self.ops, candidates_BN[:, 1:], draws, limit_B)
        next_pos = position_B1 + count_B1
        next_mask = (keys_S < next_pos).to(torch.int32)
        return StepOutputs(accepted_BN, next_ids, next_mask, next_pos, draft_caches, target_caches)

    def _prepared(self, sampling: Sampling, positions_BN: Tensor) -> tuple[Sampling, Sampling]:
        """What the target and the draft draw with at a step's positions: the same where their shards are."""
        target, draft = self.target_model, self.draft_model
        prepared = target.kernels.prepare(self.ops, sampling, positions_BN, target.shard)
        if draft is None or draft.shard.width == target.shard.width:
            return prepared, prepared
        return prepared, draft.kernels.prepare(self.ops, sampling, positions_BN, draft.shard)

    def _draft(
        self, k: int, inputs: StepInputs, sampling: Sampling, keys_S: Tensor, caches: list[Cache]
    ) -> tuple[Tensor, list[Cache]]:
        """The input id and k drafts, from k chained passes; one more pass completes the cache."""
        candidates = [inputs.input_ids]
        if k == 0 or self.draft_model is None:
            return candidates[0], caches
        # a draft of other groups: its own operations, so that no trace of the target's is called for it
        ops = self.draft_model.parallel.ops
        rows = Rows(inputs.position_ids, keys_S)
        for i in range(k):
            draws, caches = ops.call(self.draft_model, candidates[-1], caches, rows, sampling.at(i))
            candidates.append(draws.merged())
            rows = rows._replace(positions_BN=rows.positions_BN + 1)
        _, caches = self.draft_model.hidden(candidates[-1], caches, rows)
        return torch.cat(candidates, 1), caches

    def prefill(self, k: int, inputs: StepInputs, draft_caches: list[Cache], target_caches: list[Cache]) -> StepOutputs:
        """A prompt of one sequence into its slot of both caches, and its first token."""
        length_B = inputs.attention_mask.sum(-1).to(torch.int32)
        keys_S = _iota(inputs.attention_mask.shape[1], length_B)
        rows = Rows(keys_S[None], keys_S, inputs.seq_ids)
        x_BSE, target_caches = self.target_model.hidden(inputs.input_ids, target_caches, rows)
        last_BE = x_BSE[_iota(1, length_B), length_B - 1]
        logits_BV = self.target_model.logits(last_BE)
        kernels = self.target_model.kernels
        sampling = kernels.prepare(self.ops, inputs.sampling, length_B[:, None], self.target_model.shard)
        token_B1 = kernels.coupled_sample(self.ops, logits_BV, sampling, length_B).merged()[:, None]
        if self.draft_model is not None:
            _, draft_caches = self.draft_model.hidden(inputs.input_ids, draft_caches, rows)
        accepted_BN = torch.where(_iota(k + 1, length_B) == 0, token_B1, -1)
        next_pos = length_B[:, None]
        next_mask = (_iota(self.target_model.length(target_caches), length_B) < next_pos).to(torch.int32)
        return StepOutputs(accepted_BN, token_B1, next_mask, next_pos, draft_caches, target_caches)


def _iota(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, dtype=torch.int32, device=like.device)
