"""EAGLE-3: a head of one layer reads the target's own states, and chains its own where these end.

Li, Wei, Zhang, Zhang, arXiv 2503.01840; names and details as vLLM loads them (vllm/model_executor/models/
llama_eagle3.py, vllm/v1/spec_decode/eagle.py). Row j joins the target's states of token j, projected by `fc`, with
the embedding of token j + 1, at position j; its output x[j] gives the logits of token j + 2:

    x[j] = layer(embed(token[j + 1]), fc(target states[j]))         while token j is the target's
    x[j] = layer(embed(token[j + 1]), x[j - 1])                     for drafts

`keep` has the target's states of all N verified rows and runs the layer over them, before the host knows how
many are kept: rows past the last kept one hold garbage, at positions p + count and on, where p + count is the next
input id's. It remembers x of the last kept row, from which `propose` draws the first draft; its k - 1 passes of one row
write positions p', p' + 1, ... before they see them, and `keep` writes all of these anew. So no row ever sees an id
that was not kept.

The head's vocabulary is a part of the target's: it draws among its own D ids, with the noise of the target's ids that
they stand for, and looks up the target's id of each draw. Ranks hold a part of D, and of fc's outputs. Shapes: B
sequences, N rows, E the head's hidden size, F the tapped states, D the draft's ids.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from model.backing import REFERENCE, Backing
from model.cache import AttentionMetadata, Cache
from model.config import Qwen3Config
from model.cut import COLUMNS, COPY, IDS, ROWS, Cut, Weight, layer_weights
from model.drafters import Drafter, DraftState, Prompt, Verified, in_slot
from model.drafters.chain import CHAIN
from model.drafters.kind import Counts, DraftModel, DraftPass, Kept, Kind, decoder_collectives
from model.errors import UserError
from model.kernels import Kernels
from model.ops import iota, rows_of
from model.packing import Packing
from model.parallel import ONE_RANK, ColumnLinear, Embedding, Head, Parallel, Shard
from model.qwen3 import MLP, Attention, RMSNorm
from model.rank_model import RankModel
from model.rope import Rotation, rotation
from model.sampling import Draw
from model.strict import Length, Range, Wrong, read
from model.window import Window


@dataclass(frozen=True)
class Eagle3Config:
    """An EAGLE-3 head: one decoder layer over a token's embedding and the target's states, a vocabulary of its own.

    `taps` are the target's states that it reads, as transformers counts them: i is the input of layer i.
    """

    hidden_size: Annotated[int, Range(1, 1 << 17)]
    intermediate_size: Annotated[int, Range(1, 1 << 20)]
    num_attention_heads: Annotated[int, Range(1, 1024)]
    num_key_value_heads: Annotated[int, Range(1, 1024)]
    head_dim: Annotated[int, Range(2, 1024)]
    vocab_size: Annotated[int, Range(1, 1 << 22)]
    draft_vocab_size: Annotated[int, Range(1, 1 << 22)]
    target_hidden_size: Annotated[int, Range(1, 1 << 17)]
    taps: Annotated[tuple[int, ...], Length(1, 16), Range(0, 512)]
    norm_before_residual: bool
    rope_theta: Annotated[float, Range(1, 1e12)]
    rms_norm_eps: Annotated[float, Range(1e-12, 1)]
    max_position_embeddings: Annotated[int, Range(1, 1 << 24)]
    num_hidden_layers: ClassVar[int] = 1
    # the sizes that ranks divide among themselves, and that of the head
    split: ClassVar[tuple[str, ...]] = ("hidden_size", "intermediate_size")
    ids: ClassVar[str] = "draft_vocab_size"

    def misfit(self, target: Qwen3Config, k: int) -> str:
        """Why this head cannot draft k ids for a target; "" if it can."""
        if self.target_hidden_size != target.hidden_size:
            return f"reads states of {self.target_hidden_size} numbers, the target's have {target.hidden_size}"
        if any(tap >= target.num_hidden_layers for tap in self.taps):
            taps, layers = ", ".join(map(str, self.taps)), target.num_hidden_layers
            return f"reads the inputs of the layers {taps}, the target has {layers} layers from 0 on"
        return "has more ids than the target" if self.draft_vocab_size > target.vocab_size else ""

    @property
    def parameter_count(self) -> int:
        """The number of parameters, its own embeddings included."""
        h, d = self.hidden_size, self.head_dim
        attention = 2 * h * d * (self.num_attention_heads + 2 * self.num_key_value_heads)
        layer = attention + self.num_attention_heads * d * h + 3 * h * self.intermediate_size + 3 * h
        features = len(self.taps) * self.target_hidden_size * h
        return layer + features + (self.vocab_size + self.draft_vocab_size) * h + h


class JoinedAttention(Attention):
    """Attention whose rows are an embedding and a feature beside each other, and are not normed by head."""

    def __init__(self, config: Eagle3Config, parallel: Parallel, kernels: Kernels) -> None:
        super().__init__(config, parallel, kernels)
        for name, plain in (("q_proj", self.q_proj), ("k_proj", self.k_proj), ("v_proj", self.v_proj)):
            self.add_module(name, ColumnLinear(2 * config.hidden_size, plain.weight.shape[0]))
        for name in ("q_norm", "k_norm"):
            self.add_module(name, nn.Identity())


class HeadLayer(nn.Module):
    """The decoder layer of a head: its residual is the feature, normed first or not, as the head was trained."""

    def __init__(self, config: Eagle3Config, parallel: Parallel, backing: Backing) -> None:
        super().__init__()
        self.config, self.branch = config, backing.branch or _branch
        norms = (RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(3))
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = norms
        self.self_attn = JoinedAttention(config, parallel, backing.kernels)
        self.mlp: MLP = backing.mlp(config, parallel, backing.kernels) if backing.mlp else MLP(config, parallel)

    def forward(
        self, embeds_BNE: Tensor, x_BNE: Tensor, angles: Rotation, cache: Cache, meta: AttentionMetadata
    ) -> tuple[Tensor, Cache]:
        normed_BNE = self.hidden_norm(x_BNE)
        joined = torch.cat((self.input_layernorm(embeds_BNE), normed_BNE), -1)
        attended, cache = self.self_attn(joined, angles, cache, meta)
        x_BNE = attended + (normed_BNE if self.config.norm_before_residual else x_BNE)
        return x_BNE + self.branch(self.post_attention_layernorm, self.mlp, x_BNE), cache


def _branch(norm: RMSNorm, mlp: MLP, x: Tensor) -> Tensor:
    normed: Tensor = mlp(norm(x))
    return normed


class Eagle3Draft(RankModel):
    """The head of one rank."""

    config: Eagle3Config

    def __init__(self, config: Eagle3Config, parallel: Parallel = ONE_RANK, backing: Backing = REFERENCE) -> None:
        super().__init__(config, parallel, backing)
        hidden, tp, ops = config.hidden_size, parallel.tp, parallel.ops
        self.embed_tokens = Embedding(config.vocab_size, hidden // tp, ops)
        self.fc = ColumnLinear(len(config.taps) * config.target_hidden_size, hidden // tp)
        self.layers = nn.ModuleList([HeadLayer(config, parallel, backing)])
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = Head(hidden, config.draft_vocab_size // tp, ops, backing.sharded)
        if config.draft_vocab_size < config.vocab_size:
            # the differences of the target's ids from the draft's
            self.d2t = nn.Parameter(torch.zeros(config.draft_vocab_size, dtype=torch.int32), requires_grad=False)

    @property
    def target_ids_D(self) -> Tensor:
        """(D,) int32: the target's id of each of the draft's."""
        own_D = iota(self.config.draft_vocab_size, self.rank_util.rank)
        return own_D + self.d2t if hasattr(self, "d2t") else own_D

    @property
    def shard(self) -> Shard:
        own = self.shard_of(self.config.draft_vocab_size)
        ids_V = own.start[0] + iota(own.width, own.start)
        return own._replace(ids_V=self.target_ids_D.index_select(0, ids_V)) if hasattr(self, "d2t") else own

    def feature(self, states_BNF: Tensor) -> Tensor:
        """(B, N, E) of the target's states at the taps."""
        return self.parallel.ops.all_gather(self.fc(states_BNF))

    def hidden(
        self, next_BN: Tensor, x_BNE: Tensor, caches: list[Cache], meta: AttentionMetadata
    ) -> tuple[Tensor, list[Cache]]:
        """(B, N, E) after the layer, of features and the ids that follow theirs, and the cache with these rows."""
        angles = rotation(meta.positions_BN, self.config.head_dim, self.config.rope_theta)
        x_BNE, cache = self.parallel.ops.call(
            self.layers[0], self.embed_tokens(next_BN), x_BNE, angles, caches[0], meta
        )
        return x_BNE, [cache]

    def logits(self, x_BNE: Tensor) -> Tensor:
        """(B, N, D) fp32 logits of the draft's ids, of this rank's alone if the kernels draw from shards."""
        logits: Tensor = self.lm_head(self.norm(x_BNE))
        return logits

    def drawn(self, x_B1E: Tensor, draw: Draw) -> Tensor:
        """(B, 1) the target's ids that are drawn after a row of each sequence."""
        draws = self.kernels.coupled_sample(self.head_ops, self.logits(x_B1E).flatten(0, 1), draw)
        return self.target_ids_D[draws.merged()].unsqueeze(-1)

    def forward(
        self, next_B1: Tensor, x_B1E: Tensor, caches: list[Cache], meta: AttentionMetadata, draw: Draw
    ) -> tuple[Tensor, Tensor, list[Cache]]:
        """The id drawn after the last draft, its row's output and the cache."""
        x_B1E, caches = self.hidden(next_B1, x_B1E, caches, meta)
        return self.drawn(x_B1E, draw), x_B1E, caches


