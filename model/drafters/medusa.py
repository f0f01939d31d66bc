"""Medusa: one head a draft, all of them on the target's last hidden state; no draft sees the others.

Cai et al., "Medusa: simple LLM inference acceleration framework with multiple decoding heads" (arXiv 2401.10774);
vLLM (vllm/model_executor/models/medusa.py) has the names. Head i, residual layers x + silu(W x) and a projection to the
vocabulary, predicts the id i + 1 places after the input id, from the state of the row before it: the last row of the
target that was kept. So there is no cache and no pass of layers, and a step reads each head's weights once.

W is cut by rows: each rank computes whole outputs of its own, and one all-gather a layer brings those of all heads
together: no sum crosses ranks. A copy of W on every rank would need no collective, and tp times the bytes of HBM, of
which a step of few rows is made: at the 32B's width 52 MB a head and layer, not 1.6 MB at tp 32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.backing import Backing
from model.draft_config import MedusaConfig
from model.drafters import Drafter, DraftState, Prompt, Verified, in_slot, rows_of
from model.parallel import ONE_RANK, ColumnLinear, Head, Parallel
from model.qwen3 import REFERENCE
from model.rank_model import RankModel
from model.sampling import Draw
from model.window import Window


class Block(nn.Module):
    """The residual layers of one head."""

    def __init__(self, config: MedusaConfig, tp: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.layers = nn.ModuleList(ColumnLinear(size, size // tp) for _ in range(config.layers))

    def forward(self, x_BE: Tensor, layer: int) -> Tensor:
        """(B, E / tp) W x of one of the layers: this rank's outputs."""
        outputs: Tensor = self.layers[layer](x_BE)
        return outputs


class MedusaHeads(RankModel):
    """The heads of one rank; they have a projection each, or share the first."""

    config: MedusaConfig

    def __init__(self, config: MedusaConfig, parallel: Parallel = ONE_RANK, backing: Backing = REFERENCE) -> None:
        super().__init__(config, parallel, backing)
        size, of_head = config.hidden_size, parallel.of_head
        self.blocks = nn.ModuleList(Block(config, parallel.tp) for _ in range(config.heads))
        count = 1 if config.shared_head else config.heads
        # gathered for all heads at once, if at all
        heads = (Head(size, config.vocab_size // of_head.tp, of_head.ops, sharded=True) for _ in range(count))
        self.lm_heads = nn.ModuleList(heads)

    def logits(self, last_B1E: Tensor, k: int) -> Tensor:
        """(B, k, V) fp32 logits of the first k heads, of this rank's ids alone if the kernels draw from shards."""
        ops, x_BkE = self.parallel.ops, last_B1E.expand(-1, k, -1)
        for layer in range(self.config.layers):
            x_BkE = x_BkE + F.silu(ops.all_gather(_each(self.blocks[:k], x_BkE, layer)))
        logits = self.lm_heads[0](x_BkE) if self.config.shared_head else _each(self.lm_heads[:k], x_BkE)
        return logits if self.backing.sharded else self.head_ops.all_gather(logits)


def _each(modules: nn.ModuleList, x_BkE: Tensor, *more: int) -> Tensor:
    """(B, k, F): of each head's row what its own module makes of it."""
    return torch.stack([module(x_BkE[:, i], *more) for i, module in enumerate(modules)], 1)


class Medusa(Drafter):
    """Heads that remember one state (B, 1, E): the normed one of the target's last kept row."""

    model: MedusaHeads

    def __init__(self, model: MedusaHeads, target_layers: int) -> None:
        self.model, self.taps = model, (target_layers,)

    def propose(self, window: Window, ids_BT: Tensor, draw: Draw, state: DraftState) -> tuple[Tensor, DraftState]:
        model = self.model
        logits_BkV = model.logits(state.kept[0], window.k)
        # a step has at least two rows to draw, of which these are the first
        of_drafts = draw.first(window.k, window.placement.positions_BN.shape[1])
        draws = model.kernels.coupled_sample(model.head_ops, logits_BkV.flatten(0, 1), of_drafts)
        return window.candidates(ids_BT, draws.ranked().unflatten(1, (-1, window.k))), state

    def keep(self, verified: Verified, state: DraftState) -> DraftState:
        assert verified.features_BNF is not None
        return state._replace(kept=(rows_of(verified.features_BNF, verified.count_B1 - 1),))

    def prompt(self, prompt: Prompt, state: DraftState) -> DraftState:
        slot_1, (before_B1E,) = prompt.placement.slots_B, state.kept
        assert slot_1 is not None
        assert prompt.features_1SF is not None
        last_11E = rows_of(prompt.features_1SF, prompt.length_1[:, None] - 1)
        return state._replace(kept=(in_slot(before_B1E, last_11E, slot_1),))
