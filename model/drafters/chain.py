"""A chain: a smaller model drafts one id after the other, as it would write."""

from __future__ import annotations

import torch
from torch import Tensor

from model.drafters import Drafter, DraftState, Prompt
from model.qwen3 import Qwen3
from model.sampling import Draw
from model.window import Window


class Chain(Drafter):
    """k passes of one row each; one more pass completes the cache."""

    model: Qwen3

    def __init__(self, model: Qwen3) -> None:
        self.model = model

    def propose(self, window: Window, ids_BT: Tensor, draw: Draw, state: DraftState) -> tuple[Tensor, DraftState]:
        candidates, caches = [ids_BT], state.caches
        # a draft of other groups: its own operations, so that no trace of the target's is called for it
        ops = self.model.parallel.ops
        for n in range(window.k):
            draws, caches, _ = ops.call(self.model, candidates[-1], caches, *window.row(n, draw))
            candidates.append(draws.merged())
        last, _ = window.row(window.k, draw)
        _, caches = self.model.hidden(candidates[-1], caches, last)
        return torch.cat(candidates, 1), DraftState(caches)

    def prompt(self, prompt: Prompt, state: DraftState) -> DraftState:
        _, caches = self.model.hidden(prompt.ids_1S, state.caches, prompt.placement)
        return DraftState(caches)