class Eagle3(Drafter):
    """A head on the target's states; it remembers its output at the last kept row."""

    model: Eagle3Draft

    def __init__(self, model: Eagle3Draft) -> None:
        self.model, self.taps = model, model.config.taps

    def propose(self, window: Window, ids_BT: Tensor, draw: Draw, state: DraftState) -> tuple[Tensor, DraftState]:
        model, caches, (x_B1E,) = self.model, state.caches, state.kept
        _, of_row = window.row(0, draw, [])
        drafts_B1 = [model.drawn(x_B1E, of_row)]
        for n in range(1, window.k):
            # the row of a draft is at the position before it
            (meta, _), (_, of_row) = window.row(n - 1, draw, []), window.row(n, draw, drafts_B1)
            draft_B1, x_B1E, caches = model.parallel.ops.call(model, drafts_B1[-1], x_B1E, caches, meta, of_row)
            drafts_B1.append(draft_B1)
        return torch.cat((ids_BT, *drafts_B1), 1), DraftState(caches, state.kept)

    def keep(self, verified: Verified, state: DraftState) -> DraftState:
        meta, rows = verified.window.meta, verified.window.k + 1
        meta = meta._replace(positions_BN=meta.positions_BN[:, :rows])
        next_BN = _following(verified.candidates_BN, verified.count_B1, verified.next_B1)
        last_B1E, caches = self._rows(next_BN, verified.features_BNF, verified.count_B1, state.caches, meta)
        return DraftState(caches, (last_B1E,))

    def prompt(self, prompt: Prompt, state: DraftState) -> DraftState:
        length_11 = prompt.length_1[:, None]
        next_1S = _following(prompt.ids_1S, length_11, prompt.token_11)
        last_11E, caches = self._rows(next_1S, prompt.features_1SF, length_11, state.caches, prompt.meta)
        return DraftState(caches, (in_slot(state.kept[0], last_11E, prompt.slot_1),))

    def _rows(
        self, next_BN: Tensor, states_BNF: Tensor | None, count_B1: Tensor, caches: list[Cache], meta: AttentionMetadata
    ) -> tuple[Tensor, list[Cache]]:
        """(B, 1, E) the last of the first `count` rows of the target's states, and the cache with all rows written."""
        assert states_BNF is not None, "a head reads the target's states"
        x_BNE, caches = self.model.hidden(next_BN, self.model.feature(states_BNF), caches, meta)
        return rows_of(x_BNE, count_B1 - 1), caches


