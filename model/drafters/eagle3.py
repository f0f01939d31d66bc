"""EAGLE-3: a one-layer autoregressive head over the target's hidden states.

Li, Wei, Zhang, Zhang, arXiv 2503.01840; names and details as vLLM loads them (vllm/model_executor/models/
llama_eagle3.py, vllm/v1/spec_decode/eagle.py). Row j, at position j, concatenates the embedding of token j + 1 with the
target's states of token j, projected by `fc`; its output x[j] gives the logits of token j + 2:

    x[j] = layer(embed(token[j + 1]), fc(target states[j]))         if token j was verified
    x[j] = layer(embed(token[j + 1]), x[j - 1])                     if token j is a draft

`update` runs the layer over all verified rows; rows after the last accepted one are invalid, from the next input id's
position p' on. The state is x of the last accepted row, from which `propose` samples the first draft. The k - 1 passes
of `propose` write rows p', p' + 1, ... before reading them, and `update` rewrites them: no row attends a rejected id.

The head's D ids are a subset of the target's ids; `propose` samples them with the noise of the corresponding target
ids. Ranks shard D and the outputs of `fc`. Shapes: E the head's hidden size, F the tapped states.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from model.cache import AttentionMetadata, Cache
from model.config import ModelConfig, Qwen3Config, read_config, refuse_settings
from model.context import ONE_RANK, Context
from model.drafter import Drafter, DraftState, PrefillChunk, StateSpec, StepRows, VerifyResult, write_slot
from model.errors import UserError
from model.layers import ColumnLinear, Embedding, Head, LanguageModel, RMSNorm
from model.ops import gather_rows, iota
from model.parallel import VocabShard
from model.qwen3 import MLP, Attention
from model.rope import Rotation, rotation
from model.sampling import SamplingParams
from model.strict import Length, Range
from model.weights import DECODER_LAYER, REPLICATED, ROWS, Packing, Weight, head_weight, layer_weights


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(ModelConfig):
    """An EAGLE-3 head: one decoder layer, and a draft vocabulary. `taps`: indices of hidden states (`Qwen3.taps`)."""

    num_hidden_layers: Annotated[int, Range(1, 1)] = 1
    draft_vocab_size: Annotated[int, Range(1, 1 << 22)]
    target_hidden_size: Annotated[int, Range(1, 1 << 17)]
    taps: Annotated[tuple[int, ...], Length(1, 16), Range(0, 512)]
    norm_before_residual: bool
    head_size: ClassVar[str] = "draft_vocab_size"

    def incompatibility(self, target: Qwen3Config, k: int) -> str:
        """Why this head does not support the target; "" if it does."""
        if self.target_hidden_size != target.hidden_size:
            return f"reads hidden states of size {self.target_hidden_size}, the target's have {target.hidden_size}"
        if any(tap >= target.num_hidden_layers for tap in self.taps):
            taps, layers = ", ".join(map(str, self.taps)), target.num_hidden_layers
            return f"reads the inputs of layers {taps} (counted from 0), the target has {layers} layers"
        return "has a larger vocabulary than the target" if self.draft_vocab_size > target.vocab_size else ""


class Eagle3Attention(Attention):
    """Attention without qk-norm, over rows that concatenate an embedding and a feature (2 E)."""

    def __init__(self, config: Eagle3Config, ctx: Context) -> None:
        super().__init__(config, ctx)
        for name in ("q_proj", "k_proj", "v_proj"):
            self.add_module(name, ColumnLinear(2 * config.hidden_size, getattr(self, name).out_features))
        self.q_norm = self.k_norm = nn.Identity()  # type: ignore[assignment]


class Eagle3Layer(nn.Module):
    """The head's decoder layer. The residual is the feature, after its norm if `norm_before_residual`."""

    def __init__(self, config: Eagle3Config, ctx: Context) -> None:
        super().__init__()
        self.config = config
        norms = (RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(3))
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = norms
        self.self_attn = Eagle3Attention(config, ctx)
        self.mlp = MLP(config, ctx)

    def forward(
        self, embeds_BNE: Tensor, x_BNE: Tensor, rope: Rotation, cache: Cache, meta: AttentionMetadata
    ) -> tuple[Tensor, Cache]:
        normed_BNE = self.hidden_norm(x_BNE)
        joined = torch.cat((self.input_layernorm(embeds_BNE), normed_BNE), -1)
        attn, cache = self.self_attn(joined, rope, cache, meta)
        x_BNE = attn + (normed_BNE if self.config.norm_before_residual else x_BNE)
        return x_BNE + self.mlp(self.post_attention_layernorm(x_BNE)), cache


