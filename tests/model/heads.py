"""Small random EAGLE-3 heads and DFlash drafts as checkpoint folders of each format."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from model.config import load_config
from model.drafters.dflash import DFlash
from model.drafters.eagle3 import Eagle3
from model.drafters.registry import load_draft
from tests.compile.tiny import BASE
from trnspec.bundle.part import checkpoint_shapes

# by the format of a DFlash draft: what its config.json says beside the layers, of three of eight layers
BLOCKS: dict[str, dict[str, Any]] = {
    "z-lab": {"dflash_config": {"target_layer_ids": [0, 2, 4]}, "num_target_layers": 8},
    "causal": {"dflash_config": {"target_layer_ids": [0, 2, 4], "causal": True}},
    "unnamed layers": {"dflash_config": {}},
    "specforge": {"dflash_config": {"target_layer_ids": [0, 2, 4], "projector_type": "dspark", "markov_rank": 4}},
    "deepspec": {"target_layer_ids": [-1, 3, 6], "markov_rank": 4, "markov_head_type": "vanilla",
                 "enable_confidence_head": True},
    "speculators": {"speculators_model_type": "dflash", "aux_hidden_state_layer_ids": [1, 3, 8],
                    "draft_vocab_size": 64},
    "from anchor": {"speculators_model_type": "dflash", "aux_hidden_state_layer_ids": [1, 3, 8],
                    "sample_from_anchor": True},
}  # fmt: skip
LAYER = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512, "num_hidden_layers": 1,
}  # fmt: skip


def write_head(
    folder: Path,
    target: Path,
    *,
    original: bool = False,
    draft_vocab: int = 40,
    taps: tuple[int, ...] = (1, 2, 3),
    adds_normed: bool | None = None,
    **changes: Any,
) -> Path:
    """A head for a tiny target: the speculators format, or the original one, which has no embeddings of its own.

    `changes` are of the layer's configuration.
    """
    folder.mkdir(parents=True)
    own = {} if adds_normed is None else {"norm_before_residual": adds_normed}
    layer, own = LAYER | changes, own | {"draft_vocab_size": draft_vocab}
    named = {"speculators_model_type": "eagle3", "eagle_aux_hidden_state_layer_ids": list(taps), **own}
    raw = layer | own if original else named | {"transformer_layer_config": layer}
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    of_target = load_config(str(target))
    config = load_draft(Eagle3, str(folder), of_target)
    generator = torch.Generator().manual_seed(3)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in checkpoint_shapes(config).items():
        scale = 1.0 if len(shape) == 1 else shape[-1] ** -0.5
        noise = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.2 * noise if len(shape) == 1 else noise * scale
    if draft_vocab < config.vocab_size:
        ids_D = torch.randperm(config.vocab_size, generator=generator)[:draft_vocab].sort().values
        tensors |= {"d2t": ids_D - torch.arange(draft_vocab), "t2d": torch.zeros(config.vocab_size, dtype=torch.bool)}
        tensors["t2d"][ids_D] = True
    if original:
        del tensors["embed_tokens.weight"]
        tensors = {name.replace("layers.0.", "midlayer."): t for name, t in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "tokenizer.json").write_bytes((target / "tokenizer.json").read_bytes())
    return folder


def write_block(
    folder: Path,
    target: Path,
    form: str = "z-lab",
    *,
    taps: tuple[int, ...] = (),
    mask: int = 61,
    scale: float = 1.0,
    **changes: Any,
) -> Path:
    """A DFlash draft of two layers for a tiny target, in a format of `BLOCKS`; `changes` are of the layers."""
    folder.mkdir(parents=True)
    layers = BASE | {"num_hidden_layers": 2, "tie_word_embeddings": False} | changes
    own: dict[str, Any] = copy.deepcopy(BLOCKS[form]) | {"block_size": 6}
    named = own.get("dflash_config", own)
    named["mask_token_id"] = mask
    if taps:
        named["target_layer_ids"] = [tap - 1 for tap in taps]
        own.pop("num_target_layers", None)
    raw = own | ({"transformer_layer_config": layers} if "speculators_model_type" in own else layers)
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    config = load_draft(DFlash, str(folder), load_config(str(target)))
    generator, tensors = torch.Generator().manual_seed(4), dict[str, torch.Tensor]()
    for name, shape in checkpoint_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        tensors[name] = (
            1 + 0.2 * noise if len(shape) == 1 else noise * scale * (1 if "markov" in name else shape[-1] ** -0.5)
        )
    lent = ("model.embed_tokens.weight", "lm_head.weight")
    tensors = {name.removeprefix("model."): t for name, t in tensors.items() if name not in lent}
    if form == "deepspec":
        of_target = load_file(target / "model.safetensors")
        tensors |= {name.removeprefix("model."): of_target[name] for name in lent}
        tensors |= {"confidence_head.proj.weight": torch.ones(1, 36), "confidence_head.proj.bias": torch.ones(1)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "tokenizer.json").write_bytes((target / "tokenizer.json").read_bytes())
    return folder
