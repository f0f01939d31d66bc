"""A chain: a smaller model drafts one id after the other, as it would write."""

from __future__ import annotations

import torch
from torch import Tensor

from model.drafters import Drafter, DraftState, Prompt, Verified
from model.qwen3 import Qwen3
from model.sampling import Draw
from model.window import Window


class Chain(Drafter):
    """k passes of one row each; one more pass completes the cache, in a tree once it is known what is kept."""

    model: Qwen3

    def __init__(self, model: Qwen3) -> None:
        self.model = model

    def propose(self, window: Window, ids_BT: Tensor, draw: Draw, state: DraftState) -> tuple[Tensor, DraftState]:
        drafts_CB1, last_B1, caches = list[Tensor](), ids_BT, state.caches
        # a draft of other groups: its own operations, so that no trace of the target's is called for it
        ops = self.model.parallel.ops
        for n in range(window.k):
            draws, caches, _ = ops.call(self.model, last_B1, caches, *window.row(n, draw))
            drafts_CB1.append(draws.ranked())
            last_B1 = drafts_CB1[-1][0]
        if window.tree is None:
            last, _ = window.row(window.k, draw)
            _, caches = self.model.hidden(last_B1, caches, last)
        return window.candidates(ids_BT, torch.cat(drafts_CB1, 2)), DraftState(caches)

    def keep(self, verified: Verified, state: DraftState) -> DraftState:
        if verified.window.tree is None:
            return state
        # the passes have written the best drafts, of which a tree may have kept others
        _, caches = self.model.hidden(verified.candidates_BN, state.caches, verified.window.placement)
        return DraftState(caches)

    def prompt(self, prompt: Prompt, state: DraftState) -> DraftState:
        _, caches = self.model.hidden(prompt.ids_1S, state.caches, prompt.placement)
        return DraftState(caches)
