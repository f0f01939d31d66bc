"""Autoregressive draft model: a smaller Qwen3 drafts one token per pass.

If a step accepts every draft, the draft's cache lacks the last draft's row. Therefore the first pass of a step has two
rows, the id before the input id and the input id; if the first row is cached already, it is rewritten with the same
bits. vLLM does the same (vllm/v1/spec_decode/llm_base_proposer.py); NxDI runs an extra pass.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from model.config import Qwen3Config, config_from_dict
from model.drafter import Drafter, DraftState, PrefillChunk, StateSpec, StepRows, VerifyResult, write_slot
from model.ops import gather_rows, iota
from model.qwen3 import Qwen3
from model.sampling import SamplingParams
from model.weights import Packing, Weight, decoder_weights


class Chain(Drafter):
    """Drafts with k passes of a Qwen3; per-slot state: the K ids before the input id, K = 1."""

    name = "chain"
    config_type: ClassVar[type[Any] | None] = Qwen3Config
    model_type: ClassVar[Any] = Qwen3
    state_spec: ClassVar[tuple[StateSpec, ...]] = (StateSpec("ids", "B 1 1", "int32"),)
    default_ks: ClassVar[tuple[int, ...]] = (3, 7)
    is_causal_lm = True
    model: Qwen3

    def propose(
        self, rows: StepRows, ids_BT: Tensor, params: SamplingParams, noise_BNV: Tensor, state: DraftState
    ) -> tuple[Tensor, DraftState]:
        model, (before_B11,) = self.model, state.slots
        # idle slots are at position 0; their rows are ignored
        positions_B2 = (rows.meta.positions_BN[:, :1] - 1).clamp(min=0) + iota(2, ids_BT)
        ids_B2 = torch.cat((before_B11.squeeze(-1), ids_BT), 1)
        x_B2E, caches, _ = model.hidden(ids_B2, state.caches, rows.meta._replace(positions_BN=positions_B2))
        logits_B1V = model.logits(x_B2E[:, 1:])
        drafts_B1 = [model.sample(logits_B1V, params.rows(0, 1, []), noise_BNV[:, :1]).token_ids()]
        for n in range(1, rows.k):
            row = rows.meta.rows(n, n + 1), params.rows(n, n + 1, drafts_B1), noise_BNV[:, n : n + 1]
            draft_B1, caches = model.ctx.ops.call(model, drafts_B1[-1], caches, *row)
            drafts_B1.append(draft_B1)
        return torch.cat((ids_BT, *drafts_B1), 1), DraftState(caches, state.slots)

    def update(self, result: VerifyResult, state: DraftState) -> DraftState:
        (before_BK1,), count_B1 = state.slots, result.count_B1
        ids_BJ1 = torch.cat((before_BK1, result.ids_BN.unsqueeze(-1)), 1)
        return state._replace(slots=(gather_rows(ids_BJ1, count_B1 + iota(before_BK1.shape[1], count_B1)),))

    def prefill(self, chunk: PrefillChunk, state: DraftState) -> DraftState:
        caches = self.model.hidden(chunk.ids_1S, state.caches, chunk.meta).caches
        (before_BK1,), ids_1S1 = state.slots, chunk.ids_1S.unsqueeze(-1)
        count = before_BK1.shape[1]
        # of a prompt shorter than K, the first entries are not used
        last_1K = (chunk.length_1[:, None] - count + iota(count, chunk.length_1)).clamp(min=0)
        return DraftState(caches, (write_slot(before_BK1, gather_rows(ids_1S1, last_1K), chunk.slot_1),))

    @classmethod
    def config_from_hf(cls, raw: dict[str, Any], where: str, target: Qwen3Config) -> Any:
        return config_from_dict(raw, where)

    @classmethod
    def weights(cls, config: Any, packing: Packing) -> list[Weight]:
        return decoder_weights(config, packing)

    @classmethod
    def rename_weight(cls, config: Any, name: str) -> str:
        # a checkpoint with a tied head may store it, too
        return "" if config.tie_word_embeddings and name == "lm_head.weight" else name
