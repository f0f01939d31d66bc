"""Every drafter: a new one is a file of this folder and a line here."""

from typing import Any

from model.config import PRESETS, ModelConfig, Qwen3Config, load_config, raw_config
from model.drafter import Drafter
from model.drafters.chain import Chain
from model.drafters.dflash import DFlash
from model.drafters.eagle3 import Eagle3
from model.drafters.parallel import Parallel
from model.errors import UserError


class NGram(Drafter):
    """The host drafts."""

    name = "ngram"
    default_ks = (7,)


# dflash before those that match its mask or its vocabulary
DRAFTERS: dict[str, type[Drafter]] = {d.name: d for d in (Chain, DFlash, Parallel, Eagle3, NGram, Drafter)}


def infer_drafter(name_or_path: str) -> type[Drafter]:
    """The drafter that a preset or a checkpoint's config.json describes; a plain Qwen3 is a chain."""
    if name_or_path in PRESETS:
        return Chain
    raw = raw_config(name_or_path)
    return next((d for d in DRAFTERS.values() if d.matches_config(raw)), Chain)


def load_draft(drafter: type[Drafter], name_or_path: str, target: Qwen3Config) -> Any:
    """The configuration of a target's draft: a preset's or a folder's. UserError says what is not supported."""
    if name_or_path not in PRESETS:
        return drafter.config_from_hf(raw_config(name_or_path), f"{name_or_path}/config.json", target)
    if drafter is not Chain:
        raise UserError(f"{name_or_path} is a plain Qwen3; --drafter {drafter.name} needs a checkpoint's folder")
    return load_config(name_or_path)


def drafter_of(config: ModelConfig) -> type[Drafter]:
    """The drafter whose model a configuration describes; a target is what a chain drafts with."""
    return next(d for d in DRAFTERS.values() if d.config_type is type(config))