class Eagle3Model(LanguageModel):
    """The head on one rank."""

    config: Eagle3Config

    def __init__(self, config: Eagle3Config, ctx: Context = ONE_RANK) -> None:
        super().__init__(config, ctx)
        hidden = config.hidden_size
        self.embed_tokens = Embedding(config.vocab_size, hidden, ctx)
        self.fc = ColumnLinear(len(config.taps) * config.target_hidden_size, hidden // ctx.tp)
        self.layers = nn.ModuleList([Eagle3Layer(config, ctx)])
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = Head(hidden, config.draft_vocab_size, ctx)
        if config.draft_vocab_size < config.vocab_size:
            # target id minus draft id
            self.d2t = nn.Parameter(torch.zeros(config.draft_vocab_size, dtype=torch.int32), requires_grad=False)

    @property
    def target_ids_D(self) -> Tensor:
        """(D,) int32: the target id of each draft id."""
        draft_ids_D = iota(self.config.draft_vocab_size, self.rank)
        return draft_ids_D + self.d2t if hasattr(self, "d2t") else draft_ids_D

    @property
    def shard(self) -> VocabShard:
        draft_ids = super().shard
        if not hasattr(self, "d2t"):
            return draft_ids
        return draft_ids._replace(mapped_V=self.target_ids_D.index_select(0, draft_ids.ids_V))

    def feature(self, states_BNF: Tensor) -> Tensor:
        """(B, N, E) features: the target's tapped states, projected."""
        return self.ctx.ops.all_gather(self.fc(states_BNF), self.rank_11)

    def hidden(
        self, next_BN: Tensor, x_BNE: Tensor, caches: list[Cache], meta: AttentionMetadata
    ) -> tuple[Tensor, list[Cache]]:
        """(B, N, E) outputs of the layer, and the caches; `next_BN` is the id after the token of each feature row."""
        rope, embeds_BNE = rotation(meta.positions_BN, self.config), self.embed_tokens(next_BN, self.rank_11)
        x_BNE, cache = self.ctx.ops.call(self.layers[0], embeds_BNE, x_BNE, rope, caches[0], meta)
        return x_BNE, [cache]

    def draft(self, x_B1E: Tensor, params: SamplingParams, noise_B1D: Tensor) -> Tensor:
        """(B, 1) sampled drafts, as target ids."""
        logits_B1D = self.lm_head(self.norm(x_B1E), self.rank_11)
        return self.target_ids_D[self.sample(logits_B1D, params, noise_B1D).token_ids()]

    def forward(
        self, next_B1: Tensor, x_B1E: Tensor, caches: list[Cache], meta: AttentionMetadata,
        params: SamplingParams, noise_B1D: Tensor,
    ) -> tuple[Tensor, Tensor, list[Cache]]:  # fmt: skip
        """One pass of `propose`: the next draft, the row's output (B, 1, E), and the caches."""
        x_B1E, caches = self.hidden(next_B1, x_B1E, caches, meta)
        return self.draft(x_B1E, params, noise_B1D), x_B1E, caches


class Eagle3(Drafter):
    """Drafts with k - 1 passes of the head; per-slot state: its output at the last accepted row."""

    name = "eagle3"
    config_type = Eagle3Config
    model_type = Eagle3Model
    # the layer's input is 2 E wide
    packs_attention = False
    state_spec = (StateSpec("state", "B 1 H"),)
    default_ks = (4,)
    verify_passes = 1
    # heads in the original format have no embedding
    tied_to_target: ClassVar[dict[str, tuple[str, ...]]] = {"embed_tokens.weight": ("model.embed_tokens.weight",)}
    model: Eagle3Model

    def propose(
        self, rows: StepRows, ids_BT: Tensor, params: SamplingParams, noise_BNV: Tensor, state: DraftState
    ) -> tuple[Tensor, DraftState]:
        model, caches, (x_B1E,) = self.model, state.caches, state.slots
        drafts_B1 = [model.draft(x_B1E, params.rows(0, 1, []), noise_BNV[:, :1])]
        for n in range(1, rows.k):
            # row j embeds token j + 1
            row = rows.meta.rows(n - 1, n), params.rows(n, n + 1, drafts_B1), noise_BNV[:, n : n + 1]
            draft_B1, x_B1E, caches = model.ctx.ops.call(model, drafts_B1[-1], x_B1E, caches, *row)
            drafts_B1.append(draft_B1)
        return torch.cat((ids_BT, *drafts_B1), 1), DraftState(caches, state.slots)

    def update(self, result: VerifyResult, state: DraftState) -> DraftState:
        ids, meta = (result.ids_BN, result.count_B1, result.next_B1), result.rows.meta.rows(0, result.ids_BN.shape[1])
        last_B1E, caches = self._advance(*ids, result.taps_BNF, state.caches, meta)
        return DraftState(caches, (last_B1E,))

    def prefill(self, chunk: PrefillChunk, state: DraftState) -> DraftState:
        ids = chunk.ids_1S, chunk.length_1[:, None], chunk.next_11
        last_11E, caches = self._advance(*ids, chunk.taps_1SF, state.caches, chunk.meta)
        return DraftState(caches, (write_slot(state.slots[0], last_11E, chunk.slot_1),))

    def _advance(
        self, ids_BN: Tensor, count_B1: Tensor, next_B1: Tensor, states_BNF: Tensor, caches: list[Cache],
        meta: AttentionMetadata,
    ) -> tuple[Tensor, list[Cache]]:  # fmt: skip
        """Runs the layer over all rows. Returns the output (B, 1, E) of row `count` - 1, which embeds `next_B1`."""
        shifted_BN = torch.cat((ids_BN[:, 1:], next_B1), 1)
        next_BN = torch.where(iota(ids_BN.shape[1], count_B1) == count_B1 - 1, next_B1, shifted_BN)
        x_BNE, caches = self.model.hidden(next_BN, self.model.feature(states_BNF), caches, meta)
        return gather_rows(x_BNE, count_B1 - 1), caches

    @classmethod
    def matches_config(cls, raw: dict[str, Any]) -> bool:
        return raw.get("speculators_model_type") == "eagle3" or "draft_vocab_size" in raw

    @classmethod
    def config_from_hf(cls, raw: dict[str, Any], where: str, target: Qwen3Config) -> Any:
        """Reads the speculators format (with `transformer_layer_config`) or the original one (all at the root)."""
        layer = raw.get("transformer_layer_config", raw)
        if not isinstance(layer, dict) or raw.get("speculators_model_type", "eagle3") != "eagle3":
            raise UserError(f"{where} describes no EAGLE-3 head; give the folder of one, or a different --drafter")
        given = {name: value for source in (layer, raw) for name, value in source.items() if value is not None}
        refuse_settings(given, _SUPPORTED, where)
        rope, listed, nested = layer.get("rope_parameters"), "eagle_aux_hidden_state_layer_ids", raw.get("eagle_config")
        taps = raw.get(listed) or (nested.get(listed) if isinstance(nested, dict) else None) or None
        layers = target.num_hidden_layers
        if taps is None:
            # vLLM's default (vllm/model_executor/models/interfaces.py)
            taps = [2, layers // 2, layers - 3]
        elif isinstance(taps, list) and all(type(tap) is int for tap in taps):
            # vLLM concatenates the states in ascending order of layers, whatever the order of the list
            taps = sorted(set(taps))
        defaults = {
            "rope_theta": rope.get("rope_theta") if isinstance(rope, dict) else None,
            "target_hidden_size": layer.get("hidden_size"),
            # defaults: true in the speculators format, false in the original one
            "norm_before_residual": "speculators_model_type" in raw,
        }
        return read_config(Eagle3Config, defaults | given | {"taps": taps}, where, "EAGLE-3 head")

    @classmethod
    def weights(cls, config: Any, packing: Packing) -> list[Weight]:
        """The weights table, with the names of vLLM's loader (vllm/model_executor/models/llama_eagle3.py)."""
        outside = {"embed_tokens": ROWS, "fc": ROWS, "norm": REPLICATED}
        rows = [Weight(f"{name}.weight", ((f"{name}.weight", shard),)) for name, shard in outside.items()]
        rows.append(head_weight("lm_head.weight", packing))
        layer = {n: s for n, s in DECODER_LAYER.items() if n not in ("self_attn.q_norm", "self_attn.k_norm")}
        rows += layer_weights("layers.0", "", layer | {"hidden_norm": REPLICATED}, packing)
        if config.draft_vocab_size < config.vocab_size:
            rows.append(Weight("d2t", (("d2t", REPLICATED),), dtype="int32"))
        return rows

    @classmethod
    def rename_weight(cls, config: Any, name: str) -> str:
        # the original format names the layer `midlayer`; `t2d`, the inverse of `d2t`, is unused
        return "" if name == "t2d" else name.replace("midlayer.", "layers.0.", 1)


# keys of config.json and their supported values; a mask token means P-EAGLE, which is not supported
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "fc_norm": (False,), "norm_before_fc": (False,), "norm_output": (False,), "ptd_token_id": (), "mask_token_id": (),
    "num_hidden_layers": (1,), "attention_bias": (False,), "mlp_bias": (False,), "rope_scaling": (),
    "hidden_act": ("silu",),
}  # fmt: skip
