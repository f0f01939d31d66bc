"""A safetensors file written tensor by tensor, and continued where an earlier run stopped.

The tensors come in the order of the file, so that its sha256 is known at its end, and a part of it by its length.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from compile.bundle.own import open_own
from model.dtypes import BY_NAME
from model.graph_spec import TensorSpec
from trnspec.bundle.manifest import File

# bytes between two requests to start writing to the disk: without them all are written at the end, which then waits
_SYNC_BYTES = 8 << 20
_PIECE = 1 << 20


class ShardWriter:
    """One shard's file under construction, its tensors in the order of `specs`; the part that an earlier run wrote is
    kept."""

    def __init__(self, path: Path, specs: Sequence[TensorSpec], header: bytes, begun: File | None) -> None:
        self._specs = specs
        ends = list(itertools.accumulate((spec.bytes for spec in self._specs), initial=len(header)))
        self._out = os.fdopen(open_own(path), "r+b")
        self._digest, self.bytes, self._asked, self._at = hashlib.sha256(), 0, 0, 0
        if begun and begun.bytes in ends and self._begins_with(begun):
            self._at = ends.index(begun.bytes)
        else:
            self._digest, self.bytes = hashlib.sha256(), 0
        self._out.seek(self.bytes)
        self._out.truncate()
        self.kept = frozenset(spec.name for spec in self._specs[: self._at])
        if not self.bytes:
            self._put(header)
        self._missing = self._next_bytes()

    def _begins_with(self, part: File) -> bool:
        while self.bytes < part.bytes and (piece := self._out.read(min(_PIECE, part.bytes - self.bytes))):
            self._digest.update(piece)
            self.bytes += len(piece)
        return self.bytes == part.bytes and self._digest.hexdigest() == part.sha256

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
        self.bytes += len(content)
        if self.bytes - self._asked >= _SYNC_BYTES:
            os.posix_fadvise(self._out.fileno(), self._asked, self.bytes - self._asked, os.POSIX_FADV_DONTNEED)
            self._asked = self.bytes

    def written(self) -> str:
        """The sha256 of the `bytes` that are written by now; the system has them."""
        self._out.flush()
        return self._digest.hexdigest()

    def finish(self) -> str:
        """The sha256 of the file, which is complete."""
        short = [spec.name for spec in self._specs[self._at :]]
        assert not short, f"{short} were announced and not written"
        return self.written()

    def close(self) -> None:
        """Close the file as it is."""
        self._out.close()
