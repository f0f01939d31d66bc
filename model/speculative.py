"""The fused speculative step: k drafts, verify k + 1 rows, emit the target's own draws.

Drafter-invariant speculative decoding (Daliri, Musco, Suresh, arXiv 2408.07978).
Shapes: B sequences, k drafts, N = k + 1 candidate rows of a sequence, S rows of a prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from model.asks import ids_of
from model.cache import AttentionMetadata, Cache
from model.drafters import Drafter, DraftState, Prompt, Verified
from model.graph_io import Outputs, StepInputs, StepOutputs
from model.ops import Ops, State, iota, rows_of
from model.qwen3 import Qwen3
from model.sampling import Draw, Sampling
from model.scores import blocks
from model.window import MIN_TARGET_ROWS, Window


class Pair(nn.Module):
    """A target and its drafter, built on the same operations."""

    def __init__(self, target: Qwen3, drafter: Drafter, ops: Ops) -> None:
        super().__init__()
        self.target_model, self.draft_model, self.drafter, self.ops = target, drafter.model, drafter, ops

    def forward(self, stage: Callable[..., Outputs], *args: Any) -> Outputs:
        """Run a stage; `torch.func.functional_call`, which puts a graph's weights here, calls `forward` alone."""
        return stage(self, *args)

    def step(
        self, k: int, inputs: StepInputs, sampling: Sampling, state: DraftState, caches: list[Cache]
    ) -> StepOutputs:
        """One step of every sequence: k drafts, N = k + 1 verified rows, 1 to N emitted ids.

        Drafter and target draw with the same noise at the same position. A draft is accepted while the two draws are
        equal; each emitted id is the target's own draw. So the text is the target's, whatever the drafter.
        """
        window = Window.of(k, inputs.positions, inputs.block_table)
        target = self.target_model
        draw = target.kernels.prepare(self.ops, sampling, window.drawn_BN, target.shard)
        of_draft = self.drafter.draw(self.ops, sampling, window, draw, target.shard)
        candidates_BN, state = self.drafter.propose(window, inputs.input_ids, of_draft, state)
        return self.verify(window, candidates_BN, draw, inputs.k_limits, state, caches)

    def verify(
        self,
        window: Window,
        candidates_BN: Tensor,
        draw: Draw,
        k_limits_B: Tensor,
        state: DraftState,
        caches: list[Cache],
    ) -> StepOutputs:
        """The target's pass over the candidates, its draws, and the ids that it keeps."""
        target = self.target_model
        passed = target.hidden(window.padded(candidates_BN), caches, window.meta)
        draws, scores_RC = target.drawn(passed.x_BNE, draw)
        accepted_BN, count_B1, next_B1 = target.kernels.accept(
            self.ops, candidates_BN[:, 1:], draws.each(window.cut), k_limits_B
        )
        state = self.drafter.keep(Verified(window, candidates_BN, count_B1, next_B1, passed.taps_BNF), state)
        next_positions_B = window.meta.positions_BN[:, 0] + count_B1[:, 0]
        scores = None if scores_RC is None else window.cut(scores_RC.T).permute(1, 2, 0)
        return StepOutputs(accepted_BN, next_B1, next_positions_B, state, passed.caches, scores)

    def prefill(
        self, k: int, inputs: StepInputs, sampling: Sampling, state: DraftState, caches: list[Cache]
    ) -> StepOutputs:
        """Rows of one sequence's prompt into both models' state, and the token after them.

        The token is only meaningful for the last chunk.
        """
        target, count_1 = self.target_model, inputs.num_tokens
        length_1 = inputs.positions + count_1
        positions_1S = inputs.positions[:, None] + iota(inputs.input_ids.shape[1], length_1)
        meta = AttentionMetadata(positions_1S, inputs.block_table)
        # as many times as a step has rows at least: its draw after the same ids is the same one
        last_1N = (count_1 - 1)[:, None].expand(-1, MIN_TARGET_ROWS)
        # the token's position is the number of known ids
        sampled_1N = length_1[:, None].expand(-1, MIN_TARGET_ROWS)
        draw = target.kernels.prepare(self.ops, sampling, sampled_1N, target.shard)
        passed = target.hidden(inputs.input_ids, caches, meta)
        draws, scores_RC = target.drawn(rows_of(passed.x_BNE, last_1N), draw)
        token_11 = draws.merged()[:1, None]
        next_11 = torch.where(inputs.next_prompt_id[:, None] >= 0, inputs.next_prompt_id[:, None], token_11)
        prompt = Prompt(inputs.input_ids, meta, count_1, next_11, passed.taps_BNF, inputs.slots)
        state = self.drafter.prompt(prompt, state)
        accepted_1N = torch.where(iota(k + 1, length_1) == 0, token_11, -1)
        of_token = None if scores_RC is None else scores_RC[:1]
        scores = prompt_scores(target, prompt, inputs.next_prompt_id, passed.x_BNE, of_token)
        return StepOutputs(accepted_1N, token_11, length_1, state, passed.caches, scores)


def prompt_scores(
    target: Qwen3, prompt: Prompt, next_prompt_id_1: Tensor, x_1SE: Tensor, last_1C: Tensor | None
) -> Tensor | None:
    """(1, S, C): row i of a prompt's rows has the scores of id i + 1, the last one those of the id after them.

    Those are `last_1C` where the id is drawn, `next_prompt_id` below 0. `x_1SE` are the target's
    hidden rows. Rows past the last are ignored. None without `last_1C`.
    """
    if last_1C is None:
        return None
    ops, kernels, rows = target.head_ops, target.kernels, prompt.ids_1S.shape[1]
    block, length_1 = -(-rows // blocks(rows)), prompt.length_1
    last_S = iota(rows, length_1) == length_1 - 1
    next_S = torch.where(last_S, prompt.token_11[0], prompt.ids_1S.roll(-1, 1).squeeze(0))
    ids_V = ids_of(target.shard)

    def fill(state: State) -> State:
        first_1, found_SC = state
        index_R = (first_1 + iota(block, first_1)).clamp(max=rows - 1)
        logits_RV = target.logits(x_1SE.index_select(1, index_R)).squeeze(0)
        scored_RC = kernels.scores(ops, logits_RV, next_S.index_select(0, index_R), ids_V)
        return first_1 + block, found_SC.index_put((index_R,), scored_RC)

    start = torch.zeros_like(length_1), torch.zeros_like(last_1C).expand(rows, -1)
    found_SC = ops.repeat(blocks(rows), fill, start)[1]
    drawn_S = last_S & (next_prompt_id_1 < 0)
    return torch.where(drawn_S[:, None], last_1C, found_SC)[None]
