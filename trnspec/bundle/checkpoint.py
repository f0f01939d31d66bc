"""Hugging Face checkpoints: read by name and shape, cut for each rank, block by block."""

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
from model.cut import Cut, Weight
from model.drafters.registry import model_of
from model.errors import UserError
from model.parallel import HeadMap
from model.strict import shown
from trnspec.bundle.blocks import Blocks
from trnspec.bundle.part import checkpoint_shapes

# bytes of a tensor that are read at a time
BLOCK_BYTES = 16 << 20
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


class Piece(NamedTuple):
    """Rows of a weight that one rank takes; its pieces follow each other."""

    rank: int
    rows: Tensor


class Checkpoint:
    """A Hugging Face checkpoint folder, checked by name and shape before any tensor is read.

    A draft's may lack a tensor that `target`, its target's, lends it.
    """

    def __init__(self, path: Path, config: ModelConfig, target: Checkpoint | None = None) -> None:
        self.path, self.config, self._memory = path, config, Blocks()
        self._names, model = _files_of(path), model_of(config)
        opened = [_open(path / name) for name in self._names]
        stored = {key: file for file in opened for key in file.keys()}  # noqa: SIM118
        files = zip(self._names, opened, strict=True)
        places = {key: place for name, file in files for key, place in _places(path / name, file)}
        known = {key: ours for key in stored if (ours := model.stored_as(config, key))}
        self._where = {ours: stored[key].get_slice(key) for key, ours in known.items()}
        self._places = {ours: places[key] for key, ours in known.items()}
        for own, theirs in model.lent.items():
            if target and own not in self._where:
                name = next(name for name in theirs if name in target._where)
                self._where[own], self._places[own] = target._where[name], target._places[name]
        self._check()

    def _check(self) -> None:
        expected, found = checkpoint_shapes(self.config), set(self._where)
        missing, extra = sorted(expected.keys() - found), sorted(found - expected.keys())
        wrong = [
            f"{n} is {tuple(self._where[n].get_shape())}, expected {s}"
            for n, s in expected.items()
            if n in found and tuple(self._where[n].get_shape()) != s
        ]
        for kind, names in (("lacks", missing), ("has unknown", extra), ("has wrong shapes:", wrong)):
            if names:
                more = f" and {len(names) - 8} more" if len(names) > 8 else ""
                raise UserError(
                    f"checkpoint {self.path} {kind} {', '.join(names[:8])}{more}; "
                    "give the folder of a complete checkpoint that fits its config.json"
                )

    @property
    def files(self) -> list[Path]:
        """The files that hold the weights."""
        return [self.path / name for name in self._names]

    def pieces(self, weight: Weight, ranks: Sequence[int], tp: int, dtype: torch.dtype) -> Iterator[Piece]:
        """The parts of a weight for these of `tp` ranks; each tensor is read once. UserError names one with NaN."""
        heads = HeadMap(self.config.num_attention_heads, self.config.num_key_value_heads, tp)
        if weight.plain:
            yield from self._cut(*weight.parts[0], ranks, heads, dtype)
            return
        parts = [self._whole(name, cut, ranks, heads, dtype) for name, cut in weight.parts]
        for rank in ranks:
            yield Piece(rank, weight.join(*(part[rank] for part in parts), self.config.head_dim))

    def _whole(
        self, name: str, cut: Cut, ranks: Sequence[int], heads: HeadMap, dtype: torch.dtype
    ) -> dict[int, Tensor]:
        blocks: dict[int, list[Tensor]] = {rank: [] for rank in ranks}
        for rank, rows in self._cut(name, cut, ranks, heads, dtype):
            blocks[rank].append(rows)
        return {rank: torch.cat(of_rank) for rank, of_rank in blocks.items()}

    def _cut(self, name: str, cut: Cut, ranks: Sequence[int], heads: HeadMap, dtype: torch.dtype) -> Iterator[Piece]:
        """Each rank's part of a tensor, a bounded number of bytes at a time; ranks with equal parts share it."""
        shape, dim = tuple(self._where[name].get_shape()), self.config.head_dim
        if cut.axis == 1:
            taken = {rank: _ranges(shape[1], cut, rank, heads, dim) for rank in ranks}
            for rows in self._rows(name, 0, shape[0], dtype):
                yield from (Piece(rank, self._columns(rows, columns)) for rank, columns in taken.items())
            return
        takers: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for rank in ranks:
            takers.setdefault(tuple(_ranges(shape[0], cut, rank, heads, dim)), []).append(rank)
        # no checkpoint has a head of padding: its rows are zeros
        zeros = torch.zeros((dim, *shape[1:]), dtype=dtype)
        for ranges, takers_of_it in takers.items():
            for start, stop in ranges:
                for rows in self._rows(name, start, stop, dtype) if stop else [zeros]:
                    yield from (Piece(rank, rows) for rank in takers_of_it)

    def _rows(self, name: str, start: int, stop: int, dtype: torch.dtype) -> Iterator[Tensor]:
        """Rows of a tensor in blocks, read from the file: a mapped page would stay in memory."""
        file, at, row_bytes, stored, tail = self._places[name]
        step = max(1, BLOCK_BYTES // row_bytes)
        for first in range(start, stop, step):
            count = min(step, stop - first)
            buffer = self._memory.empty(count * row_bytes)
            _read(file, at + first * row_bytes, buffer.numpy().data)
            rows = buffer.view(stored).view(count, *tail)
            # either end is NaN if any number is
            if not all(map(torch.isfinite, torch.aminmax(rows))):
                raise UserError(
                    f"{name} in {self.path} holds NaN or infinity; the checkpoint is damaged, fetch it again"
                )
            yield rows.to(dtype)

    def _columns(self, rows: Tensor, ranges: list[tuple[int, int]]) -> Tensor:
        """These columns of rows, side by side; those of a head of padding are zeros."""
        dim, count = self.config.head_dim, len(rows)
        width = sum(stop - start or dim for start, stop in ranges)
        cut = self._memory.empty(count * width * rows.itemsize).view(rows.dtype).view(count, width)
        at = 0
        for start, stop in ranges:
            part = cut[:, at : (at := at + (stop - start or dim))]
            if stop:
                part.copy_(rows[:, start:stop])
            else:
                part.zero_()
        return cut


def has_weights(path: Path) -> bool:
    """Whether a folder is meant to hold weights: it has them, or an index of them."""
    return any((path / name).is_file() for name in (_WEIGHTS, _INDEX))


def _files_of(path: Path) -> list[str]:
    index = path / _INDEX
    if not index.is_file():
        return [_WEIGHTS]
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        if odd := [name for name in names if not (isinstance(name, str) and name == Path(name).name)]:
            raise ValueError(f"{shown(odd[0])} is not a file name")
        return sorted(names)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{index} is not a checkpoint index ({error}); fetch the checkpoint again") from error


def _open(file: Path) -> Any:
    if not file.is_file():
        raise UserError(f"{file} does not exist; a checkpoint folder holds its weights as safetensors")
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise UserError(f"{file} is truncated or corrupted ({error}); fetch the checkpoint again") from error


def _places(file: Path, opened: Any) -> Iterator[tuple[str, tuple[Path, int, int, torch.dtype, tuple[int, ...]]]]:
    """Name -> where each tensor of a safetensors file lies: file, offset, bytes of a row, dtype, shape of a row."""
    with file.open("rb") as raw:
        length = int.from_bytes(raw.read(8), "little")
        header = json.loads(raw.read(length))
    for name in opened.keys():  # noqa: SIM118
        slice_ = opened.get_slice(name)
        dtype, tail = slice_[0:0].dtype, tuple(slice_.get_shape()[1:])
        yield name, (file, 8 + length + header[name]["data_offsets"][0], math.prod(tail) * dtype.itemsize, dtype, tail)


def _read(file: Path, offset: int, into: memoryview) -> None:
    with file.open("rb", buffering=0) as raw:
        raw.seek(offset)
        done = 0
        while done < len(into):
            count = raw.readinto(into[done:])
            if not count:
                raise UserError(f"{file} became shorter while it was read; fetch the checkpoint again")
            done += count


def _ranges(size: int, cut: Cut, rank: int, heads: HeadMap, head_dim: int) -> list[tuple[int, int]]:
    """The part of an axis that a rank takes, as (start, stop); (0, 0) is a head of zeros."""
    if cut.axis is None:
        return [(0, size)]
    if cut.by in ("even", "id"):
        size = size // heads.tp
        return [(rank * size, (rank + 1) * size)]
    wanted = heads.queries_of(rank) if cut.by == "query" else heads.kv_of(rank)
    return [(0, 0) if head is None else (head * head_dim, (head + 1) * head_dim) for head in wanted]
