"""The bundle that a `vllm serve` command names, and the folder with its configuration and tokenizer for vLLM."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from itertools import pairwise
from pathlib import Path

from compile.store import pull
from model.dtypes import BY_FLAG
from model.errors import UserError, guarded
from trnspec.bundle.manifest import MANIFEST
from trnspec.bundle.opening import Bundle, read_bundle

# names the bundle for the processes that vLLM starts
BUNDLE_VARIABLE = "TRNSPEC_BUNDLE"
# the folder in which the processes of a server share their metrics
METRICS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
METRICS_PREFIX = "trnspec-metrics-"
# a tokenizer without a chat template: the messages, a line each
_PLAIN_CHAT = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def cache() -> Path:
    """The folder of pulled bundles and of the model folders derived from bundles."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trnspec"


def meant_bundle(arguments: list[str]) -> Path | None:
    """The bundle that a command of `vllm` names, or None. A bundle in S3 is pulled; its folder replaces the address.

    UserError if a bundle is named and is not there, or is not of this version.
    """
    if known := os.environ.get(BUNDLE_VARIABLE):
        return read_bundle(Path(known)).path
    if arguments[:1] != ["serve"]:
        return None
    for place, argument in enumerate(arguments[1:], 1):
        if argument.startswith("s3://") and arguments[place - 1] in ("serve", "--model"):
            arguments[place] = str(_pulled(argument))
            arguments += [] if "--served-model-name" in arguments else ["--served-model-name", argument]
            return Path(arguments[place])
        if (Path(argument) / MANIFEST).is_file():
            return read_bundle(Path(argument).resolve()).path
    return None


def no_bundle(arguments: list[str]) -> UserError:
    """Why a `vllm serve` command that names no bundle cannot start."""
    named = arguments[1:2] if arguments[1:2] and not arguments[1].startswith("-") else []
    named += [after for before, after in pairwise(arguments) if before == "--model"]
    named += [argument.partition("=")[2] for argument in arguments if argument.startswith("--model=")]
    if not named:
        return UserError("the command names no bundle; write vllm serve BUNDLE, a folder that compile.build wrote")
    there = f"the folder has no {MANIFEST}" if Path(named[0]).is_dir() else "there is no such folder"
    return UserError(f"{named[0]} is no bundle: {there}; give a folder that compile.build wrote, or its s3:// address")


def _pulled(address: str) -> Path:
    # an interrupted pull goes on where it stopped; files that are there already are checked against their digests
    folder = cache() / "bundles" / hashlib.sha256(address.encode()).hexdigest()[:16]
    folder.parent.mkdir(parents=True, exist_ok=True)
    return pull(address, folder)


def model_folder(bundle: Bundle) -> Path:
    """A folder with config.json and the tokenizer's files, as vLLM expects them.

    A bundle's folder holds the files of its manifest alone, so this folder is in the cache. UserError if a file is
    damaged, or the cache refuses to hold it.
    """
    folder = cache() / "models" / bundle.manifest.digest[:16]
    guarded(lambda: _fill(folder, bundle), str(folder))
    return folder


def _fill(folder: Path, bundle: Bundle) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in bundle.files:
        if name.startswith("tokenizer/"):
            _write(folder / Path(name).name, bundle.read(name))
    _write(folder / "config.json", json.dumps(vllm_config(bundle), indent=1).encode())
    ends = {"eos_token_id": list(bundle.spec.target_config.eos_token_ids)}
    _write(folder / "generation_config.json", json.dumps(ends).encode())
    if not _has_chat_template(folder):
        _write(folder / "chat_template.jinja", _PLAIN_CHAT.encode())


def vllm_config(bundle: Bundle) -> dict[str, object]:
    """The target's configuration under the names of a Qwen3 checkpoint's config.json."""
    config = bundle.spec.target_config
    raw = dataclasses.asdict(config) | {"rope_scaling": config.rope_scaling and config.rope_scaling.stated()}
    ends = list(raw.pop("eos_token_ids"))
    return raw | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "dtype": BY_FLAG[bundle.spec.dtype].name,
        "eos_token_id": ends if len(ends) > 1 else ends[0],
    }


def _has_chat_template(folder: Path) -> bool:
    config = folder / "tokenizer_config.json"
    own = config.is_file() and "chat_template" in json.loads(config.read_bytes())
    return own or (folder / "chat_template.jinja").is_file()


def _write(file: Path, content: bytes | bytearray) -> None:
    # two servers of one bundle may start together
    part = file.with_name(f"{file.name}.{os.getpid()}")
    part.write_bytes(content)
    part.replace(file)