def _following(ids_BN: Tensor, count_B1: Tensor, next_B1: Tensor) -> Tensor:
    """(B, N) the id after each of the first `count` ids; later ids are ignored."""
    shifted_BN = torch.cat((ids_BN[:, 1:], next_B1), 1)
    return torch.where(iota(ids_BN.shape[1], count_B1) == count_B1 - 1, next_B1, shifted_BN)


def _read(raw: dict[str, Any], where: str, target: Qwen3Config) -> Eagle3Config:
    """The speculators format has the layer in an object of its own; the original one has all of it at the root."""
    layer = raw.get("transformer_layer_config", raw)
    if not isinstance(layer, dict) or raw.get("speculators_model_type", "eagle3") != "eagle3":
        raise UserError(f"{where} describes no EAGLE-3 head; give the folder of one, or a different --drafter")
    for what, value, plain in (
        ("fc_norm", raw.get("fc_norm"), False),
        ("norm_before_fc", raw.get("norm_before_fc"), False),
        ("norm_output", raw.get("norm_output"), False),
        # a parallel head: one pass over rows of a mask token with a learned state
        ("ptd_token_id", raw.get("ptd_token_id"), None),
        ("mask_token_id", raw.get("mask_token_id"), None),
        ("num_hidden_layers", layer.get("num_hidden_layers"), 1),
        ("attention_bias", layer.get("attention_bias"), False),
        ("mlp_bias", layer.get("mlp_bias"), False),
        ("rope_scaling", layer.get("rope_scaling"), None),
        ("hidden_act", layer.get("hidden_act"), "silu"),
    ):
        if value is not None and value != plain:
            raise UserError(f"{where} sets {what} to {value!r}, which is not supported; use a head with {plain!r}")
    own = {f.name for f in fields(Eagle3Config)}
    values = {name: layer[name] for name in own & layer.keys()} | {name: raw[name] for name in own & raw.keys()}
    rope = layer.get("rope_parameters") or {}
    values.setdefault("rope_theta", rope.get("rope_theta") if isinstance(rope, dict) else None)
    values |= {n: float(values[n]) for n in ("rope_theta", "rms_norm_eps") if type(values.get(n)) is int}
    if values.get("target_hidden_size") is None:
        values["target_hidden_size"] = values.get("hidden_size")
    if "head_dim" not in values and all(type(values.get(n)) is int for n in ("hidden_size", "num_attention_heads")):
        values["head_dim"] = values["hidden_size"] // max(1, values["num_attention_heads"])
    listed, nested = "eagle_aux_hidden_state_layer_ids", raw.get("eagle_config")
    taps = raw.get(listed) or (nested.get(listed) if isinstance(nested, dict) else None) or None
    # vLLM joins the states in the order of the layers, whatever the order of the list
    if isinstance(taps, list) and all(type(tap) is int for tap in taps):
        taps = tuple(sorted(set(taps)))
    # vLLM gives these to heads that name no layers (vllm/model_executor/models/interfaces.py)
    layers = target.num_hidden_layers
    values["taps"] = list(taps) if taps is not None else [2, layers // 2, layers - 3]
    # the original format has no such key, the speculators format has
    values.setdefault("norm_before_residual", "speculators_model_type" in raw)
    try:
        return read(Eagle3Config, {name: value for name, value in values.items() if value is not None})
    except Wrong as wrong:
        raise UserError(f"{where}: {wrong}; give the folder of a complete EAGLE-3 head") from wrong


_OUTSIDE = (("embed_tokens", COLUMNS), ("fc", ROWS), ("norm", COPY), ("lm_head", IDS))
# ours and the checkpoint's name in the layer | the bundle's name | cut
_LAYER = (
    ("input_layernorm", "input_layernorm", COPY),
    ("hidden_norm", "hidden_norm", COPY),
    ("post_attention_layernorm", "post_attention_layernorm", COPY),
    ("self_attn.q_proj", "self_attn.qkv_proj.q_proj", Cut(0, "query")),
    ("self_attn.k_proj", "self_attn.qkv_proj.k_proj", Cut(0, "kv")),
    ("self_attn.v_proj", "self_attn.qkv_proj.v_proj", Cut(0, "kv")),
    ("self_attn.o_proj", "self_attn.o_proj.o_proj", Cut(1, "query")),
    ("mlp.gate_proj", "mlp.gate_proj", ROWS),
    ("mlp.up_proj", "mlp.up_proj", ROWS),
    ("mlp.down_proj", "mlp.down_proj", COLUMNS),
)
# the differences of the target's ids from the draft's; a draft with all ids has none
_OFFSETS = "d2t"


def _weights(config: Eagle3Config, packing: Packing) -> list[Weight]:
    """Every weight of a head, by the names that vLLM's loader takes (vllm/model_executor/models/llama_eagle3.py)."""
    rows = [Weight(f"{name}.weight", f"{name}.weight", ((f"{name}.weight", cut),)) for name, cut in _OUTSIDE]
    rows += layer_weights("layers.0", "", _LAYER, packing)
    if config.draft_vocab_size < config.vocab_size:
        rows.append(Weight(_OFFSETS, _OFFSETS, ((_OFFSETS, COPY),), dtype="int32"))
    return rows


def _stored_as(config: Eagle3Config, name: str) -> str:
    """The original format says `midlayer` for `layers.0`; `t2d` is the inverse of `d2t`."""
    return "" if name == "t2d" else name.replace("midlayer.", "layers.0.", 1)


def _collectives(config: Eagle3Config, parallel: Parallel, passes: tuple[DraftPass, ...]) -> Counts:
    """The collectives of a decoder's passes, and a gather of the target's projected states once a step."""
    counts = decoder_collectives(config, parallel, len(passes))
    return counts | {"all-gather": counts["all-gather"] + (parallel.tp > 1 and bool(passes))}


def _passes(k: int, most: int) -> tuple[DraftPass, ...]:
    # the verified rows and the first draft, then one row for each further draft
    return (DraftPass(k + 1, 1), *(DraftPass(1, 1) for _ in range(k - 1)))


def _claims(raw: dict[str, Any]) -> bool:
    return raw.get("speculators_model_type") == "eagle3" or "draft_vocab_size" in raw


KIND = Kind(
    "eagle3",
    DraftModel(
        Eagle3Config,
        claims=_claims,
        read=_read,
        module=Eagle3Draft,
        drafter=lambda model, target: Eagle3(model),
        weights=_weights,
        collectives=_collectives,
        # its attention reads two rows beside each other, which no packed kernel does
        packing=lambda backing, config, ranks: backing.packing(config, ranks)._replace(attention=False),
        unread=CHAIN.unread,
        stored_as=_stored_as,
        # a head without embeddings has the target's
        lent={"embed_tokens.weight": ("model.embed_tokens.weight",)},
    ),
    _passes,
    kept=(Kept("state", "B 1 H"),),
    keeps=1,
)
