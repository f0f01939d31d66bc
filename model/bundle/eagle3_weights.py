"""The weights of an EAGLE-3 head: names of the speculators format and of the original one, cuts, and shapes.

Names are those that vLLM's loader takes (vllm/model_executor/models/llama_eagle3.py): the original format says
`midlayer` where the other says `layers.0`; both may hold `t2d`, which is the inverse of `d2t`; a head without
embeddings of its own has the target's.
"""

from __future__ import annotations

from model.bundle.cut import COLUMNS, COPY, ROWS, Cut, Weight
from model.draft_config import Eagle3Config
from model.packing import Packing

# what a head without it takes of its target's checkpoint: its name here and there
LENT = ("embed_tokens.weight", "model.embed_tokens.weight")
# ours and the checkpoint's name | the bundle's name | cut
_WEIGHTS = (
    ("embed_tokens.weight", "embed_tokens.weight", COLUMNS),
    ("fc.weight", "fc.weight", ROWS),
    ("norm.weight", "norm.weight", COPY),
    ("lm_head.weight", "lm_head.weight", ROWS),
    ("layers.0.input_layernorm.weight", "layers.0.input_layernorm.weight", COPY),
    ("layers.0.hidden_norm.weight", "layers.0.hidden_norm.weight", COPY),
    ("layers.0.post_attention_layernorm.weight", "layers.0.post_attention_layernorm.weight", COPY),
    ("layers.0.self_attn.q_proj.weight", "layers.0.self_attn.qkv_proj.q_proj.weight", Cut(0, "query")),
    ("layers.0.self_attn.k_proj.weight", "layers.0.self_attn.qkv_proj.k_proj.weight", Cut(0, "kv")),
    ("layers.0.self_attn.v_proj.weight", "layers.0.self_attn.qkv_proj.v_proj.weight", Cut(0, "kv")),
    ("layers.0.self_attn.o_proj.weight", "layers.0.self_attn.o_proj.o_proj.weight", Cut(1, "query")),
    ("layers.0.mlp.gate_proj.weight", "layers.0.mlp.gate_proj.weight", ROWS),
    ("layers.0.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight", ROWS),
    ("layers.0.mlp.down_proj.weight", "layers.0.mlp.down_proj.weight", COLUMNS),
)
# what to add to each of the draft's ids; a draft with all ids has none
_OFFSETS = "d2t"


def eagle3_table(config: Eagle3Config, packing: Packing) -> list[Weight]:
    """Every weight of a head."""
    rows = [Weight(ours, bundle, ((ours, cut),)) for ours, bundle, cut in _WEIGHTS]
    if config.draft_vocab_size < config.vocab_size:
        rows.append(Weight(_OFFSETS, _OFFSETS, ((_OFFSETS, COPY),), dtype="int32"))
    return rows


def eagle3_shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a head, its embeddings among them."""
    e, d, i = config.hidden_size, config.head_dim, config.intermediate_size
    q, kv = config.num_attention_heads * d, config.num_key_value_heads * d
    shapes: tuple[tuple[int, ...], ...] = (
        (config.vocab_size, e), (e, len(config.taps) * config.target_hidden_size), (e,), (config.draft_vocab_size, e),
        (e,), (e,), (e,), (q, 2 * e), (kv, 2 * e), (kv, 2 * e), (e, q), (i, e), (i, e), (e, i),
    )  # fmt: skip
    named = {name: shape for (name, _, _), shape in zip(_WEIGHTS, shapes, strict=True)}
    return named | ({_OFFSETS: (config.draft_vocab_size,)} if config.draft_vocab_size < config.vocab_size else {})


def eagle3_name(stored: str) -> str:
    """The name that the table has for a checkpoint's tensor; empty for one that nothing needs."""
    return "" if stored == "t2d" else stored.replace("midlayer.", "layers.0.", 1)
