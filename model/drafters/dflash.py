"""DFlash: one pass over a block of masks, whose context are keys and values of the target's own states.

Chen, Liang, Liu, "DFlash: block diffusion for flash speculative decoding" (arXiv 2602.06036; z-lab/dflash,
dflash/model.py); DSpark's Markov head (deepseek-ai/DeepSpec, deepspec/modeling/dspark). A row of the context is

    c[i] = hidden_norm(fc(target states[i]));  layer: key[i] = rope(k_norm(k_proj(c[i])), i), value[i] = v_proj(c[i])

and never passes a layer. The block is the input id, at position p, and masks after it; they pass layers like the
target's and see all context and the whole block, unless it is causal. Its rows are the drafts' by one of two
conventions: in place, row j is the draft of its own position p + j, and row 0 of none; shifted, of p + j + 1.

`keep` has the target's states of all verified rows and writes their keys and values over the block's, at p, p + 1, ...;
rows past the last kept one are garbage, at the next input id's position p' and on, where the next block is written
before it is seen. So nothing is rolled back or remembered beside caches. Steps of the target alone run `keep` too: it
has no attention. Where the block is not causal a row sees the masks behind it: with fewer of them it is a different
drafter, and less than the trained one.

The rows are marginals: draft j does not know draft j - 1. A Markov head adds w2 w1[draft j - 1] to row j's logits, here
to those of the TOP ids that are best with the row's noise, in a walk that every rank does alike. The id before the
first draft is known: all of its logits have the bias. Shapes: B sequences, N rows, E hidden, F tapped states, C
candidates, K drafts, M ranks, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.asks import ids_of
from model.backing import REFERENCE, Backing
from model.cache import AttentionMetadata, Cache
from model.config import Qwen3Config, config_from_dict
from model.cut import COPY, ROWS, Weight
from model.drafters import Drafter, DraftState, Prompt, Verified
from model.drafters.chain import CHAIN
from model.drafters.kind import Counts, DraftPass, Kind, decoder_collectives
from model.errors import UserError
from model.graph_key import GraphKey
from model.ops import iota
from model.packing import Packing
from model.parallel import ONE_RANK, ColumnLinear, Parallel
from model.qwen3 import Qwen3, RMSNorm
from model.rope import rotation
from model.sampling import Draw, coupled_sample
from model.scores import best_ids
from model.strict import Length, Range, Wrong, read
from model.weights import decoder_weights
from model.window import Window


@dataclass(frozen=True, kw_only=True)
class Block:
    """The facts of a block: rows of the trained one, the id of its masks, the convention of its rows, its mask.

    `taps` are the target's states that the context is made of, as transformers counts them; `markov_rank` is 0 without
    a Markov head.
    """

    block_size: Annotated[int, Range(2, 32)]
    mask_id: Annotated[int, Range(0, 1 << 31)]
    taps: Annotated[tuple[int, ...], Length(1, 16), Range(0, 512)]
    shifted: bool
    causal: bool
    markov_rank: Annotated[int, Range(0, 4096)]


@dataclass(frozen=True)
class DFlashConfig(Block, Qwen3Config):
    """The layers of a DFlash draft, those of a Qwen3 of the target's hidden size, and its block."""

    @property
    def trained_k(self) -> int:
        """The drafts of the trained block."""
        return self.block_size - (not self.shifted)

    def untrained(self, ks: Sequence[int]) -> list[int]:
        """Of these k those whose rows see fewer masks behind them than they were trained with."""
        return [k for k in ks if k != self.trained_k and not self.causal]

    def misfit(self, target: Qwen3Config, k: int) -> str:
        """Why this draft cannot draft k ids for a target; "" if it can."""
        if self.hidden_size != target.hidden_size:
            return f"read states of {self.hidden_size} numbers, the target's have {target.hidden_size}"
        if max(self.taps) > target.num_hidden_layers:
            return f"read the target's state {max(self.taps)}, and it has {target.num_hidden_layers} layers"
        if k > self.trained_k:
            return f"draft at most {self.trained_k} ids in a block of {self.block_size} and k is {k}"
        return ""

    @property
    def parameter_count(self) -> int:
        """The number of parameters, the target's embeddings and head included."""
        h = self.hidden_size
        return super().parameter_count + len(self.taps) * h * h + h + 2 * self.vocab_size * self.markov_rank


