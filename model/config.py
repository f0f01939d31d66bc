"""Configurations: frozen values in the names of Hugging Face's config.json, the published family, and their reader."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from model.errors import UserError
from model.strict import Length, Range, ValidationError, read, shown

C = TypeVar("C")
# the largest file of a checkpoint that is read at once; Qwen3's tokenizer.json has 11 MB
_MAX_BYTES = 128 * 1024**2


@dataclass(frozen=True)
class Yarn:
    """YaRN's scaling of the rotary positions; `model/rope.py` applies it."""

    factor: Annotated[float, Range(1, 1024)]
    original_max_position_embeddings: Annotated[int, Range(1, 2**24)]
    beta_fast: Annotated[float, Range(1e-3, 1e6)] = 32.0
    beta_slow: Annotated[float, Range(1e-3, 1e6)] = 1.0
    attention_factor: Annotated[float | None, Range(1e-3, 1e3)] = None
    # DeepSeek-R1-0528-Qwen3-8B has it; neither vLLM 0.32 (get_rope) nor transformers 5 applies it, and so do we
    attn_factor: Annotated[float | None, Range(1e-3, 1e3)] = None

    def as_hf(self) -> dict[str, Any]:
        """The object of a config.json."""
        return {"rope_type": "yarn"} | {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The fields of every model, a target or a draft; `head_size` names the size that the ranks of the head divide."""

    hidden_size: Annotated[int, Range(1, 1 << 17)]
    intermediate_size: Annotated[int, Range(1, 1 << 20)]
    num_hidden_layers: Annotated[int, Range(1, 512)]
    num_attention_heads: Annotated[int, Range(1, 1024)]
    num_key_value_heads: Annotated[int, Range(1, 1024)]
    head_dim: Annotated[int, Range(2, 1024, step=2)]
    vocab_size: Annotated[int, Range(1, 1 << 22)]
    rope_theta: Annotated[float, Range(1, 1e12)] = 1e6
    rms_norm_eps: Annotated[float, Range(1e-12, 1)] = 1e-6
    max_position_embeddings: Annotated[int, Range(1, 2**24)] = 40960
    head_size: ClassVar[str] = "vocab_size"


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(ModelConfig):
    """The shape of one dense Qwen3 model."""

    tie_word_embeddings: bool
    bos_token_id: Annotated[int | None, Range(0, 1 << 31)] = 151643
    eos_token_ids: Annotated[tuple[int, ...], Length(0, 64), Range(0, 1 << 31)] = (151645, 151643)
    rope_scaling: Yarn | None = None


def _preset(h: int, inter: int, layers: int, heads: int, tied: bool) -> Qwen3Config:
    return Qwen3Config(
        hidden_size=h, intermediate_size=inter, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=tied,
    )  # fmt: skip


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
    """The config of a preset or of a checkpoint folder; UserError for an unknown name or a model other than Qwen3.

    Its end ids are those of config.json and of generation_config.json.
    """
    if name_or_path in PRESETS:
        return PRESETS[name_or_path]
    folder, raw = Path(name_or_path), raw_config(name_or_path)
    eos = _eos_ids(raw, folder / "config.json")
    if (generation := folder / "generation_config.json").is_file():
        eos += [i for i in _eos_ids(read_object(generation), generation) if i not in eos]
    return config_from_dict(raw | {"eos_token_id": eos}, str(folder / "config.json"))


def raw_config(name_or_path: str) -> dict[str, Any]:
    """The object in a checkpoint folder's config.json; UserError if there is none, or it is not JSON."""
    path = Path(name_or_path) / "config.json"
    if path.with_name("adapter_config.json").is_file():
        raise UserError(f"{name_or_path} is an adapter; merge it into its base model, and give the merged checkpoint")
    if not path.is_file():
        raise UserError(
            f"{name_or_path!r} is neither a preset ({', '.join(PRESETS)}) nor a folder with a "
            "config.json; give one of these names or the path of a Qwen3 checkpoint"
        )
    return read_object(path)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a checkpoint; UserError if it is not one."""
    try:
        raw = json.loads(read_file(path).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON ({error}); download the checkpoint again") from error
    if not isinstance(raw, dict):
        raise UserError(f"{path} is not a JSON object; download the checkpoint again")
    return raw


def read_file(path: Path) -> bytes:
    """The content of a small file; UserError for a large one, or if it is not a regular file."""
    if not path.is_file():
        raise UserError(f"{path} is not a file; give an existing one")
    with path.open("rb") as file:
        content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise UserError(f"{path} has more than {_MAX_BYTES // 1024**2} MiB; correct it or download it again")
    return content


def _eos_ids(raw: Mapping[str, Any], path: Path) -> list[int]:
    """The end ids of a config.json or a generation_config.json: one, a list, or none."""
    eos = raw.get("eos_token_id")
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if wrong := [i for i in ids if type(i) is not int or i < 0]:
        raise UserError(f"{path} has eos_token_id {shown(wrong[0])}; an id, a list of ids or null is supported")
    return ids


def read_config(cls: type[C], values: Mapping[str, Any], where: str, what: str) -> C:
    """A configuration from its fields in `values`; UserError names the first field that is not as declared."""
    known = {f.name: values[f.name] for f in fields(cls) if values.get(f.name) is not None}  # type: ignore[arg-type]
    hidden, heads = values.get("hidden_size"), values.get("num_attention_heads")
    if type(hidden) is int and type(heads) is int and heads > 0:
        known.setdefault("head_dim", hidden // heads)
    try:
        return read(cls, known)
    except ValidationError as error:
        raise UserError(f"{where}: {error}; give the folder of a complete {what}") from error


def refuse_settings(raw: Mapping[str, Any], supported: Mapping[str, tuple[Any, ...]], where: str) -> None:
    """Raise UserError for the first setting whose value is none of the supported ones; null is no value."""
    for name, values in supported.items():
        if (value := raw.get(name)) is not None and value not in values:
            plain = " or ".join(map(repr, values)) or "a checkpoint without it"
            raise UserError(f"{where} sets {name} to {value!r}, which is not supported; use {plain}")


def config_from_dict(
    raw: dict[str, Any], where: str, cls: type[Qwen3Config] = Qwen3Config, what: str = "Qwen3 checkpoint"
) -> Qwen3Config:
    """A Hugging Face config dictionary as a configuration; UserError says what is not supported."""
    plain = {"model_type": ("qwen3",), "attention_bias": (False,), "use_sliding_window": (False,)}
    refuse_settings({"model_type": "none"} | raw, plain | {"hidden_act": ("silu",)}, where)
    # transformers 5 writes `rope_parameters` with theta in it, older files `rope_scaling`
    rope = raw.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise UserError(f"{where} has rope_parameters {rope!r}; a Qwen3 config.json has an object there")
    thetas = [theta for theta in (raw.get("rope_theta"), rope.get("rope_theta")) if theta is not None]
    scalings = [_yarn(scaling, where) for scaling in (raw.get("rope_scaling"), rope) if scaling]
    for name, values_of in {"rope_theta": thetas, "rope_scaling": scalings}.items():
        if values_of[1:] and values_of[0] != values_of[1]:
            raise UserError(f"{where} has {name} and a different value in rope_parameters; remove the wrong one")
    if not thetas:
        raise UserError(f"{where} has no rope_theta; add the value of its training, 1000000 in Qwen's checkpoints")
    if quantization := raw.get("quantization_config") or raw.get("compression_config"):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        # the blocks of Qwen's FP8 checkpoints: --weights fp8 reads them, and a Checkpoint refuses them without
        if method != "fp8" or quantization.get("weight_block_size") != [128, 128]:
            raise UserError(f"{where} describes quantized weights ({method}); give the bf16 checkpoint of the model")
    values: dict[str, Any] = {"rope_theta": thetas[0], "rope_scaling": next(iter(scalings), None)}
    # the defaults of transformers' Qwen3Config
    values = {"head_dim": 128, "tie_word_embeddings": False} | raw | values
    values["eos_token_ids"] = _eos_ids(raw, Path(where))
    config = read_config(cls, values, where, what)
    # an id beyond the vocabulary is never sampled
    config = replace(config, eos_token_ids=tuple(i for i in config.eos_token_ids if i < config.vocab_size))
    if raw.get("bos_token_id") is None:
        config = replace(config, bos_token_id=None)
    if yarn := config.rope_scaling:
        # config.json may have the number before the scaling
        positions = int(yarn.factor * yarn.original_max_position_embeddings)
        config = replace(config, max_position_embeddings=positions)
    if config.num_attention_heads % config.num_key_value_heads:
        raise UserError(
            f"{where} has {config.num_attention_heads} query heads over {config.num_key_value_heads} "
            "kv heads; the first must be a multiple of the second"
        )
    return config


def _yarn(scaling: Any, where: str) -> dict[str, Any] | None:
    """The fields of YaRN's scaling, None without one; UserError for every other scaling."""
    values = dict(scaling) if isinstance(scaling, dict) else {"type": scaling}
    values = {name: value for name, value in values.items() if value is not None and name != "rope_theta"}
    kind = values.pop("rope_type", values.pop("type", "default"))
    partial = values.pop("partial_rotary_factor", 1.0)
    if partial != 1.0 or kind not in ("yarn", "default") or (kind == "default" and values):
        raise UserError(
            f"{where} sets rope_scaling to {scaling!r}, which is not supported; use a checkpoint without it"
        )
    return values if kind == "yarn" else None
