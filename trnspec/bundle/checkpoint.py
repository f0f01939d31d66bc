"""Hugging Face checkpoints: checked by name, shape and dtype, and cut into the shards of ranks."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from model.config import ModelConfig
from model.drafters.registry import drafter_of
from model.dtypes import FP8
from model.errors import UserError
from model.fp8 import BLOCK, of_blocks, quantize
from model.parallel import HeadMap
from model.strict import shown
from model.weights import Packing, ShardSpec, Weight
from trnspec.bundle.part import checkpoint_shapes

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SCALES = "_scale_inv"
_FLOATS, _INTEGERS = ("BF16", "F16", "F32", "F64"), ("I32", "I64")


class Checkpoint:
    """A Hugging Face checkpoint folder, checked by name, shape and dtype before any tensor is read.

    A draft's may lack tensors that its `target`'s checkpoint has for both. `fp8`: projections become FP8, and may be
    FP8 in blocks of 128 x 128 with a scale each, as in Qwen's checkpoints.
    """

    def __init__(self, path: Path, config: ModelConfig, target: "Checkpoint | None" = None, fp8: bool = False) -> None:
        self.path, self.config = path, config
        self.files, drafter = _files_of(path), drafter_of(config)
        self._fp8 = fp8
        self._tensors: dict[str, Any] = {}
        for file in self.files:
            opened = _open(file)
            for key in opened.keys():  # noqa: SIM118
                if name := drafter.rename_weight(config, key):
                    if name in self._tensors:
                        raise UserError(f"checkpoint {path} has {key} in two files; fetch the checkpoint again")
                    self._tensors[name] = opened.get_slice(key)
        for name, theirs in drafter.tied_to_target.items():
            if target and name not in self._tensors:
                self._tensors[name] = target._tensors[next(n for n in theirs if n in target._tensors)]
        self._check()

    def _check(self) -> None:
        expected, found = checkpoint_shapes(self.config), self._tensors
        blocked = {name for name in expected if self._fp8 and name + _SCALES in found}
        for name in blocked:
            expected[name + _SCALES] = tuple(-(-size // BLOCK) for size in expected[name])
        integers = {w.parts[0][0] for w in drafter_of(self.config).weights(self.config, Packing()) if w.dtype}
        shapes, dtypes = list[str](), list[str]()
        for name in expected.keys() & found:
            shape, dtype = tuple(found[name].get_shape()), found[name].get_dtype()
            if shape != expected[name]:
                shapes.append(f"{name} is {shape}, expected {expected[name]}")
            if dtype not in (_INTEGERS if name in integers else ("F8_E4M3",) if name in blocked else _FLOATS):
                dtypes.append(f"{name} is {dtype}")
        for fault, names, way in (
            ("lacks", expected.keys() - found, "give the folder of a complete checkpoint that fits its config.json"),
            ("has unknown", found.keys() - expected, "give a checkpoint that fits its config.json"),
            ("has wrong shapes:", shapes, "give a checkpoint that fits its config.json"),
            ("has weights of a type that is not supported:", dtypes, "give one in bf16, fp16 or fp32, not quantized"),
        ):
            if names:
                more = f" and {len(names) - 8} more" if len(names) > 8 else ""
                raise UserError(f"checkpoint {self.path} {fault} {', '.join(sorted(names)[:8])}{more}; {way}")

    def shards(self, weight: Weight, tp: int, dtype: torch.dtype) -> Iterator[Tensor]:
        """A weight on each of `tp` ranks; its tensors are read once. UserError names one with NaN."""
        heads = HeadMap(self.config.num_attention_heads, self.config.num_key_value_heads, tp)
        quantized, dim = weight.scale or weight.dtype == FP8.name, self.config.head_dim
        read = partial(self._quantized, scale=weight.scale) if quantized else partial(self._read, dtype=dtype)
        tensors = [read(name) for name, _ in weight.parts]
        for rank in range(tp):
            cut = [_cut(x, shard, rank, heads, dim) for x, (_, shard) in zip(tensors, weight.parts, strict=True)]
            yield weight.pack(*cut, dim) if weight.pack else cut[0]

    def _read(self, name: str, dtype: torch.dtype) -> Tensor:
        tensor: Tensor = self._tensors[name][:].to(dtype)
        # either end is NaN if any number is
        if not all(map(torch.isfinite, torch.aminmax(tensor))):
            raise UserError(f"{name} in {self.path} has NaN, infinity or a number beyond {dtype}; fetch it again")
        return tensor

    def _quantized(self, name: str, scale: bool) -> Tensor:
        """A projection's FP8 numbers, or its scales (out, 1)."""
        tensor, scales = self._tensors[name][:], self._tensors.get(name + _SCALES)
        try:
            return quantize(of_blocks(tensor, scales[:]) if scales is not None else tensor)[scale]
        except ValueError as error:
            raise UserError(
                f"{name} in {self.path} {error}, and cannot be FP8; fetch it again, or build without --weights fp8"
            ) from error


def _files_of(path: Path) -> list[Path]:
    index = path / _INDEX
    if not index.is_file():
        return [path / _WEIGHTS]
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        if odd := [name for name in names if not (isinstance(name, str) and name == Path(name).name)]:
            raise ValueError(f"{shown(odd[0])} is not a file name")
        return [path / name for name in sorted(names)]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{index} is not a checkpoint index ({error}); fetch the checkpoint again") from error


def _open(file: Path) -> Any:
    if not file.is_file():
        raise UserError(f"{file} does not exist; a checkpoint folder has its weights as safetensors, with an index")
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise UserError(f"{file} is truncated or corrupted ({error}); fetch the checkpoint again") from error


def _cut(tensor: Tensor, shard: ShardSpec, rank: int, heads: HeadMap, head_dim: int) -> Tensor:
    """The part of a tensor that a rank stores; heads that pad its group are zeros."""
    if shard.axis is None:
        return tensor
    if shard.by == "even":
        return tensor.chunk(heads.tp, shard.axis)[rank]
    rows = tensor.split(head_dim, shard.axis)
    of_rank = heads.queries_of(rank) if shard.by == "query" else heads.kv_of(rank)
    return torch.cat([torch.zeros_like(rows[0]) if head is None else rows[head] for head in of_rank], shard.axis)
