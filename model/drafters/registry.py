"""The list of drafters, and the choice of a drafter by a checkpoint's config.json."""

from typing import Any

from model.config import PRESETS, ModelConfig, Qwen3Config, load_config, raw_config
from model.drafter import Drafter
from model.drafters.chain import Chain
from model.drafters.dflash import DFlash
from model.drafters.eagle3 import Eagle3
from model.drafters.parallel import Parallel
from model.errors import UserError


class NGram(Drafter):
    """The host drafts by n-gram lookup in the sequence (prompt lookup)."""

    name = "ngram"
    default_ks = (7,)


# in order of matching: a DFlash config.json may have a mask token or a draft vocabulary, too
DRAFTERS: dict[str, type[Drafter]] = {d.name: d for d in (Chain, DFlash, Parallel, Eagle3, NGram, Drafter)}


def infer_drafter(name_or_path: str) -> type[Drafter]:
    """The drafter for a preset or a checkpoint's config.json; `chain` for a plain Qwen3."""
    if name_or_path in PRESETS:
        return Chain
    raw = raw_config(name_or_path)
    return next((d for d in DRAFTERS.values() if d.matches_config(raw)), Chain)


def load_draft(drafter: type[Drafter], name_or_path: str, target: Qwen3Config) -> Any:
    """The draft's configuration, from a preset or a checkpoint folder. Raises UserError for unsupported settings."""
    if name_or_path not in PRESETS:
        return drafter.config_from_hf(raw_config(name_or_path), f"{name_or_path}/config.json", target)
    if drafter is not Chain:
        raise UserError(f"{name_or_path} is a plain Qwen3; --drafter {drafter.name} needs a checkpoint's folder")
    return load_config(name_or_path)


def drafter_of(config: ModelConfig) -> type[Drafter]:
    """The drafter with this type of configuration; `chain` for a target's."""
    return next(d for d in DRAFTERS.values() if d.config_type is type(config))
