"""Small random EAGLE-3 heads and DFlash drafts as checkpoint folders of each format."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.config import load_config
from model.drafter import Drafter
from model.drafters.dflash import DFlash
from model.drafters.eagle3 import Eagle3
from model.drafters.registry import load_draft
from tests.compile.tiny import BASE
from trnspec.bundle.part import checkpoint_shapes

# format of a DFlash draft -> config.json without the layers; three taps of a target with eight layers
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
# format -> taps, shifted, causal
BLOCK_FACTS = {
    "z-lab": ([1, 3, 5], False, False),
    "causal": ([1, 3, 5], False, True),
    "unnamed layers": ([2, 6], False, False),
    "specforge": ([1, 3, 5], True, False),
    "deepspec": ([0, 4, 7], True, False),
    "speculators": ([1, 3, 8], False, False),
    "from anchor": ([1, 3, 8], True, False),
}
MASK = 61
_TIED = ("model.embed_tokens.weight", "lm_head.weight")


def block_config(form: str = "z-lab", taps: tuple[int, ...] = (), **changes: Any) -> dict[str, Any]:
    """The config.json of a DFlash draft of two layers in a format of `BLOCKS`; `changes` apply to the layers."""
    layers = BASE | {"num_hidden_layers": 2, "tie_word_embeddings": False} | changes
    block: dict[str, Any] = copy.deepcopy(BLOCKS[form]) | {"block_size": 6}
    named = block.get("dflash_config", block)
    named["mask_token_id"] = MASK
    if taps:
        named["target_layer_ids"] = [tap - 1 for tap in taps]
        block.pop("num_target_layers", None)
    return block | ({"transformer_layer_config": layers} if "speculators_model_type" in block else layers)


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
    """Writes a head for a tiny target in the speculators format, or in the original one, which has no embedding.

    `changes` apply to the layer's configuration.
    """
    layer: dict[str, Any] = BASE | {"model_type": "llama", "num_hidden_layers": 1} | changes
    head: dict[str, Any] = {"draft_vocab_size": draft_vocab}
    head |= {} if adds_normed is None else {"norm_before_residual": adds_normed}
    named = {"speculators_model_type": "eagle3", "eagle_aux_hidden_state_layer_ids": list(taps)}
    raw = layer | head if original else named | head | {"transformer_layer_config": layer}
    generator = torch.Generator().manual_seed(3)
    tensors, vocab_size = _random(folder, target, Eagle3, raw, generator), layer["vocab_size"]
    if draft_vocab < vocab_size:
        ids_D = torch.randperm(vocab_size, generator=generator)[:draft_vocab].sort().values
        tensors |= {"d2t": ids_D - torch.arange(draft_vocab), "t2d": torch.zeros(vocab_size, dtype=torch.bool)}
        tensors["t2d"][ids_D] = True
    if original:
        del tensors["embed_tokens.weight"]
        tensors = {name.replace("layers.0.", "midlayer."): t for name, t in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_block(folder: Path, target: Path, form: str = "z-lab", *, scale: float = 1.0, **config: Any) -> Path:
    """Writes a DFlash draft for a tiny target, with the config of `block_config`."""
    generator = torch.Generator().manual_seed(4)
    tensors = _random(folder, target, DFlash, block_config(form, **config), generator, scale)
    tensors = {name.removeprefix("model."): t for name, t in tensors.items() if name not in _TIED}
    if form == "deepspec":
        of_target = load_file(target / "model.safetensors")
        tensors |= {name.removeprefix("model."): of_target[name] for name in _TIED}
        tensors |= {"confidence_head.proj.weight": torch.ones(1, 36), "confidence_head.proj.bias": torch.ones(1)}
    save_file(tensors, folder / "model.safetensors")
    return folder


def _random(
    folder: Path,
    target: Path,
    drafter: type[Drafter],
    raw: dict[str, Any],
    generator: torch.Generator,
    scale: float = 1,
) -> dict[str, Tensor]:
    """Writes a folder with config.json and the target's tokenizer; returns random tensors for it."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    (folder / "tokenizer.json").write_bytes((target / "tokenizer.json").read_bytes())
    tensors = dict[str, Tensor]()
    for name, shape in checkpoint_shapes(load_draft(drafter, str(folder), load_config(str(target)))).items():
        noise = torch.randn(shape, generator=generator)
        size = scale * (1 if "markov" in name else shape[-1] ** -0.5)
        tensors[name] = 1 + 0.2 * noise if len(shape) == 1 else noise * size
    return tensors
