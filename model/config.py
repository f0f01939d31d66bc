"""Qwen3 dense configurations: one frozen value, the published family, and reading a checkpoint's."""

from __future__ import annotations

import json
from collections.abc import Hashable
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol

from model.errors import UserError
from model.strict import Length, Range, Wrong, read


class HeadConfig(Protocol):
    """The heads of attention."""

    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


class LayerConfig(HeadConfig, Protocol):
    """The sizes of a decoder layer."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...


class ModelConfig(HeadConfig, Hashable, Protocol):
    """The fields of every model's configuration, a target's or a draft's, which is a frozen dataclass.

    `split` are the sizes that ranks divide among themselves, `ids` the size that the ranks of the head divide. A draft
    without attention has no layers and one head of size 0.
    """

    split: ClassVar[tuple[str, ...]]
    ids: ClassVar[str]

    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def parameter_count(self) -> int: ...


@dataclass(frozen=True)
class Yarn:
    """YaRN's stretch of the rotary positions, in the names of config.json; `model/rope.py` has its law."""

    factor: Annotated[float, Range(1, 1024)]
    original_max_position_embeddings: Annotated[int, Range(1, 1 << 24)]
    beta_fast: Annotated[float, Range(1e-3, 1e6)] = 32.0
    beta_slow: Annotated[float, Range(1e-3, 1e6)] = 1.0
    attention_factor: Annotated[float | None, Range(1e-3, 1e3)] = None
    mscale: Annotated[float | None, Range(0, 1e3)] = None
    mscale_all_dim: Annotated[float | None, Range(0, 1e3)] = None
    truncate: bool = True

    @property
    def positions(self) -> int:
        """The positions that it reaches, as vLLM counts them."""
        return int(self.factor * self.original_max_position_embeddings)

    def stated(self) -> dict[str, Any]:
        """The object of a config.json."""
        return {"rope_type": "yarn"} | {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class Qwen3Config:
    """The shape of one dense Qwen3 model, in the names of its Hugging Face config.json."""

    hidden_size: Annotated[int, Range(1, 1 << 17)]
    intermediate_size: Annotated[int, Range(1, 1 << 20)]
    num_hidden_layers: Annotated[int, Range(1, 512)]
    num_attention_heads: Annotated[int, Range(1, 1024)]
    num_key_value_heads: Annotated[int, Range(1, 1024)]
    tie_word_embeddings: bool
    head_dim: Annotated[int, Range(2, 1024)] = 128
    vocab_size: Annotated[int, Range(1, 1 << 22)] = 151936
    rope_theta: Annotated[float, Range(1, 1e12)] = 1e6
    rms_norm_eps: Annotated[float, Range(1e-12, 1)] = 1e-6
    max_position_embeddings: Annotated[int, Range(1, 1 << 24)] = 40960
    bos_token_id: Annotated[int | None, Range(0, 1 << 31)] = 151643
    eos_token_ids: Annotated[tuple[int, ...], Length(0, 64), Range(0, 1 << 31)] = (151645, 151643)
    rope_scaling: Yarn | None = None

    # the sizes that ranks divide among themselves, and that of the head
    split: ClassVar[tuple[str, ...]] = ("hidden_size", "intermediate_size")
    ids: ClassVar[str] = "vocab_size"

    @property
    def group(self) -> int:
        """Query heads that share one kv head."""
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def parameter_count(self) -> int:
        """Parameters as Hugging Face counts them (a tied head is counted once)."""
        h, d = self.hidden_size, self.head_dim
        attention = h * d * (2 * self.num_attention_heads + 2 * self.num_key_value_heads) + 2 * d
        layer = attention + 3 * h * self.intermediate_size + 2 * h
        embeddings = self.vocab_size * h * (1 if self.tie_word_embeddings else 2)
        return self.num_hidden_layers * layer + embeddings + h


def _preset(h: int, inter: int, layers: int, heads: int, tied: bool) -> Qwen3Config:
    return Qwen3Config(h, inter, layers, heads, 8, tied)


# source: config.json of each model card on the Hugging Face hub (Qwen/Qwen3-*)
PRESETS = {
    "Qwen/Qwen3-0.6B": _preset(1024, 3072, 28, 16, True),
    "Qwen/Qwen3-1.7B": _preset(2048, 6144, 28, 16, True),
    "Qwen/Qwen3-4B": _preset(2560, 9728, 36, 32, True),
    "Qwen/Qwen3-8B": _preset(4096, 12288, 36, 32, False),
    "Qwen/Qwen3-14B": _preset(5120, 17408, 40, 40, False),
    "Qwen/Qwen3-32B": _preset(5120, 25600, 64, 64, False),
}


def load_config(name_or_path: str) -> Qwen3Config:
    """The config of a preset name or of a Hugging Face checkpoint folder.

    Raises UserError when the name is unknown, or the folder is not a dense Qwen3 checkpoint.
    """
    if name_or_path in PRESETS:
        return PRESETS[name_or_path]
    return config_from_dict(raw_config(name_or_path), str(Path(name_or_path) / "config.json"))


def raw_config(name_or_path: str) -> dict[str, Any]:
    """The object in a checkpoint folder's config.json; UserError if there is none, or it is not JSON."""
    path = Path(name_or_path) / "config.json"
    if not path.is_file():
        raise UserError(
            f"{name_or_path!r} is neither a preset ({', '.join(PRESETS)}) nor a folder with a "
            "config.json; give one of these names or the path of a Qwen3 checkpoint"
        )
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON ({error}); fetch the checkpoint again") from error
    if not isinstance(raw, dict):
        raise UserError(f"{path} holds no JSON object; give the folder of a Qwen3 checkpoint")
    return raw


def _yarn(scaling: Any) -> tuple[dict[str, Any] | None, Any]:
    """The stated stretch without its type, if it is YaRN's; or else what is stated that is not supported.

    transformers 5 writes `rope_parameters` with theta in it, older files `rope_scaling`.
    """
    if not isinstance(scaling, dict):
        return None, scaling
    kind, names = scaling.get("rope_type", scaling.get("type", "default")), {"rope_type", "type", "rope_theta"}
    if kind == "yarn":
        names |= {"partial_rotary_factor"}
        whole = {n: float(v) if type(v) is int and n != "original_max_position_embeddings" else v
                 for n, v in scaling.items() if n not in names and v is not None}  # fmt: skip
        return whole, scaling if scaling.get("partial_rotary_factor", 1.0) != 1.0 else None
    stated = {n for n, v in scaling.items() if v is not None and (n, v) != ("partial_rotary_factor", 1.0)}
    return None, None if kind == "default" and stated <= names else scaling


_HEAD_DIM_FROM = ("hidden_size", "num_attention_heads")


def eos_ids(raw: dict[str, Any]) -> tuple[int, ...]:
    """The end-of-sequence ids of a config.json or generation_config.json dictionary."""
    eos = raw.get("eos_token_id")
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (eos,)


def config_from_dict(raw: dict[str, Any], where: str) -> Qwen3Config:
    """A Hugging Face config dictionary as a Qwen3Config; UserError says what is not supported."""
    if raw.get("model_type") != "qwen3":
        raise UserError(
            f"{where} describes architecture {raw.get('model_type')!r}; only dense Qwen3 "
            "(model_type 'qwen3') can be built"
        )
    rope = raw.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise UserError(f"{where} has rope_parameters {rope!r}; a Qwen3 config.json has an object there")
    thetas = [theta for theta in (raw.get("rope_theta"), rope.get("rope_theta")) if theta is not None]
    if thetas[1:] and thetas[0] != thetas[1]:
        raise UserError(
            f"{where} has rope_theta {thetas[0]} and {thetas[1]} in rope_parameters; remove the one that is wrong"
        )
    if quantization := raw.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise UserError(f"{where} describes quantized weights ({method}); give the bf16 checkpoint of the model")
    yarn, scaling = _yarn(raw.get("rope_scaling") or rope)
    for key, found in (
        ("rope_scaling", scaling),
        ("attention_bias", raw.get("attention_bias")),
        ("use_sliding_window", raw.get("use_sliding_window")),
    ):
        if found:
            raise UserError(f"{where} sets {key} to {found!r}, which is not supported; use a checkpoint without it")
    if raw.get("hidden_act", "silu") != "silu":
        raise UserError(f"{where} uses activation {raw['hidden_act']!r}; Qwen3 uses 'silu'")
    values = {f.name: raw[f.name] for f in fields(Qwen3Config) if raw.get(f.name) is not None}
    values.setdefault("rope_theta", rope.get("rope_theta", 1e6))
    # the published files have the integer 1000000 here
    values |= {name: float(values[name]) for name in ("rope_theta", "rms_norm_eps") if type(values.get(name)) is int}
    values["eos_token_ids"] = eos_ids(raw)
    values["rope_scaling"] = yarn
    values.setdefault("bos_token_id", None)
    if "head_dim" not in values and all(isinstance(values.get(n), int) and values[n] > 0 for n in _HEAD_DIM_FROM):
        values["head_dim"] = values["hidden_size"] // values["num_attention_heads"]
    missing = [f.name for f in fields(Qwen3Config) if f.default is MISSING and f.name not in values]
    if missing:
        raise UserError(f"{where} lacks {', '.join(missing)}; a Qwen3 config.json has them all")
    try:
        config = read(Qwen3Config, values | {"eos_token_ids": list(values["eos_token_ids"])})
    except Wrong as wrong:
        raise UserError(f"{where}: {wrong}; give the folder of a complete Qwen3 checkpoint") from wrong
    if config.rope_scaling:
        config = replace(config, max_position_embeddings=config.rope_scaling.positions)
    if config.num_attention_heads % config.num_key_value_heads:
        raise UserError(
            f"{where} has {config.num_attention_heads} query heads over {config.num_key_value_heads} "
            "kv heads; the first must be a multiple of the second"
        )
    return config
