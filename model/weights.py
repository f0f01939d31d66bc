"""Weights: one table from Hugging Face names to ours and the bundle's, and the cut for each rank.

The bundle's names and cuts are NxDI's, so that its loader finds the names it expects. A weight's shape is stated by the
module that holds it, built on the meta device; the tables have names and cuts alone.
"""

from __future__ import annotations

from model.backing import Backing
from model.config import Qwen3Config
from model.cut import COLUMNS, COPY, IDS, ROWS, Cut, Weight, layer_weights
from model.packing import Packing

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


def decoder_weights(config: Qwen3Config, packing: Packing) -> list[Weight]:
    """Every weight of a Qwen3. A tied head is a second cut of the embedding."""
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    rows = [
        Weight("embed_tokens.weight", "embed_tokens.weight", (("model.embed_tokens.weight", COLUMNS),)),
        Weight("norm.weight", "norm.weight", (("model.norm.weight", COPY),)),
        Weight("lm_head.weight", "lm_head.weight", ((head, IDS),)),
    ]
    for i in range(config.num_hidden_layers):
        rows += layer_weights(f"layers.{i}", "model.", _LAYER, packing)
    return rows


def decoder_packing(backing: Backing, config: Qwen3Config, ranks: int) -> Packing:
    """The halves of a Qwen3's layers that a backing packs."""
    return backing.packing(config, ranks)


def shard_file(rank: int) -> str:
    """The bundle's file of one rank's weights, as NxDI names it."""
    return f"weights/tp{rank}_sharded_checkpoint.safetensors"
