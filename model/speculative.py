"""The fused speculative step: draft k tokens, verify k + 1 rows, emit the target's samples.

Draft and target sample with the same noise at the same position. A draft is accepted if it equals the target's sample,
so every emitted token is the target's and the output does not depend on the drafter (Daliri, Musco, Suresh, arXiv
2408.07978). Shapes: B sequences, k drafts, N = k + 1 rows per sequence, S rows of a prefill chunk, V ids.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.approx_filters import approximate
from model.cache import AttentionMetadata, Cache
from model.drafter import MIN_TARGET_ROWS, Drafter, DraftState, PrefillChunk, StepRows, VerifyResult
from model.graph_io import Outputs, StepInputs, StepOutputs
from model.logprobs import logprobs, prompt_logprobs
from model.ops import gather_rows, iota
from model.qwen3 import Qwen3
from model.sampling import SamplingParams, ShardArgmax


class Pair(nn.Module):
    """A target and its drafter, compiled into one graph."""

    def __init__(self, target: Qwen3, drafter: Drafter) -> None:
        super().__init__()
        self.target_model, self.draft_model, self.drafter = target, drafter.model, drafter
        target.taps = drafter.taps

    def forward(self, function: Callable[..., Outputs], *args: Any) -> Outputs:
        """Calls `function(self, *args)`, because `torch.func.functional_call` can only call `forward`."""
        return function(self, *args)

    def step(
        self, k: int, inputs: StepInputs, params: SamplingParams, state: DraftState, caches: list[Cache]
    ) -> StepOutputs:
        """One step of all sequences: draft k tokens, verify N = k + 1 rows, emit 1 to N ids per sequence."""
        target, draft, rows = self.target_model, self.draft_model, StepRows.of(k, inputs.positions, inputs.block_table)
        noise_BNV = draft_noise_BNV = target.noise(params.seed_R2, rows.sample_positions_BN)
        if draft is not None and draft.shard.width != target.shard.width:
            draft_noise_BNV = draft.noise(params.seed_R2, rows.sample_positions_BN)
        ids_BN, state = self.drafter.propose(rows, inputs.input_ids, approximate(params), draft_noise_BNV, state)
        return self.verify(rows, ids_BN, inputs.k_limits, params, noise_BNV, state, caches)

    def verify(
        self, rows: StepRows, ids_BN: Tensor, max_accepted_B: Tensor, params: SamplingParams, noise_BNV: Tensor,
        state: DraftState, caches: list[Cache],
    ) -> StepOutputs:  # fmt: skip
        """Runs the target on the input ids and drafts, samples after each row, and accepts drafts."""
        target = self.target_model
        x_BNE, caches, taps_BNF = target.hidden(rows.pad(ids_BN), caches, rows.meta)
        logits_BNV, params = target.logits(x_BNE)[:, : rows.k + 1], params.with_drafts(ids_BN)
        samples = target.sample(logits_BNV, params, noise_BNV)
        accepted_BN, count_B1, next_B1 = target.ctx.accept(ids_BN[:, 1:], samples, max_accepted_B)
        state = self.drafter.update(VerifyResult(rows, ids_BN, count_B1, next_B1, taps_BNF), state)
        next_positions_B = (rows.meta.positions_BN[:, :1] + count_B1)[:, 0]
        logprobs_BNC = self._logprobs(logits_BNV, samples, params)
        return StepOutputs(accepted_BN, next_B1, next_positions_B, logprobs_BNC, state, caches)

    def prefill(
        self, k: int, inputs: StepInputs, params: SamplingParams, state: DraftState, caches: list[Cache],
        prompt_scores: bool = False,
    ) -> StepOutputs:  # fmt: skip
        """Prefills a chunk of one prompt in target and draft. The sampled token is only meaningful for the last chunk.

        Log-probabilities are of the sampled token, or with `prompt_scores` of all rows (`prompt_logprobs`).
        """
        target, ids_1S, length_1 = self.target_model, inputs.input_ids, inputs.positions + inputs.num_tokens
        meta = AttentionMetadata(inputs.positions[:, None] + iota(ids_1S.shape[1], length_1), inputs.block_table)
        x_1SE, caches, taps_1SF = target.hidden(ids_1S, caches, meta)
        # repeat the last row: a GEMM of one row may sum in a different order
        last_1N = (inputs.num_tokens - 1)[:, None].expand(-1, MIN_TARGET_ROWS)
        logits_11V = target.logits(gather_rows(x_1SE, last_1N))[:, :1]
        samples = target.sample(logits_11V, params, target.noise(params.seed_R2, length_1[:, None]))
        token_11, next_11 = samples.token_ids(), inputs.next_prompt_id[:, None]
        next_11 = torch.where(next_11 < 0, token_11, next_11)
        chunk = PrefillChunk(ids_1S, meta, inputs.num_tokens, next_11, taps_1SF, inputs.slots)
        state = self.drafter.prefill(chunk, state)
        scores = self._logprobs(logits_11V, samples, params)
        if scores is not None and prompt_scores:
            scores = prompt_logprobs(target, chunk, inputs.next_prompt_id, x_1SE, scores[0])
        return StepOutputs(F.pad(token_11, (0, k), value=-1), token_11, length_1, scores, state, caches)

    def _logprobs(self, logits_BNV: Tensor, samples: ShardArgmax, params: SamplingParams) -> Tensor | None:
        """(B, N, C) log-probabilities of the sampled ids; None in a graph without logits processors."""
        if params.processors is None:
            return None
        rows_RV, ids_BN = params.processors.visible(logits_BNV).flatten(0, 1), samples.token_ids()
        target = self.target_model
        return logprobs(target.ctx, rows_RV, ids_BN.flatten(), target.shard).unflatten(0, ids_BN.shape)
