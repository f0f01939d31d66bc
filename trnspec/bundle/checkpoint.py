"""Hugging Face checkpoints: checked by name, shape and dtype, read in blocks, cut into the shards of ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from model.config import ModelConfig
from model.drafters.registry import drafter_of
from model.errors import UserError
from model.parallel import HeadMap
from model.strict import shown
from model.weights import Packing, ShardSpec, Weight
from trnspec.bundle.part import checkpoint_shapes

# bytes of a tensor that are read at a time
BLOCK_BYTES = 16 << 20
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATS, _INTEGERS = ("BF16", "F16", "F32", "F64"), ("I32", "I64")
Range = tuple[int, int]
# rows of a head that pads a rank's group
_PADDING: Range = (0, 0)


class Piece(NamedTuple):
    """Rows of a weight for one rank; its pieces follow each other."""

    rank: int
    rows: Tensor


class Checkpoint:
    """A Hugging Face checkpoint folder, checked by name, shape and dtype before any tensor is read.

    A draft's may lack tensors that its `target`'s checkpoint has for both.
    """

    def __init__(self, path: Path, config: ModelConfig, target: Checkpoint | None = None) -> None:
        self.path, self.config = path, config
        self.files, drafter = _files_of(path), drafter_of(config)
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
        integers = {w.parts[0][0] for w in drafter_of(self.config).weights(self.config, Packing()) if w.dtype}
        shapes, dtypes = list[str](), list[str]()
        for name in expected.keys() & found:
            shape, dtype = tuple(found[name].get_shape()), found[name].get_dtype()
            if shape != expected[name]:
                shapes.append(f"{name} is {shape}, expected {expected[name]}")
            if dtype not in (_INTEGERS if name in integers else _FLOATS):
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

    def pieces(self, weight: Weight, ranks: Sequence[int], tp: int, dtype: torch.dtype) -> Iterator[Piece]:
        """The shards of a weight for these of `tp` ranks; each tensor is read once. UserError names one with NaN."""
        heads = HeadMap(self.config.num_attention_heads, self.config.num_key_value_heads, tp)
        cut = [self._cut(name, shard, ranks, heads, dtype) for name, shard in weight.parts]
        if weight.pack is None:
            yield from cut[0]
            return
        parts = list[dict[int, list[Tensor]]]()
        for pieces in cut:
            parts.append({rank: [] for rank in ranks})
            for rank, rows in pieces:
                parts[-1][rank].append(rows)
        for rank in ranks:
            yield Piece(rank, weight.pack(*(torch.cat(part[rank]) for part in parts), self.config.head_dim))

    def _cut(
        self, name: str, shard: ShardSpec, ranks: Sequence[int], heads: HeadMap, dtype: torch.dtype
    ) -> Iterator[Piece]:
        """Each rank's part of a tensor, a bounded number of bytes at a time; ranks with equal parts share it."""
        shape, dim = tuple(self._tensors[name].get_shape()), self.config.head_dim
        ranges = {rank: _ranges(shape, shard, rank, heads, dim) for rank in ranks}
        if shard.axis == 1:
            for rows in self._rows(name, (0, shape[0]), dtype):
                zeros = rows.new_zeros(len(rows), dim)
                for rank, of_rank in ranges.items():
                    yield Piece(rank, torch.cat([zeros if r == _PADDING else rows[:, slice(*r)] for r in of_rank], 1))
            return
        takers: dict[tuple[Range, ...], list[int]] = {}
        for rank, of_rank in ranges.items():
            takers.setdefault(of_rank, []).append(rank)
        for of_ranks, sharing in takers.items():
            for part in of_ranks:
                padding = [torch.zeros((dim, *shape[1:]), dtype=dtype)]
                for rows in padding if part == _PADDING else self._rows(name, part, dtype):
                    yield from (Piece(rank, rows) for rank in sharing)

    def _rows(self, name: str, part: Range, dtype: torch.dtype) -> Iterator[Tensor]:
        """These rows of a tensor in blocks."""
        tensor, (start, stop) = self._tensors[name], part
        step = max(1, BLOCK_BYTES // (math.prod(tensor.get_shape()[1:]) * dtype.itemsize))
        for first in range(start, stop, step):
            rows: Tensor = tensor[first : min(first + step, stop)].to(dtype)
            # either end is NaN if any number is
            if not all(map(torch.isfinite, torch.aminmax(rows))):
                raise UserError(
                    f"{name} in {self.path} has NaN, infinity or a number beyond {dtype}; fetch the checkpoint again"
                )
            yield rows


def has_weights(path: Path) -> bool:
    """Whether a folder contains weights, or an index of them."""
    return any(any(path.glob(pattern)) for pattern in ("*.safetensors", "*.bin", _INDEX))


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


def _ranges(shape: tuple[int, ...], shard: ShardSpec, rank: int, heads: HeadMap, head_dim: int) -> tuple[Range, ...]:
    """The part of the split axis that a rank stores, or all rows."""
    if shard.axis is None:
        return ((0, shape[0]),)
    if shard.by == "even":
        size = shape[shard.axis] // heads.tp
        return ((rank * size, (rank + 1) * size),)
    of_rank = heads.queries_of(rank) if shard.by == "query" else heads.kv_of(rank)
    return tuple(_PADDING if head is None else (head * head_dim, (head + 1) * head_dim) for head in of_rank)
