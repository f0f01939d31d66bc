"""Hugging Face checkpoints: read by name and shape, cut for each rank, tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from model.bundle.weights import RANK, Cut, hf_shapes, table
from model.config import Qwen3Config
from model.errors import UserError
from model.packing import Packing
from model.parallel import HeadMap


class Checkpoint:
    """A Hugging Face checkpoint folder, checked by name and shape before any tensor is read."""

    def __init__(self, path: Path, config: Qwen3Config) -> None:
        self.path, self.config = path, config
        self._names = _files_of(path)
        opened = [_open(path / name) for name in self._names]
        self._where = {key: file for file in opened for key in file.keys()}  # noqa: SIM118
        self._check()

    def _check(self) -> None:
        expected, found = hf_shapes(self.config), set(self._where)
        if self.config.tie_word_embeddings:
            found.discard("lm_head.weight")
        missing, extra = sorted(expected.keys() - found), sorted(found - expected.keys())
        wrong = [
            f"{n} is {tuple(self._slice(n).get_shape())}, expected {s}"
            for n, s in expected.items()
            if n in found and tuple(self._slice(n).get_shape()) != s
        ]
        for kind, names in (("lacks", missing), ("has unknown", extra), ("has wrong shapes:", wrong)):
            if names:
                more = f" and {len(names) - 8} more" if len(names) > 8 else ""
                raise UserError(
                    f"checkpoint {self.path} {kind} {', '.join(names[:8])}{more}; "
                    "give the folder of a complete checkpoint that fits its config.json"
                )

    def identity(self) -> list[tuple[str, int, int]]:
        """What tells one state of the checkpoint's files from another: name, bytes, time of change."""
        stats = [(name, (self.path / name).stat()) for name in self._names]
        return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]

    def _slice(self, name: str) -> Any:
        return self._where[name].get_slice(name)

    def shard(self, rank: int, tp: int, dtype: torch.dtype, packing: Packing) -> Iterator[tuple[str, Tensor]]:
        """(our name, tensor) of every weight of one rank; UserError names a tensor with NaN."""
        heads = HeadMap(self.config.num_attention_heads, self.config.num_key_value_heads, tp)
        for weight in table(self.config, packing):
            parts = [self._part(name, cut, rank, heads) for name, cut in weight.parts]
            # a copy: safetensors refuses the two cuts of a tied tensor to share memory
            yield weight.ours, weight.join(*parts, self.config.head_dim).to(dtype, copy=True).contiguous()
        yield RANK, torch.tensor([rank], dtype=torch.int32)

    def _part(self, name: str, cut: Cut, rank: int, heads: HeadMap) -> Tensor:
        try:
            tensor = _cut(self._slice(name), cut, rank, heads, self.config.head_dim)
        except SafetensorError as error:
            raise UserError(f"{name} in {self.path} cannot be read ({error}); fetch the checkpoint again") from error
        if not torch.isfinite(tensor).all():
            raise UserError(f"{name} in {self.path} holds NaN or infinity; the checkpoint is damaged, fetch it again")
        return tensor


def _files_of(path: Path) -> list[str]:
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return ["model.safetensors"]
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} is not a checkpoint index ({error}); fetch the checkpoint again") from error


def _open(file: Path) -> Any:
    if not file.is_file():
        raise UserError(f"{file} does not exist; a checkpoint folder holds its weights as safetensors")
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise UserError(f"{file} is truncated or corrupted ({error}); fetch the checkpoint again") from error


def _cut(slice_: Any, cut: Cut, rank: int, heads: HeadMap, head_dim: int) -> Tensor:
    def take(start: int, stop: int) -> Tensor:
        part: Tensor = slice_[start:stop] if cut.axis == 0 else slice_[:, start:stop]
        return part

    if cut.axis is None:
        whole: Tensor = slice_[:]
        return whole
    if cut.by == "even":
        size = slice_.get_shape()[cut.axis] // heads.tp
        return take(rank * size, (rank + 1) * size)
    wanted = heads.queries_of(rank) if cut.by == "query" else heads.kv_of(rank)
    zero = torch.zeros_like(take(0, head_dim)) if None in wanted else None
    parts = [zero if h is None else take(h * head_dim, (h + 1) * head_dim) for h in wanted]
    return torch.cat([p for p in parts if p is not None], cut.axis)
