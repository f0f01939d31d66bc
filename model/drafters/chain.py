"""A chain: a smaller model drafts one id after the other, as it would write.

Its cache lacks the last draft's row when a step has kept every draft. So the first pass of a step begins one id
earlier: where that row was cached already it is written again with the same bits, and no pass is spent on it alone
(vLLM catches up in its first pass too, vllm/v1/spec_decode/llm_base_proposer.py; NxDI makes an extra pass).
"""

from __future__ import annotations

import torch
from torch import Tensor

from model.config import Qwen3Config, config_from_dict
from model.drafters import Drafter, DraftState, Prompt, Verified, in_slot
from model.drafters.kind import Counts, DraftModel, DraftPass, Kept, Kind, decoder_collectives
from model.graph_key import GraphKey
from model.ops import iota, rows_of
from model.parallel import Parallel
from model.qwen3 import Qwen3
from model.sampling import Draw
from model.weights import decoder_packing, decoder_weights
from model.window import Window


class Chain(Drafter):
    """k passes: the first has two rows, the id before the input id and the input id; the others have one."""

    model: Qwen3

    def __init__(self, model: Qwen3) -> None:
        self.model = model

    def propose(self, window: Window, ids_BT: Tensor, draw: Draw, state: DraftState) -> tuple[Tensor, DraftState]:
        model, (before_B11,) = self.model, state.kept
        ops, meta = model.parallel.ops, window.meta
        # a prompt has at least one id; a slot without a sequence is at position 0, and its rows are ignored
        positions_B2 = (meta.positions_BN[:, :1] - 1).clamp(min=0) + iota(2, ids_BT)
        ids_B2 = torch.cat((before_B11.squeeze(-1), ids_BT), 1)
        passed = model.hidden(ids_B2, state.caches, meta._replace(positions_BN=positions_B2))
        _, of_first = window.row(0, draw, [])
        draws = model.kernels.coupled_sample(model.head_ops, model.logits(passed.x_BNE[:, 1]), of_first)
        drafts_B1 = [draws.merged()[:, None]]
        for n in range(1, window.k):
            draws, passed = ops.call(model, drafts_B1[-1], passed.caches, *window.row(n, draw, drafts_B1))
            drafts_B1.append(draws.merged()[:, None])
        return torch.cat((ids_BT, *drafts_B1), 1), DraftState(passed.caches, state.kept)

    def keep(self, verified: Verified, state: DraftState) -> DraftState:
        return state._replace(kept=(rows_of(verified.candidates_BN.unsqueeze(-1), verified.count_B1 - 1),))

    def prompt(self, prompt: Prompt, state: DraftState) -> DraftState:
        caches = self.model.hidden(prompt.ids_1S, state.caches, prompt.meta).caches
        last_111 = rows_of(prompt.ids_1S.unsqueeze(-1), prompt.length_1[:, None] - 1)
        return DraftState(caches, (in_slot(state.kept[0], last_111, prompt.slot_1),))


def _collectives(config: Qwen3Config, parallel: Parallel, passes: tuple[DraftPass, ...]) -> Counts:
    """The collectives of a decoder's passes."""
    return decoder_collectives(config, parallel, len(passes))


def _stored_as(config: Qwen3Config, name: str) -> str:
    """A tied head may be stored twice."""
    return "" if config.tie_word_embeddings and name == "lm_head.weight" else name


def _unread(key: GraphKey, name: str) -> bool:
    """A prompt's pass draws nothing: it writes the cache."""
    return key.is_prefill and name in ("norm.weight", "lm_head.weight")


def _passes(k: int, most: int) -> tuple[DraftPass, ...]:
    return (DraftPass(2, 1), *(DraftPass(1, 1) for _ in range(k - 1)))


CHAIN = DraftModel(
    Qwen3Config,
    claims=lambda raw: raw.get("model_type") == "qwen3",
    read=lambda raw, where, target: config_from_dict(raw, where),
    module=Qwen3,
    drafter=lambda model, target: Chain(model),
    weights=decoder_weights,
    collectives=_collectives,
    packing=decoder_packing,
    unread=_unread,
    stored_as=_stored_as,
)
KIND = Kind("chain", CHAIN, _passes, kept=(Kept("ids", "B 1 1", "int32"),), decodes=True)
