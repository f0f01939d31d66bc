"""The bundle that a `vllm serve` command names, and the folder with its configuration and tokenizer for vLLM."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

from model.config import read_file, read_object
from model.dtypes import BY_FLAG
from model.errors import UserError, guarded
from trnspec.bundle.manifest import FORMAT, MANIFEST
from trnspec.bundle.opening import Bundle, read_bundle

# names the bundle, and its manifest's digest, for the processes that vLLM starts
BUNDLE_VARIABLE, DIGEST_VARIABLE = "TRNSPEC_BUNDLE", "TRNSPEC_BUNDLE_DIGEST"
# the folder in which the processes of a server share their metrics
METRICS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
METRICS_PREFIX = "trnspec-metrics-"
# for a tokenizer without a chat template: one message a line
_PLAIN_CHAT = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def find_bundle_arg(arguments: list[str]) -> Path | None:
    """The bundle that a command names, or None; UserError for a manifest of another version and for S3."""
    if known := os.environ.get(BUNDLE_VARIABLE):
        return Path(known)
    model = _model_arg(arguments)
    if model.startswith("s3://"):
        raise UserError(f"{model} is in S3; pull it first: python -m compile.store pull {model} FOLDER")
    # other tools write a file of this name
    manifest = Path(model) / MANIFEST
    ours = model and manifest.is_file() and FORMAT.encode() in guarded(lambda: read_file(manifest), str(manifest))
    return read_bundle(Path(model).resolve()).path if ours else None


def no_bundle(arguments: list[str]) -> UserError:
    """Why a `vllm serve` command that names no bundle cannot start."""
    if not (model := _model_arg(arguments)):
        return UserError("the command names no bundle; write vllm serve BUNDLE, a folder that compile.build wrote")
    reason = f"the folder has no {MANIFEST} of a bundle" if Path(model).is_dir() else "there is no such folder"
    return UserError(f"{model} is no bundle: {reason}; give a folder that compile.build wrote")


def _model_arg(arguments: list[str]) -> str:
    """The model of a `vllm serve` command; "" where it names none."""
    if arguments[:1] != ["serve"]:
        return ""
    if arguments[1:2] and not arguments[1].startswith("-"):
        return arguments[1]
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if argument == "--model" or argument.startswith("--model="):
            return following if argument == "--model" else argument.partition("=")[2]
    return ""


def model_folder(bundle: Bundle) -> Path:
    """A folder with config.json and the tokenizer, as vLLM expects them; UserError if it cannot be written."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "trnspec/models" / bundle.manifest.digest[:16]
    guarded(lambda: _fill(folder, bundle), str(folder))
    return folder


def _fill(folder: Path, bundle: Bundle) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in bundle.files:
        if name.startswith("tokenizer/"):
            _write(folder / Path(name).name, bundle.read(name))
    _write(folder / "config.json", json.dumps(hf_config(bundle), indent=1).encode())
    # the checkpoint's sampling defaults; the bundle has the end ids of both of its configurations
    generation, eos = folder / "generation_config.json", list(bundle.spec.target_config.eos_token_ids)
    defaults = read_object(generation) if "tokenizer/generation_config.json" in bundle.files else {}
    _write(generation, json.dumps(defaults | {"eos_token_id": eos or None}).encode())
    config, template = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    in_config = config.is_file() and "chat_template" in read_object(config)
    if not in_config and not template.is_file():
        _write(template, _PLAIN_CHAT.encode())


def hf_config(bundle: Bundle) -> dict[str, object]:
    """The target's configuration under the names of a Qwen3 checkpoint's config.json."""
    config = bundle.spec.target_config
    raw = dataclasses.asdict(config) | {"rope_scaling": config.rope_scaling and config.rope_scaling.as_hf()}
    eos = list(raw.pop("eos_token_ids"))
    return raw | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "dtype": BY_FLAG[bundle.spec.dtype].name,
        "eos_token_id": eos if len(eos) > 1 else next(iter(eos), None),
    }


def _write(file: Path, content: bytes | bytearray) -> None:
    # two servers of one bundle may start at the same time
    part = file.with_name(f"{file.name}.{os.getpid()}")
    part.write_bytes(content)
    part.replace(file)
