"""A safetensors file written tensor by tensor, and gone on with where an earlier run stopped.

Format: eight bytes with the header's length, the header as JSON, the tensors' bytes without gaps. The tensors come in
the order of the file, so that its sha256 is known at its end, and a part of it can be told by its length.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from model.bundle.manifest import TensorSpec
from model.bundle.weights import RANK
from model.dtypes import BY_NAME

# written between two requests to begin to put it on the disk: without them it waits for the end, and the end for it
_SYNC_BYTES = 8 << 20
_PIECE = 1 << 20


class Part(NamedTuple):
    """The beginning of a file: its bytes and their sha256."""

    bytes: int = 0
    sha256: str = ""


class ShardWriter:
    """One shard's file under construction; of a file that begins with `part`, that part is kept."""

    def __init__(self, path: Path, specs: Sequence[TensorSpec], label: dict[str, str], part: Part) -> None:
        # readers want each number at a multiple of its size; a rank's number comes before its weights
        self._specs = sorted(
            specs, key=lambda t: (-BY_NAME[t.dtype].bytes, t.dtype != "int32", not t.name.endswith(RANK))
        )
        header = _header(self._specs, label)
        ends = list(itertools.accumulate((spec.bytes for spec in self._specs), initial=len(header)))
        self._out = path.open("r+b" if path.exists() else "w+b")
        self._digest, self._bytes, self._asked, self._at = hashlib.sha256(), 0, 0, 0
        if part.bytes in ends and self._begins_with(part):
            self._at = ends.index(part.bytes)
        else:
            self._digest, self._bytes = hashlib.sha256(), 0
        self._out.seek(self._bytes)
        self._out.truncate()
        self.kept = frozenset(spec.name for spec in self._specs[: self._at])
        if not self._bytes:
            self._put(header)
        self._missing = self._next_bytes()

    def _begins_with(self, part: Part) -> bool:
        while self._bytes < part.bytes and (piece := self._out.read(min(_PIECE, part.bytes - self._bytes))):
            self._digest.update(piece)
            self._bytes += len(piece)
        return self._bytes == part.bytes and self._digest.hexdigest() == part.sha256

    def _next_bytes(self) -> int:
        return self._specs[self._at].bytes if self._at < len(self._specs) else 0

    def write(self, name: str, rows: Tensor) -> None:
        """Write the next rows of a tensor, or the first ones of the next tensor."""
        what = f"{name}: {rows.dtype} {tuple(rows.shape)}"
        assert self._missing, what
        spec = self._specs[self._at]
        announced = (spec.name, BY_NAME[spec.dtype].torch, spec.shape[1:], rows.nbytes <= self._missing)
        assert announced == (name, rows.dtype, tuple(rows.shape[1:]), True), what
        self._put(rows.contiguous().view(torch.uint8).view(-1).numpy().data)
        self._missing -= rows.nbytes
        if not self._missing:
            self._at += 1
            self._missing = self._next_bytes()

    def _put(self, content: bytes | memoryview) -> None:
        self._digest.update(content)
        self._out.write(content)
        self._bytes += len(content)
        if self._bytes - self._asked >= _SYNC_BYTES:
            os.posix_fadvise(self._out.fileno(), self._asked, self._bytes - self._asked, os.POSIX_FADV_DONTNEED)
            self._asked = self._bytes

    def part(self) -> Part:
        """What is written by now; the system has it."""
        self._out.flush()
        return Part(self._bytes, self._digest.hexdigest())

    def finish(self) -> str:
        """The sha256 of the file, which is complete."""
        short = [spec.name for spec in self._specs[self._at :]]
        assert not short, f"{short} were announced and not written"
        return self.part().sha256

    def close(self) -> None:
        """The file stays as it is."""
        self._out.close()


def _header(specs: Sequence[TensorSpec], label: dict[str, str]) -> bytes:
    header, at = dict[str, object](), 0
    for spec in specs:
        dtype, shape = BY_NAME[spec.dtype].safetensors, list(spec.shape)
        header[spec.name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + spec.bytes]}
        at += spec.bytes
    text = json.dumps({"__metadata__": label} | header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
