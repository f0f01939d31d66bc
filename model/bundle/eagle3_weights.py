"""The weights of an EAGLE-3 head: names of the speculators format and of the original one, cuts, and shapes.

Names are those that vLLM's loader takes (vllm/model_executor/models/llama_eagle3.py): the original format says
`midlayer` where the other says `layers.0`; both may hold `t2d`, which is the inverse of `d2t`; a head without
embeddings of its own has the target's.
"""

from __future__ import annotations

from model.bundle.cut import COLUMNS, COPY, IDS, ROWS, Cut, Weight, layer_weights
from model.draft_config import Eagle3Config
from model.packing import Packing

# what a head without it takes of its target's checkpoint: its name here and there
LENT = ("embed_tokens.weight", "model.embed_tokens.weight")
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
# what to add to each of the draft's ids; a draft with all ids has none
_OFFSETS = "d2t"


def eagle3_table(config: Eagle3Config, packing: Packing) -> list[Weight]:
    """Every weight of a head."""
    rows = [Weight(f"{name}.weight", f"{name}.weight", ((f"{name}.weight", cut),)) for name, cut in _OUTSIDE]
    rows += layer_weights("layers.0", "", _LAYER, packing)
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
    names = [*(name for name, _ in _OUTSIDE), *(f"layers.0.{name}" for name, _, _ in _LAYER)]
    named = {f"{name}.weight": shape for name, shape in zip(names, shapes, strict=True)}
    return named | ({_OFFSETS: (config.draft_vocab_size,)} if config.draft_vocab_size < config.vocab_size else {})


def eagle3_name(stored: str) -> str:
    """The name that the table has for a checkpoint's tensor; empty for one that nothing needs."""
    return "" if stored == "t2d" else stored.replace("midlayer.", "layers.0.", 1)
