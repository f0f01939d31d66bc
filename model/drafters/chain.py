"""A chain: a smaller model drafts one id after the other, as it would write.

Its cache lacks the last draft's row when a step has kept every draft. So the first pass of a step begins one id
earlier: where that row was cached already it is written again with the same bits, and no pass is spent on it alone
(vLLM catches up in its first pass too, vllm/v1/spec_decode/llm_base_proposer.py; NxDI makes a pass more).
"""

from __future__ import annotations

import torch
from torch import Tensor

from model.drafters import Drafter, DraftState, Prompt, Verified, in_slot, rows_of
from model.ops import iota
from model.qwen3 import Qwen3
from model.sampling import Draw
from model.window import Window


class Chain(Drafter):
    """k passes: the first of two rows, the id before the input id and that; the others of one."""

    model: Qwen3

    def __init__(self, model: Qwen3) -> None:
        self.model = model

    def propose(self, window: Window, ids_BT: Tensor, draw: Draw, state: DraftState) -> tuple[Tensor, DraftState]:
        model, (before_B11,) = self.model, state.kept
        # a draft of other groups: its own operations, so that no trace of the target's is called for it
        ops, placement = model.parallel.ops, window.placement
        # a prompt has at least one id; a slot without a sequence is at position 0, and its rows are nobody's
        positions_B2 = (placement.positions_BN[:, :1] - 1).clamp(min=0) + iota(2, ids_BT)
        ids_B2 = torch.cat((before_B11.squeeze(-1), ids_BT), 1)
        x_B2E, caches = model.hidden(ids_B2, state.caches, placement._replace(positions_BN=positions_B2))
        _, of_first = window.row(0, draw)
        first = model.kernels.coupled_sample(model.head_ops, model.logits(x_B2E[:, 1]), of_first)
        drafts_CB1 = [first.ranked().unsqueeze(-1)]
        for n in range(1, window.k):
            draws, caches, _ = ops.call(model, drafts_CB1[-1][0], caches, *window.row(n, draw))
            drafts_CB1.append(draws.ranked())
        return window.candidates(ids_BT, torch.cat(drafts_CB1, -1)), DraftState(caches, state.kept)

    def keep(self, verified: Verified, state: DraftState) -> DraftState:
        return state._replace(kept=(rows_of(verified.candidates_BN.unsqueeze(-1), verified.count_B1 - 1),))

    def prompt(self, prompt: Prompt, state: DraftState) -> DraftState:
        _, caches = self.model.hidden(prompt.ids_1S, state.caches, prompt.placement)
        last_111 = rows_of(prompt.ids_1S.unsqueeze(-1), prompt.length_1[:, None] - 1)
        slot_1 = prompt.placement.slots_B
        assert slot_1 is not None
        return DraftState(caches, (in_slot(state.kept[0], last_111, slot_1),))
