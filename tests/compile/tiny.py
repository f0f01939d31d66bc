"""A tiny random Qwen3 pair as Hugging Face folders, a bundle of it, and forged manifests of that."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch import Tensor

from compile.spec import BuildSpec, Recipe
from model.config import config_from_dict
from model.drafters.registry import drafter_of
from model.errors import UserError
from model.weights import RANK, Packing
from trnspec.bundle.checkpoint import Checkpoint
from trnspec.bundle.manifest import MANIFEST, canonical_hash, sha256_of
from trnspec.bundle.part import checkpoint_shapes

BASE = {
    "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512, "eos_token_id": 0,
}  # fmt: skip
_OF_RECIPE = tuple(f.name for f in dataclasses.fields(Recipe))


def write_model(folder: Path, seed: int, scale: float = 0.1, weights: bool = True, **changes: object) -> Path:
    """A checkpoint folder with config, tokenizer and, unless they are not wanted, weights."""
    folder.mkdir(parents=True)
    raw = BASE | {"num_hidden_layers": 2, "tie_word_embeddings": False} | changes
    if weights:
        generator, config = torch.Generator().manual_seed(seed), config_from_dict(raw, "tiny")
        shapes = checkpoint_shapes(config)
        tensors = {n: torch.randn(s, generator=generator) * scale + (len(s) == 1) for n, s in shapes.items()}
        save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    words = {f"w{i}": i for i in range(64)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return folder


def write_pair(base: Path) -> tuple[str, str]:
    """Target and draft folders; the draft has one layer, a tied head and another epsilon."""
    target = write_model(base / "target", 1)
    draft = write_model(base / "draft", 2, num_hidden_layers=1, tie_word_embeddings=True, rms_norm_eps=0.1)
    return str(target), str(draft)


def write_noisy_pair(base: Path) -> Path:
    """A pair of one layer whose draft is the target with noise, so that steps accept anything from none to all."""
    target, draft = (write_model(base / name, 1, num_hidden_layers=1) for name in ("target", "draft"))
    generator, tensors = torch.Generator().manual_seed(2), load_file(target / "model.safetensors")
    noisy = {n: t + 0.03 * torch.randn(t.shape, generator=generator) for n, t in tensors.items()}
    save_file(noisy, draft / "model.safetensors")
    return base


def spec(base: Path, out: str = "bundle", **changes: object) -> BuildSpec:
    """A spec of the models that write_pair(base) has written, without the draft for k 0; fields of a recipe by name.

    Prompts run in chunks of 128 rows only, for each size is a graph to trace. With `chunks=()` they have those of every
    bundle. A length above 128 has two buckets.
    """
    recipe: dict[str, Any] = {"chunks": (128,)} | {n: changes.pop(n) for n in _OF_RECIPE if n in changes}
    if (length := changes.get("max_len", 128)) != 128 and changes.get("kernels") != "nki":
        recipe = {"context_buckets": (128, length)} | recipe
    values: dict[str, Any] = {
        "target": str(base / "target"), "tp": 1, "k": "3", "batch": 2, "max_len": 128, "dtype": "fp32",
        "kernels": "reference", "out": str(base / out), "recipe": Recipe(**recipe),
    }  # fmt: skip
    changes |= {"k": str(changes.get("k", "3"))}
    if changes["k"] != "0":
        values |= {"draft": str(base / "draft")}
    return BuildSpec(**(values | changes))


def shard_of(checkpoint: Checkpoint, rank: int, tp: int, dtype: torch.dtype, packing: Packing) -> dict[str, Tensor]:
    """Every weight of one rank, put together from its pieces, and its number."""
    weights = {
        weight.name: list(checkpoint.shards(weight, tp, dtype))[rank]
        for weight in drafter_of(checkpoint.config).weights(checkpoint.config, packing)
    }
    return weights | {RANK: torch.tensor([rank], dtype=torch.int32)}


def write_manifest(bundle: Path, manifest: dict[str, Any]) -> None:
    """Write a manifest with its digest computed anew, as an author of a forged one would."""
    manifest["manifest_sha256"] = canonical_hash({n: v for n, v in manifest.items() if n != "manifest_sha256"})
    (bundle / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")


def forge(bundle: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Edit a bundle's manifest in place."""
    manifest = json.loads((bundle / MANIFEST).read_text(encoding="utf-8"))
    edit(manifest)
    write_manifest(bundle, manifest)


def relist(bundle: Path, *names: str) -> None:
    """Forge the entries of files whose content was changed."""
    actual = {n: {"sha256": sha256_of(bundle / n), "bytes": (bundle / n).stat().st_size} for n in names}
    forge(bundle, lambda manifest: [manifest["files"][name].update(entry) for name, entry in actual.items()])


def flip(file: Path, at: int = -9, bit: int = 64) -> None:
    """Flip a bit of a file."""
    content = bytearray(file.read_bytes())
    content[at] ^= bit
    file.write_bytes(content)


def refused(work: Callable[[], object], *words: str) -> None:
    """AssertionError unless the work raises a UserError of one line that has all of the words."""
    with pytest.raises(UserError) as caught:
        work()
    assert [word for word in words if word not in str(caught.value)] == [], caught.value
    assert "\n" not in str(caught.value)