class DFlashModel(Qwen3):
    """The draft of one rank: a Qwen3 whose context comes from the target."""

    config: DFlashConfig

    def __init__(self, config: DFlashConfig, parallel: Parallel = ONE_RANK, backing: Backing = REFERENCE) -> None:
        super().__init__(config, parallel, backing)
        hidden, rank = config.hidden_size, config.markov_rank
        self.fc = ColumnLinear(len(config.taps) * hidden, hidden // parallel.tp)
        self.hidden_norm = RMSNorm(hidden, config.rms_norm_eps)
        if rank:
            # on every rank: a part of it would cost a collective a draft
            self.markov_w1, self.markov_w2 = (nn.Parameter(torch.empty(config.vocab_size, rank)) for _ in "12")

    def context(self, states_BNF: Tensor, caches: list[Cache], meta: AttentionMetadata) -> list[Cache]:
        """The caches with the keys and values of these rows of the target's states."""
        config = self.config
        angles = rotation(meta.positions_BN, config.head_dim, config.rope_theta, config.rope_scaling)
        rows_BNE, written = self.hidden_norm(self.parallel.ops.all_gather(self.fc(states_BNF))), []
        for layer, cache in zip(self.layers, caches, strict=True):
            written.append(layer.self_attn.write(rows_BNE, angles, cache, meta))  # type: ignore[union-attr, operator]
        return written

    def walk(self, ids_B1: Tensor, logits_RV: Tensor, draw: Draw, k: int) -> Tensor:
        """(B, k) drafts of R = B k rows, each with the bias by the one before it; the first one's has all ids."""
        first_BV = F.linear(F.embedding(ids_B1[:, 0], self.markov_w1), F.embedding(ids_of(self.shard), self.markov_w2))
        rows_BKV = logits_RV.unflatten(0, (-1, k))
        rows_BKV = torch.cat((rows_BKV[:, :1] + first_BV[:, None].float(), rows_BKV[:, 1:]), 1)
        of_rows = self._candidates(rows_BKV.flatten(0, 1), draw)
        ids_BKC, logits_BKC, noise_BKC = (t.unflatten(0, (-1, k)) for t in of_rows)
        drafts_B1 = [ids_B1]
        for n in range(k):
            logits_BC = logits_BKC[:, n]
            if n:
                before_B1r = F.embedding(drafts_B1[-1].clamp(min=0), self.markov_w1)
                logits_BC = logits_BC + (F.embedding(ids_BKC[:, n], self.markov_w2) * before_B1r).float().sum(-1)
            of_row = draw.row(n, k)._replace(noise_RV=noise_BKC[:, n], asked=None)
            place_B1 = coupled_sample(self.head_ops, logits_BC, of_row)[:, None].clamp(min=0)
            drafts_B1.append(_taken(ids_BKC[:, n], place_B1))
        return torch.cat(drafts_B1[1:], 1)

    def _candidates(self, logits_RV: Tensor, draw: Draw) -> tuple[Tensor, Tensor, Tensor]:
        """(R, C) the ids that are best with their noise, their logits and their noise."""
        ops, shard, noise_RV = self.head_ops, self.shard, draw.noise_RV
        assert noise_RV is not None, "candidates need the noise of prepare"
        logits_RV = draw.adjusted(logits_RV)
        drawn_R1 = (draw.temperature_R > 0)[:, None]
        scores_RV = torch.where(drawn_R1, logits_RV / draw.heat_R[:, None] + noise_RV, logits_RV)
        scores_RC, ids_RC = best_ids(ops, scores_RV, ids_of(shard).expand_as(scores_RV))
        # fewer ids than candidates: the last of them several times
        at_RC = (ids_RC - shard.start).clamp(max=shard.width - 1)
        columns = (scores_RC, (at_RC + shard.start).float(), _taken(logits_RV, at_RC), _taken(noise_RV, at_RC))
        of_all = self.kernels.join(ops, torch.stack(columns))
        if of_all.shape[-1] > scores_RC.shape[-1]:
            _, best_RC = best_ids(ops, of_all[0], iota(of_all.shape[-1], ids_RC).expand_as(of_all[0]))
            of_all = torch.stack([_taken(t, best_RC) for t in of_all])
        return of_all[1].to(torch.int32), of_all[2], of_all[3]


def _taken(x_RV: Tensor, at_RC: Tensor) -> Tensor:
    """(R, C) numbers of each row."""
    rows, width = x_RV.shape
    at_RC = at_RC + width * iota(rows, at_RC)[:, None]
    return x_RV.flatten().index_select(0, at_RC.flatten()).unflatten(0, (rows, -1))


class DFlash(Drafter):
    """A block of masks over the target's states; it remembers caches alone."""

    model: DFlashModel

    def __init__(self, model: DFlashModel) -> None:
        self.model, self.taps = model, model.config.taps

    def propose(self, window: Window, ids_BT: Tensor, draw: Draw, state: DraftState) -> tuple[Tensor, DraftState]:
        model, config, k = self.model, self.model.config, window.k
        if not k:
            return ids_BT, state
        rows = k + (not config.shifted)
        masks = torch.full_like(ids_BT, config.mask_id).expand(-1, rows - 1)
        positions_BN = window.meta.positions_BN[:, :rows]
        last_B1 = None if config.causal else positions_BN[:, -1:]
        meta = window.meta._replace(positions_BN=positions_BN, attend_to_B1=last_B1)
        passed = model.hidden(torch.cat((ids_BT, masks), 1), state.caches, meta)
        logits_RV, of_drafts = model.logits(passed.x_BNE[:, -k:]).flatten(0, 1), window.of_drafts(draw)
        if config.markov_rank:
            drafts_Bk = model.walk(ids_BT, logits_RV, of_drafts, k)
        else:
            draws = model.kernels.coupled_sample(model.head_ops, logits_RV, of_drafts)
            drafts_Bk = draws.merged().unflatten(0, (-1, k))
        return torch.cat((ids_BT, drafts_Bk), 1), DraftState(passed.caches)

    def keep(self, verified: Verified, state: DraftState) -> DraftState:
        return self._followed(verified.features_BNF, state, verified.window.meta)

    def prompt(self, prompt: Prompt, state: DraftState) -> DraftState:
        return self._followed(prompt.features_1SF, state, prompt.meta)

    def _followed(self, states_BNF: Tensor | None, state: DraftState, meta: AttentionMetadata) -> DraftState:
        assert states_BNF is not None, "the context is the target's states"
        return DraftState(self.model.context(states_BNF, state.caches, meta))


# keys of a config.json and the values of them that are built; one without any is refused, null is no value
_PLAIN: dict[str, tuple[Any, ...]] = {
    "projector_type": ("dflash", "dspark"),
    "markov_head_type": ("vanilla",),
    "use_swa": (False,),
    "use_aux_hidden_state": (True,),
    "is_neox_style": (True,),
    "attention_sink_bias": (False,),
    "logit_scale": (1.0,),
    "input_embedding_scale": (1.0,),
    "output_multiplier": (1.0,),
    "final_logit_softcapping": (),
    "conv_kernel_size": (),
    "selector_rank": (),
}
_SPECULATORS = ("dflash", "dspark", "dflash2")


def _claims(raw: dict[str, Any]) -> bool:
    return "dflash_config" in raw or "target_layer_ids" in raw or raw.get("speculators_model_type") in _SPECULATORS


def _read(raw: dict[str, Any], where: str, target: Qwen3Config) -> DFlashConfig:
    """z-lab's format has an object `dflash_config`, DeepSpec's its keys at the root, speculators' a type of its own.

    The first two count a layer's output by the layer's number, from 0; speculators counts taps.
    """
    kind, nested = raw.get("speculators_model_type"), raw.get("dflash_config")
    if not _claims(raw) or kind not in (None, "dflash", "dspark"):
        named = kind or raw.get("architectures")
        raise UserError(f"{where} describes {named!r}; a DFlash or DSpark draft is needed: give its folder")
    own = raw | (nested if isinstance(nested, dict) else {})
    if not own.get("markov_rank"):
        own.pop("markov_head_type", None)
    layers = raw.get("transformer_layer_config", raw) if kind else raw
    layers = (layers if isinstance(layers, dict) else {}) | {"tie_word_embeddings": False}
    config = config_from_dict(layers, where)
    sizes = {
        "target_hidden_size": (config.hidden_size,),
        "draft_vocab_size": (config.vocab_size,),
        "num_target_layers": (target.num_hidden_layers,),
        "layer_types": (["full_attention"] * config.num_hidden_layers,),
    }
    for name, allowed in (_PLAIN | sizes).items():
        value = own.get(name, layers.get(name))
        if value is not None and value not in allowed:
            plain = " or ".join(map(repr, allowed)) or "a draft without it"
            raise UserError(f"{where} sets {name} to {value!r}, which is not supported; use {plain}")
    if (Path(where).parent / "mask_embedding.pt").is_file():
        raise UserError(f"{where} comes with mask_embedding.pt, which is not read; use a draft whose mask is an id")
    shift = own.get("sample_from_anchor", own.get("draft_shift", own.get("shift_label")))
    by_default = kind == "dspark" or own.get("projector_type") == "dspark" or not (kind or nested)
    ids = own.get("aux_hidden_state_layer_ids" if kind else "target_layer_ids")
    if ids is None and nested:
        ids = _spread(target.num_hidden_layers, config.num_hidden_layers)
    counted = [tap if kind else tap + 1 for tap in ids] if isinstance(ids, list) and all(map(_whole, ids)) else ids
    values = {
        "block_size": own.get("block_size"),
        "mask_id": own.get("mask_token_id"),
        "taps": counted,
        "shifted": by_default if shift is None else shift,
        "causal": bool(own.get("is_causal") or own.get("causal") or own.get("causal_head")),
        "markov_rank": own.get("markov_rank") or 0,
    }
    try:
        block = read(Block, values)
    except Wrong as wrong:
        raise UserError(f"{where}: {wrong}; give the folder of a complete DFlash draft") from wrong
    if block.mask_id >= config.vocab_size:
        raise UserError(f"{where} has mask_token_id {block.mask_id}; the vocabulary ends at {config.vocab_size - 1}")
    return DFlashConfig(**vars(config), **vars(block))


def _whole(value: Any) -> bool:
    return type(value) is int


def _spread(target_layers: int, count: int) -> list[int]:
    """The target's layers that a draft of z-lab's reads if it names none (build_target_layer_ids)."""
    if count == 1:
        return [target_layers // 2]
    return [round(1 + i * (target_layers - 4) / (count - 1)) for i in range(count)]


_HEAD = "markov_head.markov_"
_OWN = (("fc.weight", ROWS), ("hidden_norm.weight", COPY))


def _weights(config: DFlashConfig, packing: Packing) -> list[Weight]:
    """A Qwen3's, and the context's; the Markov head is on every rank."""
    rows = [Weight(name, name, ((name, cut),)) for name, cut in _OWN]
    names = {f"markov_{w}": f"{_HEAD}{w}.weight" for w in ("w1", "w2")} if config.markov_rank else {}
    return decoder_weights(config, packing) + rows + [Weight(o, n, ((n, COPY),)) for o, n in names.items()]


def _stored_as(config: DFlashConfig, name: str) -> str:
    """A checkpoint has no prefix; speculators' has an inverse of `d2t`, DSpark's a head of confidence: unread."""
    if name == "t2d" or name.startswith("confidence_head."):
        return ""
    return f"model.{name}" if name.startswith(("layers.", "norm.", "embed_tokens.")) else name


def _collectives(config: DFlashConfig, parallel: Parallel, passes: tuple[DraftPass, ...]) -> Counts:
    """A gather of the target's projected states, and a decoder's in the block's pass."""
    counts = decoder_collectives(config, parallel, sum(p.drawn > 0 for p in passes))
    kept = sum(not p.drawn for p in passes) * (parallel.tp > 1)
    return counts | {"all-gather": counts["all-gather"] + kept}


def _unread(key: GraphKey, name: str) -> bool:
    """A prompt and a step of the target alone write the context."""
    writes = any(part in name for part in ("fc.", "hidden_norm.", ".k_proj.", ".v_proj.", ".k_layernorm."))
    return (key.is_prefill or not key.k) and not writes


def _passes(k: int, most: int) -> tuple[DraftPass, ...]:
    # the verified rows, then the block, by the convention that has more rows
    return (DraftPass(k + 1, 0), *(DraftPass(k + 1, k) for _ in range(min(k, 1))))


KIND = Kind(
    "dflash",
    replace(
        CHAIN,
        config=DFlashConfig,
        claims=_claims,
        read=_read,
        module=DFlashModel,
        drafter=lambda model, target: DFlash(model),
        weights=_weights,
        collectives=_collectives,
        unread=_unread,
        guesses=lambda config: not config.markov_rank,
        stored_as=_stored_as,
        lent={
            "model.embed_tokens.weight": ("model.embed_tokens.weight",),
            "lm_head.weight": ("lm_head.weight", "model.embed_tokens.weight"),
        },
    ),
    _passes,
    keeps=1,
    follows=True,
)
