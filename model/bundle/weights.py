"""Weights: one table from Hugging Face names to ours and the bundle's, and the cut for each rank.

The bundle's names and cuts are NxDI's, so that its loader finds what it expects.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from model.bundle.cut import COLUMNS, COPY, IDS, ROWS, Cut, Weight, layer_weights
from model.bundle.eagle3_weights import LENT, eagle3_name, eagle3_shapes, eagle3_table
from model.bundle.medusa import medusa_shapes, medusa_table
from model.config import Qwen3Config
from model.draft_config import DraftConfig, Eagle3Config, MedusaConfig
from model.packing import Packing
from model.parallel import HeadMap

# the one weight that no checkpoint has: int32 (1,), a rank's number among those of the head; ours and the bundle's name
RANK = "rank_util.rank"


# ours and Hugging Face's name in a layer | the bundle's name | cut
_LAYER = (
    ("input_layernorm", "input_layernorm", COPY),
    ("self_attn.q_proj", "self_attn.qkv_proj.q_proj", Cut(0, "query")),
    ("self_attn.k_proj", "self_attn.qkv_proj.k_proj", Cut(0, "kv")),
    ("self_attn.v_proj", "self_attn.qkv_proj.v_proj", Cut(0, "kv")),
    ("self_attn.o_proj", "self_attn.o_proj.o_proj", Cut(1, "query")),
    ("self_attn.q_norm", "self_attn.q_layernorm", COPY),
    ("self_attn.k_norm", "self_attn.k_layernorm", COPY),
    ("post_attention_layernorm", "post_attention_layernorm", COPY),
    ("mlp.gate_proj", "mlp.gate_proj", ROWS),
    ("mlp.up_proj", "mlp.up_proj", ROWS),
    ("mlp.down_proj", "mlp.down_proj", COLUMNS),
)


def _qwen3(config: Qwen3Config, packing: Packing) -> list[Weight]:
    """A tied head is a second cut of the embedding."""
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    rows = [
        Weight("embed_tokens.weight", "embed_tokens.weight", (("model.embed_tokens.weight", COLUMNS),)),
        Weight("norm.weight", "norm.weight", (("model.norm.weight", COPY),)),
        Weight("lm_head.weight", "lm_head.weight", ((head, IDS),)),
    ]
    for i in range(config.num_hidden_layers):
        rows += layer_weights(f"layers.{i}", "model.", _LAYER, packing)
    return rows


def _qwen3_shapes(config: Qwen3Config) -> dict[str, tuple[int, ...]]:
    e, d, i = config.hidden_size, config.head_dim, config.intermediate_size
    q, kv = config.num_attention_heads * d, config.num_key_value_heads * d
    layer = ((e,), (q, e), (kv, e), (kv, e), (e, q), (d,), (d,), (e,), (i, e), (i, e), (e, i))
    shapes = {"model.embed_tokens.weight": (config.vocab_size, e), "model.norm.weight": (e,)}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, e)
    for index in range(config.num_hidden_layers):
        for (name, _, _), shape in zip(_LAYER, layer, strict=True):
            shapes[f"model.layers.{index}.{name}.weight"] = shape
    return shapes


# by the type of a model's configuration: its weights, and the shapes of a checkpoint's tensors
_TABLES: dict[type[Any], Callable[..., list[Weight]]] = {
    Qwen3Config: _qwen3, Eagle3Config: eagle3_table, MedusaConfig: medusa_table,
}  # fmt: skip
_SHAPES: dict[type[Any], Callable[..., dict[str, tuple[int, ...]]]] = {
    Qwen3Config: _qwen3_shapes, Eagle3Config: eagle3_shapes, MedusaConfig: medusa_shapes,
}  # fmt: skip
# the table's name for a checkpoint's tensor, where formats differ; empty for one that nothing needs
_NAMES: dict[type[Any], Callable[[str], str]] = {Eagle3Config: eagle3_name}
# what a model takes of its target's checkpoint if its own lacks it: its name here and there
_LENT: dict[type[Any], tuple[str, str]] = {Eagle3Config: LENT}


def table(config: DraftConfig, packing: Packing) -> list[Weight]:
    """Every weight of a model."""
    return _TABLES[type(config)](config, packing)


def hf_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every tensor that a checkpoint must hold."""
    return _SHAPES[type(config)](config)


def known_as(config: DraftConfig, stored: str) -> str:
    """The name in the table of a checkpoint's tensor; empty for one that nothing needs."""
    if isinstance(config, Qwen3Config) and config.tie_word_embeddings and stored == "lm_head.weight":
        return ""
    return _NAMES[type(config)](stored) if type(config) in _NAMES else stored


def lent(config: DraftConfig) -> tuple[str, str] | None:
    """A tensor that a model takes of its target's checkpoint if its own lacks it: its name here and there."""
    return _LENT.get(type(config))


def local_shapes(config: DraftConfig, tp: int, packing: Packing, head_tp: int = 0) -> dict[str, tuple[int, ...]]:
    """Our name -> the shape of every weight of a rank but its number; `head_tp` ranks split the head, `tp` if 0."""
    heads = HeadMap(config.num_attention_heads, config.num_key_value_heads, tp)
    counted = {"query": heads.heads_per_rank * config.head_dim, "kv": heads.kv_per_rank * config.head_dim}
    whole = hf_shapes(config)

    def part(name: str, cut: Cut) -> Tensor:
        shape = list(whole[name])
        if cut.axis is not None:
            ranks = (head_tp or tp) if cut == IDS else tp
            shape[cut.axis] = counted.get(cut.by, shape[cut.axis] // ranks)
        return torch.empty(shape, device="meta")

    return {
        w.ours: tuple(w.join(*(part(name, cut) for name, cut in w.parts), config.head_dim).shape)
        for w in table(config, packing)
    }


def names(prefix: str, config: DraftConfig, packing: Packing, alone: bool) -> dict[str, str]:
    """A pair's parameter -> its name in the bundle, for the model that the pair knows by `prefix`.

    NxDI puts the prefix before a weight's name in a pair, and nothing before those of a target alone.
    """
    bundle_prefix = "" if alone else f"{prefix}."
    names = {w.ours: w.bundle for w in table(config, packing)} | {RANK: RANK}
    return {f"{prefix}.{ours}": bundle_prefix + bundle for ours, bundle in names.items()}


def shard_file(rank: int) -> str:
    """The bundle's file of one rank's weights, as NxDI names it."""
    return f"weights/tp{rank}_sharded_checkpoint.safetensors"
