"""Which bundle a `vllm serve` command means, and the folder where vLLM reads a model's configuration and tokenizer."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from compile.store import pull
from model.bundle.manifest import MANIFEST, Bundle, read_bundle

# tells the processes that vLLM starts which bundle the first one found
BUNDLE_VARIABLE = "TRNSPEC_BUNDLE"
_CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "trnspec"


def meant_bundle(arguments: Sequence[str]) -> Path | None:
    """The bundle that these arguments of `vllm` name, pulled first if it is in S3; None if they name none."""
    if known := os.environ.get(BUNDLE_VARIABLE):
        return Path(known)
    if "serve" not in arguments:
        return None
    for argument in arguments:
        if argument.startswith("s3://"):
            return _pulled(argument)
        if (Path(argument) / MANIFEST).is_file():
            return read_bundle(Path(argument)).path.resolve()
    return None


def _pulled(address: str) -> Path:
    # a pull that was interrupted goes on where it stopped; what is there already is checked by its digest
    folder = _CACHE / "bundles" / hashlib.sha256(address.encode()).hexdigest()[:16]
    print(f"trnspec: pulling {address}", file=sys.stderr)
    return pull(address, folder)


def model_folder(bundle: Bundle) -> Path:
    """A folder with config.json and the tokenizer's files, as vLLM expects them; written again at each start."""
    folder = _CACHE / "models" / hashlib.sha256(str(bundle.path).encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    for file in (bundle.path / "tokenizer").iterdir():
        shutil.copy(file, folder / file.name)
    (folder / "config.json").write_text(json.dumps(_config(bundle), indent=1), encoding="utf-8")
    return folder


def _config(bundle: Bundle) -> dict[str, object]:
    raw = dict(bundle["models"]["target"]["config"])
    ends = list(raw.pop("eos_token_ids"))
    return raw | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "dtype": "float32",
        "eos_token_id": ends if len(ends) > 1 else ends[0],
    }
