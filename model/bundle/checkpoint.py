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

from model.bundle.weights import RANK, Cut, hf_shapes, table
from model.config import Qwen3Config
from model.errors import UserError
from model.packing import Packing
from model.parallel import HeadMap

# of a tensor that is in memory at a time
BLOCK_BYTES = 64 << 20


class Piece(NamedTuple):
    """Rows of one weight of one rank: our name, the first row, the rows; a rank's pieces of a name follow in order."""

    rank: int
    name: str
    row: int
    rows: Tensor


class Checkpoint:
    """A Hugging Face checkpoint folder, checked by name and shape before any tensor is read."""

    def __init__(self, path: Path, config: Qwen3Config) -> None:
        self.path, self.config = path, config
        self._names = _files_of(path)
        opened = [_open(path / name) for name in self._names]
        self._where = {key: file for file in opened for key in file.keys()}  # noqa: SIM118
        files = zip(self._names, opened, strict=True)
        self._places = {key: place for name, file in files for key, place in _places(path / name, file)}
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

    def pieces(self, ranks: Sequence[int], tp: int, dtype: torch.dtype, packing: Packing) -> Iterator[Piece]:
        """Every weight of these ranks, in pieces, in one pass over the files; UserError names a tensor with NaN."""
        heads = HeadMap(self.config.num_attention_heads, self.config.num_key_value_heads, tp)
        for weight in table(self.config, packing):
            if weight.plain:
                (name, cut) = weight.parts[0]
                for rank, row, block in self._blocks(name, cut, ranks, heads):
                    yield Piece(rank, weight.ours, row, block.to(dtype))
            else:
                parts = [self._whole(name, cut, ranks, heads) for name, cut in weight.parts]
                for rank in ranks:
                    joined = weight.join(*(part[rank] for part in parts), self.config.head_dim)
                    yield Piece(rank, weight.ours, 0, joined.to(dtype))
        for rank in ranks:
            yield Piece(rank, RANK, 0, torch.tensor([rank], dtype=torch.int32))

    def _whole(self, name: str, cut: Cut, ranks: Sequence[int], heads: HeadMap) -> dict[int, Tensor]:
        blocks: dict[int, list[Tensor]] = {rank: [] for rank in ranks}
        for rank, _, block in self._blocks(name, cut, ranks, heads):
            blocks[rank].append(block)
        return {rank: torch.cat(of_rank) for rank, of_rank in blocks.items()}

    def _blocks(self, name: str, cut: Cut, ranks: Sequence[int], heads: HeadMap) -> Iterator[tuple[int, int, Tensor]]:
        """(rank, first row in its part, rows) of what each rank takes of a tensor, a bounded number of bytes at a time.

        Columns are cut for all ranks from the same rows: the file is read once for all of them.
        """
        shape, dim = tuple(self._slice(name).get_shape()), self.config.head_dim
        if cut.axis == 1:
            for first, rows in self._rows(name, 0, shape[0]):
                for rank in ranks:
                    yield rank, first, _columns(rows, cut, rank, heads, dim)
            return
        for rank in ranks:
            at = 0
            for start, stop in _ranges(shape[0], cut, rank, heads, dim):
                # a head of padding is nobody's: its rows are zeros
                read = self._rows(name, start, stop) if stop else [(0, torch.zeros((dim, *shape[1:])))]
                for _, rows in read:
                    yield rank, at, rows
                    at += len(rows)

    def _rows(self, name: str, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """(first row, rows) of a tensor, read from the file: a mapped page would stay in memory."""
        file, at, row_bytes, dtype, tail = self._places[name]
        step = max(1, BLOCK_BYTES // row_bytes)
        for first in range(start, stop, step):
            count = min(step, stop - first)
            buffer = torch.empty(count * row_bytes, dtype=torch.uint8)
            _read(file, at + first * row_bytes, buffer.numpy().data)
            rows = buffer.view(dtype).view(count, *tail)
            # a sum meets every NaN and infinity; finite values may overflow it, so a second look decides
            if not torch.isfinite(rows.sum(dtype=torch.float32)) and not torch.isfinite(rows).all():
                raise UserError(
                    f"{name} in {self.path} holds NaN or infinity; the checkpoint is damaged, fetch it again"
                )
            yield first, rows


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


def _ranges(rows: int, cut: Cut, rank: int, heads: HeadMap, head_dim: int) -> list[tuple[int, int]]:
    """The rows that a rank takes, as (start, stop); (0, 0) is a head of zeros."""
    if cut.axis is None:
        return [(0, rows)]
    if cut.by == "even":
        size = rows // heads.tp
        return [(rank * size, (rank + 1) * size)]
    wanted = heads.queries_of(rank) if cut.by == "query" else heads.kv_of(rank)
    return [(0, 0) if head is None else (head * head_dim, (head + 1) * head_dim) for head in wanted]


def _columns(rows: Tensor, cut: Cut, rank: int, heads: HeadMap, head_dim: int) -> Tensor:
    ranges = _ranges(rows.shape[1], cut, rank, heads, head_dim)
    zero = rows.new_zeros(len(rows), head_dim)
    parts = [rows[:, start:stop] if stop else zero for start, stop in ranges]
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, 1)
