"""The fused speculative step: k drafts, verify k + 1 rows, emit the target's own draws.

Drafter-invariant speculative decoding (Daliri, Musco, Suresh, arXiv 2408.07978). The outputs keep
the order of NxDI's fused graphs: accepted ids, next id, next mask, next position, state.
Shapes: B sequences, k drafts, N = k + 1 candidate rows of a sequence, S cache positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from model.cache import Cache, Placement
from model.drafters import Drafter, DraftState, Prompt, Verified
from model.graph_io import DraftOutputs, Outputs, StepInputs, StepOutputs
from model.ops import Ops, iota, rows_of
from model.qwen3 import Qwen3
from model.sampling import Draw, Sampling
from model.scores import prompt_scores
from model.window import MIN_TARGET_ROWS, Window


class Pair(nn.Module):
    """A target and its drafter, built on the same operations; a sequence's `length`, if caches have blocks."""

    def __init__(self, target: Qwen3, drafter: Drafter, ops: Ops, length: int = 0) -> None:
        super().__init__()
        self.most = length
        self.target_model, self.draft_model, self.drafter, self.ops = target, drafter.model, drafter, ops

    def forward(self, stage: Callable[..., Outputs], *args: Any) -> Outputs:
        """Run a stage; `torch.func.functional_call`, which puts a graph's weights here, calls `forward` alone."""
        return stage(self, *args)

    def length(self, caches: list[Cache]) -> int:
        """The most positions of a sequence."""
        return self.most or self.target_model.length(caches)

    def step(
        self, k: int, inputs: StepInputs, sampling: Sampling, state: DraftState, caches: list[Cache]
    ) -> StepOutputs:
        """One step of every sequence: k drafts, N = k + 1 verified rows, 1 to N emitted ids.

        Drafter and target draw with the same noise at the same position. A draft is accepted while the two draws are
        equal; each emitted id is the target's own draw. So the text is the target's, whatever the drafter.
        """
        window = Window.of(k, inputs.position_ids[:, :1], inputs.attention_mask.shape[1], inputs.block_table)
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
        passed = target.hidden(window.padded(candidates_BN), caches, window.placement)
        draws, scores_RC = target.drawn(passed.x_BNE, draw)
        limit_B = window.limit(k_limits_B, self.length(caches))
        accepted_BN, count_B1, next_B1 = target.kernels.accept(
            self.ops, candidates_BN[:, 1:], draws.each(window.cut), limit_B
        )
        state = self.drafter.keep(Verified(window, candidates_BN, count_B1, next_B1, passed.taps_BNF), state)
        next_pos = window.placement.positions_BN[:, :1] + count_B1
        next_mask = (window.placement.keys_S < next_pos).to(torch.int32)
        scores = None if scores_RC is None else window.cut(scores_RC.T).permute(1, 2, 0)
        return StepOutputs(accepted_BN, next_B1, next_mask, next_pos, state, passed.caches, scores)

    def prefill(
        self, k: int, inputs: StepInputs, sampling: Sampling, state: DraftState, caches: list[Cache]
    ) -> StepOutputs:
        """Rows of one sequence's prompt into both models' state, and the token after them.

        A host drops the token unless the prompt ends here. A drafter that is apart is not here (`fill`).
        """
        target, (placement, length_B, count_B) = self.target_model, _prompt_rows(inputs)
        # as many times as a step has rows at least: its draw after the same ids is the same one
        last_BN = (count_B - 1)[:, None].expand(-1, MIN_TARGET_ROWS)
        # the token's position is the number of known ids
        drawn_BN = length_B[:, None].expand(-1, MIN_TARGET_ROWS)
        draw = target.kernels.prepare(self.ops, sampling, drawn_BN, target.shard)
        # an asking graph scores all rows
        asking = draw.asked is not None
        passed = target.hidden(inputs.input_ids, caches, placement._replace(read_BN=None if asking else last_BN))
        draws, scores_RC = target.drawn(rows_of(passed.x_BNE, last_BN) if asking else passed.x_BNE, draw)
        token_B1 = draws.merged()[:1, None]
        following_B1 = token_B1
        if inputs.following is not None:
            following_B1 = torch.where(inputs.following >= 0, inputs.following, token_B1[:, 0])[:, None]
        prompt = Prompt(inputs.input_ids, placement, count_B, following_B1, passed.taps_BNF)
        state = self.drafter.prompt(prompt, state)
        accepted_BN = torch.where(iota(k + 1, length_B) == 0, token_B1, -1)
        next_pos = length_B[:, None]
        next_mask = (iota(self.length(passed.caches), length_B) < next_pos).to(torch.int32)
        of_token = None if scores_RC is None else scores_RC[:1]
        scores = prompt_scores(target, prompt, inputs.following, passed.x_BNE, of_token)
        return StepOutputs(accepted_BN, token_B1, next_mask, next_pos, state, passed.caches, scores)

    def fill(
        self, k: int, inputs: StepInputs, sampling: Sampling, state: DraftState, caches: list[Cache]
    ) -> DraftOutputs:
        """Rows of one sequence's prompt into the state of a drafter that reads nothing of the target there."""
        placement, _, count_B = _prompt_rows(inputs)
        prompt = Prompt(inputs.input_ids, placement, count_B, inputs.input_ids[:, :1], None)
        return DraftOutputs(rows_of(inputs.input_ids, count_B[:, None] - 1), self.drafter.prompt(prompt, state))


def _prompt_rows(inputs: StepInputs) -> tuple[Placement, Tensor, Tensor]:
    """Where a prompt's rows are, and (B,) how many positions are known with them and how many of them are no padding.

    They are at the position of the first one and on; of its keys and theirs as many are known as the mask says, and
    rows past these are padding.
    """
    length_B = inputs.attention_mask.sum(-1).to(torch.int32)
    first_B1, keys_S = inputs.position_ids[:, :1], iota(inputs.attention_mask.shape[1], length_B)
    positions_BN = first_B1 + iota(inputs.input_ids.shape[1], length_B)
    placement = Placement(positions_BN, keys_S, inputs.seq_ids, table_BL=inputs.block_table)
    return placement, length_B, length_B - first_B1[:, 0]
