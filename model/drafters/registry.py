"""Every kind of drafter: a new one is a file of this folder and a line here."""

from __future__ import annotations

from typing import Any

from model.config import PRESETS, ModelConfig, Qwen3Config, load_config, raw_config
from model.drafters import chain, dflash, eagle3, parallel
from model.drafters.kind import DraftModel, Kind
from model.errors import UserError

# no drafts at all, and drafts by the host: neither has a model
NONE, NGRAM = Kind("none"), Kind("ngram")
# dflash before those that claim its mask or its vocabulary
KINDS = {k.name: k for k in (chain.KIND, dflash.KIND, parallel.KIND, eagle3.KIND, NGRAM, NONE)}


def inferred(name_or_path: str) -> Kind:
    """The kind of drafter that a preset or a checkpoint's config.json describes; a plain Qwen3 is a chain."""
    if name_or_path in PRESETS:
        return chain.KIND
    raw = raw_config(name_or_path)
    return next((k for k in KINDS.values() if k.model and k is not chain.KIND and k.model.claims(raw)), chain.KIND)


def load_draft(kind: Kind, name_or_path: str, target: Qwen3Config) -> Any:
    """The configuration of a target's draft: a preset's or a folder's. UserError says what is not supported."""
    assert kind.model is not None
    if name_or_path in PRESETS:
        if kind.model.config is not Qwen3Config:
            raise UserError(f"{name_or_path} is a plain Qwen3; --drafter {kind.name} needs a checkpoint's folder")
        return load_config(name_or_path)
    return kind.model.read(raw_config(name_or_path), f"{name_or_path}/config.json", target)


def model_of(config: ModelConfig) -> DraftModel:
    """The facts of the model that a configuration describes; a target's are those of a chain's draft."""
    return next(k.model for k in KINDS.values() if k.model and k.model.config is type(config))
