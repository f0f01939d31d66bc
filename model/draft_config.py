"""Configurations of drafts that are no Qwen3 decoder: EAGLE-3 heads and Medusa heads, read as they are published."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from model.bundle.schema import DRAFT_CONFIGS, Wrong
from model.config import Qwen3Config, load_config, raw_config
from model.errors import UserError


@dataclass(frozen=True)
class Eagle3Config:
    """An EAGLE-3 head: one decoder layer over a token's embedding and the target's states, a vocabulary of its own.

    `taps` are the target's states that it reads, as transformers counts them: i is what layer i is given.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    taps: tuple[int, ...]
    norm_before_residual: bool
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int
    num_hidden_layers: ClassVar[int] = 1
    # the sizes that ranks divide among themselves, and that of the head
    split: ClassVar[tuple[str, ...]] = ("hidden_size", "intermediate_size")
    ids: ClassVar[str] = "draft_vocab_size"

    @property
    def most_drafts(self) -> int:
        """Drafts a step at most; a chain of one head has no end."""
        return sys.maxsize

    @property
    def parameter_count(self) -> int:
        """Parameters, its own embeddings among them."""
        h, d = self.hidden_size, self.head_dim
        attention = 2 * h * d * (self.num_attention_heads + 2 * self.num_key_value_heads)
        layer = attention + self.num_attention_heads * d * h + 3 * h * self.intermediate_size + 3 * h
        features = len(self.taps) * self.target_hidden_size * h
        return layer + features + (self.vocab_size + self.draft_vocab_size) * h + h


@dataclass(frozen=True)
class MedusaConfig:
    """Medusa heads: `layers` residual blocks each on the target's last state, and a projection, shared or each its own.

    It has no attention: no caches, no limit of positions, and nothing to count in heads of attention.
    """

    hidden_size: int
    vocab_size: int
    heads: int
    layers: int
    shared_head: bool
    num_hidden_layers: ClassVar[int] = 0
    num_attention_heads: ClassVar[int] = 1
    num_key_value_heads: ClassVar[int] = 1
    head_dim: ClassVar[int] = 0
    max_position_embeddings: ClassVar[int] = sys.maxsize
    split: ClassVar[tuple[str, ...]] = ("hidden_size",)
    ids: ClassVar[str] = "vocab_size"

    @property
    def target_hidden_size(self) -> int:
        """The width of the state that it reads."""
        return self.hidden_size

    @property
    def taps(self) -> tuple[int, ...]:
        """None of a layer's: the state behind the last one, whose number the target knows."""
        return ()

    @property
    def most_drafts(self) -> int:
        """Drafts a step at most: one a head."""
        return self.heads

    @property
    def parameter_count(self) -> int:
        """Parameters of blocks and projections."""
        projections = 1 if self.shared_head else self.heads
        return self.heads * self.layers * self.hidden_size**2 + projections * self.vocab_size * self.hidden_size


DraftConfig = Qwen3Config | Eagle3Config | MedusaConfig
_TYPES: dict[str, type[Eagle3Config] | type[MedusaConfig]] = {"eagle3": Eagle3Config, "medusa": MedusaConfig}


def load_draft(kind: str, name_or_path: str, target: Qwen3Config) -> DraftConfig:
    """The configuration of a target's draft: a preset, or a folder's. UserError says what is not supported."""
    if kind not in _TYPES:
        return load_config(name_or_path)
    raw, where = raw_config(name_or_path), str(Path(name_or_path) / "config.json")
    values = _READ[kind](raw, where)
    if values.get("taps", ()) is None:
        # what vLLM gives heads that name no layers (vllm/model_executor/models/interfaces.py)
        layers = target.num_hidden_layers
        values["taps"] = (2, layers // 2, layers - 3)
    missing = [f.name for f in fields(_TYPES[kind]) if f.default is MISSING and values.get(f.name) is None]
    if missing:
        raise UserError(f"{where} says nothing of {', '.join(missing)}, which {kind} heads need; fetch it again")
    try:
        DRAFT_CONFIGS[kind](json.loads(json.dumps(values)), "")
    except Wrong as wrong:
        raise UserError(f"{where}: {wrong}; give the folder of complete {kind} heads") from wrong
    return _TYPES[kind](**values)


def draft_config(kind: str, raw: dict[str, Any]) -> DraftConfig:
    """A draft's configuration out of a manifest whose types have been checked."""
    values: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in raw.items()}
    return _TYPES[kind](**values) if kind in _TYPES else Qwen3Config(**values)


def _eagle3(raw: Any, where: str) -> dict[str, Any]:
    """The speculators format has the layer in an object of its own; the original one has all of it at the root."""
    layer = raw.get("transformer_layer_config", raw)
    if not isinstance(layer, dict) or raw.get("speculators_model_type", "eagle3") != "eagle3":
        raise UserError(f"{where} describes no EAGLE-3 head; give the folder of one, or another --drafter")
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
    # vLLM joins the states in the order of the layers, whatever that of the list
    if isinstance(taps, list) and all(type(tap) is int for tap in taps):
        taps = tuple(sorted(set(taps)))
    values["taps"] = taps
    # what a config.json leaves out: the speculators format has it, the original one has not
    values.setdefault("norm_before_residual", "speculators_model_type" in raw)
    return values


def _medusa(raw: Any, where: str) -> dict[str, Any]:
    """As vLLM reads it (vllm/transformers_utils/configs/medusa.py): Medusa's own names are longer."""
    vocabulary = raw.get("vocab_size")
    for what, value, plain in (
        ("medusa_fc_bias", raw.get("medusa_fc_bias", False), False),
        ("truncated_vocab_size", raw.get("truncated_vocab_size") or vocabulary, vocabulary),
        ("logit_scale", raw.get("logit_scale", 1.0), 1.0),
    ):
        if value != plain:
            raise UserError(f"{where} sets {what} to {value!r}, which is not supported; use heads with {plain!r}")
    return {
        "hidden_size": raw.get("hidden_size"),
        "vocab_size": vocabulary,
        "heads": raw.get("num_heads", raw.get("medusa_num_heads")),
        "layers": raw.get("num_hidden_layers", raw.get("medusa_num_layers")),
        "shared_head": raw.get("original_lm_head", False),
    }


_READ: dict[str, Callable[[Any, str], dict[str, Any]]] = {"eagle3": _eagle3, "medusa": _medusa}
