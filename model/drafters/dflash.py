"""DFlash: one pass over a block of mask tokens, which attend keys and values projected from the target's states.

Chen, Liang, Liu, "DFlash: block diffusion for flash speculative decoding" (arXiv 2602.06036; z-lab/dflash,
dflash/model.py); DSpark's Markov head (deepseek-ai/DeepSpec, deepspec/modeling/dspark). Each layer's context is

    c[i] = hidden_norm(fc(target states[i]));  key[i] = rope(k_norm(k_proj(c[i])), i), value[i] = v_proj(c[i])

The block is the input id, at position p, and mask tokens. Block rows run through decoder layers and attend the context
and all block rows, or, if `causal`, the block rows up to their own. Row j drafts the token of position p + j, and row 0
none; if `shifted`, row j drafts p + j + 1. If not causal, a block with fewer rows than in training gives other drafts.

`update` overwrites the block's keys and values with those of the verified rows' states, from p on. Rows after the last
accepted one are invalid; they start at the next input id's position, where the next block is written before it is read.

Block drafts are sampled independently. The Markov head adds w2 w1[draft j - 1] to the logits of row j, here only to
those of C = TOP candidates, the ids with the best logit plus noise. The first draft follows a known id, so the bias is
added to all of its logits. Shapes: F tapped states, C candidates, k drafts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import append
from model.cache import AttentionMetadata, Cache
from model.config import Qwen3Config, config_from_dict, refuse_settings
from model.context import ONE_RANK, Context
from model.drafter import DraftState, PrefillChunk, StepRows, VerifyResult
from model.drafters.chain import Chain
from model.errors import UserError
from model.layers import ColumnLinear, RMSNorm
from model.logprobs import best_ids
from model.ops import iota, ordered_sum
from model.qwen3 import Qwen3
from model.rope import rotation
from model.sampling import SamplingParams, sample
from model.strict import Length, Range
from model.weights import REPLICATED, ROWS, Packing, Weight, decoder_weights


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(Qwen3Config):
    """The draft's Qwen3 layers, of the target's hidden size, and the trained block.

    `taps`: indices of the target's hidden states in the context (`Qwen3.taps`); `markov_rank`: 0 without a Markov head.
    """

    block_size: Annotated[int, Range(2, 32)]
    mask_id: Annotated[int, Range(0, 1 << 31)]
    taps: Annotated[tuple[int, ...], Length(1, 16), Range(0, 512)]
    shifted: bool
    causal: bool
    markov_rank: Annotated[int, Range(0, 4096)]

    @property
    def trained_k(self) -> int:
        """The number of drafts of the trained block."""
        return self.block_size - (not self.shifted)

    def untrained_ks(self, ks: Sequence[int]) -> list[int]:
        """The given k whose rows attend fewer masks than in training; none if the block is causal."""
        return [k for k in ks if k != self.trained_k and not self.causal]

    def incompatibility(self, target: Qwen3Config, k: int) -> str:
        """Why this draft does not support the target or k; "" if it does."""
        if self.hidden_size != target.hidden_size:
            return f"reads hidden states of size {self.hidden_size}, the target's have {target.hidden_size}"
        if max(self.taps) > target.num_hidden_layers:
            return f"reads the target's hidden state {max(self.taps)}, the target has {target.num_hidden_layers} layers"
        if k > self.trained_k:
            return f"drafts at most {self.trained_k} tokens in a block of {self.block_size} and k is {k}"
        return ""


class DFlashModel(Qwen3):
    """The draft on one rank: Qwen3 layers whose context is projected from the target's hidden states."""

    config: DFlashConfig

    def __init__(self, config: DFlashConfig, ctx: Context = ONE_RANK) -> None:
        super().__init__(config, ctx)
        hidden, rank = config.hidden_size, config.markov_rank
        self.fc = ColumnLinear(len(config.taps) * hidden, hidden // ctx.tp)
        self.hidden_norm = RMSNorm(hidden, config.rms_norm_eps)
        if rank:
            # replicated: a sharded head would need a collective per draft
            self.markov_w1, self.markov_w2 = (nn.Parameter(torch.empty(config.vocab_size, rank)) for _ in "12")

    def context(self, states_BNF: Tensor, caches: list[Cache], meta: AttentionMetadata) -> list[Cache]:
        """Projects rows of the target's states to keys and values, and writes them to the caches."""
        rope = rotation(meta.positions_BN, self.config)
        rows_BNE = self.hidden_norm(self.ctx.ops.all_gather(self.fc(states_BNF), self.rank_11))
        layers: list[Any] = list(self.layers)
        kvs = (layer.self_attn.key_value(rows_BNE, rope) for layer in layers)
        return [append(self.ctx.ops, k, v, cache, meta) for (k, v), cache in zip(kvs, caches, strict=True)]

    def markov_decode(self, ids_B1: Tensor, logits_BkV: Tensor, params: SamplingParams, noise_BkV: Tensor) -> Tensor:
        """(B, k) drafts, sampled one after the other, each with the Markov bias of the token before it."""
        w1, w2 = self.markov_w1, self.markov_w2
        bias_BV = F.linear(F.embedding(ids_B1[:, 0], w1), F.embedding(self.shard.ids_V, w2)).float()
        logits_BkV = torch.cat((logits_BkV[:, :1] + bias_BV[:, None], logits_BkV[:, 1:]), 1)
        if params.processors is not None:
            logits_BkV = params.processors.process(logits_BkV)
        ids_BkC, logits_BkC, noise_BkC = self._candidates(logits_BkV, params, noise_BkV)
        drafts_B1, params = [ids_B1], params.repeat(1)
        for n in range(logits_BkV.shape[1]):
            logits_BC = logits_BkC[:, n]
            if n:
                before_B1r = F.embedding(drafts_B1[-1].clamp(min=0), w1)
                logits_BC = logits_BC + ordered_sum(F.embedding(ids_BkC[:, n], w2) * before_B1r)
            place_B1 = sample(self.ctx.ops, logits_BC, params, noise_BkC[:, n])[:, None].clamp(min=0)
            drafts_B1.append(_gather_columns(ids_BkC[:, n], place_B1))
        return torch.cat(drafts_B1[1:], 1)

    def _candidates(
        self, logits_BkV: Tensor, params: SamplingParams, noise_BkV: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(B, k, C) the candidates of each row: ids, logits and noise, equal on all ranks."""
        ops, shard, (batch, k) = self.ctx.ops, self.shard, logits_BkV.shape[:2]
        logits_RV, noise_RV, params = logits_BkV.flatten(0, 1), noise_BkV.flatten(0, 1), params.repeat(k)
        sampled_R1 = (params.temperature_R > 0)[:, None]
        scores_RV = torch.where(sampled_R1, logits_RV / params.divisor_R[:, None] + noise_RV, logits_RV)
        scores_RC, ids_RC = best_ids(ops, scores_RV, shard.ids_V.expand_as(scores_RV))
        # a vocabulary of fewer than C ids: repeat the last id
        places_RC = (ids_RC - shard.start_11).clamp(min=None if shard.last is None else 0, max=shard.width - 1)
        picked = (_gather_columns(t, places_RC) for t in (logits_RV, noise_RV))
        candidates = torch.stack((scores_RC, (places_RC + shard.start_11).float(), *picked))
        candidates = self.ctx.all_gather_vocab(candidates, shard)
        if candidates.shape[-1] > scores_RC.shape[-1]:
            _, best_RC = best_ids(ops, candidates[0], iota(candidates.shape[-1], ids_RC).expand_as(candidates[0]))
            candidates = torch.stack([_gather_columns(t, best_RC) for t in candidates])
        ids_BkC, logits_BkC, noise_BkC = candidates[1:].unflatten(1, (batch, k))
        return ids_BkC.to(torch.int32), logits_BkC, noise_BkC


def _gather_columns(x_RV: Tensor, columns_RC: Tensor) -> Tensor:
    """(R, C): x_RV[r, columns_RC[r, c]]."""
    rows, width = x_RV.shape
    places_RC = columns_RC + width * iota(rows, columns_RC)[:, None]
    return x_RV.flatten().index_select(0, places_RC.flatten()).unflatten(0, (rows, -1))


class DFlash(Chain):
    """Drafts with one pass over a block of masks; no per-slot state but the caches."""

    name = "dflash"
    config_type = DFlashConfig
    model_type = DFlashModel
    state_spec = ()
    is_causal_lm = False
    verify_passes = 1
    default_ks = (7,)
    runs_without_drafts = True
    tied_to_target: ClassVar[dict[str, tuple[str, ...]]] = {
        "model.embed_tokens.weight": ("model.embed_tokens.weight",),
        "lm_head.weight": ("lm_head.weight", "model.embed_tokens.weight"),
    }
    model: DFlashModel

    def propose(
        self, rows: StepRows, ids_BT: Tensor, params: SamplingParams, noise_BNV: Tensor, state: DraftState
    ) -> tuple[Tensor, DraftState]:
        model, config, k = self.model, self.model.config, rows.k
        if not k:
            return ids_BT, state
        block = k + (not config.shifted)
        masks_BR = torch.full_like(ids_BT, config.mask_id).expand(-1, block - 1)
        meta = rows.meta.rows(0, block)
        if not config.causal:
            meta = meta._replace(attend_to_B1=meta.positions_BN[:, -1:])
        x_BRE, caches, _ = model.hidden(torch.cat((ids_BT, masks_BR), 1), state.caches, meta)
        logits_BkV, params, noise_BkV = model.logits(x_BRE[:, -k:]), params.rows(0, k, []), noise_BNV[:, :k]
        if config.markov_rank:
            drafts_Bk = model.markov_decode(ids_BT, logits_BkV, params, noise_BkV)
        else:
            drafts_Bk = model.sample(logits_BkV, params, noise_BkV).token_ids()
        return torch.cat((ids_BT, drafts_Bk), 1), DraftState(caches)

    def update(self, result: VerifyResult, state: DraftState) -> DraftState:
        return DraftState(self.model.context(result.taps_BNF, state.caches, result.rows.meta))

    def prefill(self, chunk: PrefillChunk, state: DraftState) -> DraftState:
        return DraftState(self.model.context(chunk.taps_1SF, state.caches, chunk.meta))

    @classmethod
    def matches_config(cls, raw: dict[str, Any]) -> bool:
        kinds = ("dflash", "dspark", "dflash2")
        return "dflash_config" in raw or "target_layer_ids" in raw or raw.get("speculators_model_type") in kinds

    @classmethod
    def config_from_hf(cls, raw: dict[str, Any], where: str, target: Qwen3Config) -> Any:
        """Reads z-lab's format (an object `dflash_config`), DeepSpec's (keys at the root) or speculators' (a type).

        z-lab and DeepSpec list layers, whose outputs are tapped; speculators lists indices of hidden states (taps).
        """
        kind, nested = raw.get("speculators_model_type"), raw.get("dflash_config")
        if not cls.matches_config(raw) or kind not in (None, "dflash", "dspark"):
            named = kind or raw.get("architectures")
            raise UserError(f"{where} describes {named!r}; give the folder of a DFlash or DSpark draft")
        block = raw | (nested if isinstance(nested, dict) else {})
        if not block.get("markov_rank"):
            block.pop("markov_head_type", None)
        layers = raw.get("transformer_layer_config", raw) if kind else raw
        layers = (layers if isinstance(layers, dict) else {}) | {"tie_word_embeddings": False}
        config = config_from_dict(layers, where)
        sizes = {
            "target_hidden_size": (config.hidden_size,), "draft_vocab_size": (config.vocab_size,),
            "num_target_layers": (target.num_hidden_layers,),
            "layer_types": (["full_attention"] * config.num_hidden_layers,),
        }  # fmt: skip
        refuse_settings({**layers, **block}, _SUPPORTED | sizes, where)
        if (Path(where).parent / "mask_embedding.pt").is_file():
            raise UserError(f"{where} has mask_embedding.pt, which is not supported; use a draft with a mask token")
        ids = block.get("aux_hidden_state_layer_ids" if kind else "target_layer_ids")
        if ids is None and nested:
            # z-lab's default, evenly spaced layers (build_target_layer_ids)
            count, end = config.num_hidden_layers, target.num_hidden_layers
            ids = [round(1 + i * (end - 4) / (count - 1)) for i in range(count)] if count > 1 else [end // 2]
        if not kind and isinstance(ids, list) and all(type(tap) is int for tap in ids):
            ids = [tap + 1 for tap in ids]
        shift = block.get("sample_from_anchor", block.get("draft_shift", block.get("shift_label")))
        by_default = kind == "dspark" or block.get("projector_type") == "dspark" or not (kind or nested)
        values = {
            "block_size": block.get("block_size"), "mask_id": block.get("mask_token_id"), "taps": ids,
            "shifted": by_default if shift is None else shift, "markov_rank": block.get("markov_rank") or 0,
            "causal": bool(block.get("is_causal") or block.get("causal") or block.get("causal_head")),
        }  # fmt: skip
        draft: Any = config_from_dict(layers | values, where, DFlashConfig, "DFlash draft")
        if draft.mask_id >= draft.vocab_size:
            last = draft.vocab_size - 1
            raise UserError(f"{where} has mask_token_id {draft.mask_id}, ids are 0 to {last}; correct the checkpoint")
        return draft

    @classmethod
    def weights(cls, config: Any, packing: Packing) -> list[Weight]:
        rows = {"fc.weight": ("fc.weight", ROWS), "hidden_norm.weight": ("hidden_norm.weight", REPLICATED)}
        if config.markov_rank:
            rows |= {f"markov_{w}": (f"markov_head.markov_{w}.weight", REPLICATED) for w in ("w1", "w2")}
        return decoder_weights(config, packing) + [Weight(name, (part,)) for name, part in rows.items()]

    @classmethod
    def rename_weight(cls, config: Any, name: str) -> str:
        # unused: the inverse of `d2t` (speculators), the confidence head (DSpark); checkpoints lack the prefix `model.`
        if name == "t2d" or name.startswith("confidence_head."):
            return ""
        return f"model.{name}" if name.startswith(("layers.", "norm.", "embed_tokens.")) else name


# keys of config.json and their supported values
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "projector_type": ("dflash", "dspark"), "markov_head_type": ("vanilla",), "use_swa": (False,),
    "use_aux_hidden_state": (True,), "is_neox_style": (True,), "attention_sink_bias": (False,), "logit_scale": (1.0,),
    "input_embedding_scale": (1.0,), "output_multiplier": (1.0,), "final_logit_softcapping": (), "conv_kernel_size": (),
    "selector_rank": (),
}  # fmt: skip
