"""A safetensors file written a few rows at a time: a shard of any size needs the memory of a few rows.

Format: eight bytes with the header's length, the header as JSON, the tensors' bytes without gaps.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.bundle.manifest import TensorSpec
from model.dtypes import BY_NAME


class ShardWriter:
    """One shard's file under construction; its header announces every tensor before the first one comes."""

    def __init__(self, path: Path, specs: Sequence[TensorSpec], label: dict[str, str]) -> None:
        self._places, self._missing, at = dict[str, tuple[TensorSpec, int]](), dict[str, int](), 0
        header = dict[str, Any]()
        # wide numbers first: readers want each at a multiple of its size
        for spec in sorted(specs, key=lambda t: -BY_NAME[t.dtype].bytes):
            dtype, shape = BY_NAME[spec.dtype].safetensors, list(spec.shape)
            header[spec.name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + spec.bytes]}
            self._places[spec.name], self._missing[spec.name] = (spec, at), spec.bytes
            at += spec.bytes
        text = json.dumps({"__metadata__": label} | header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._start, self._out = 8 + len(text), path.open("wb")
        self._out.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, first_row: int, rows: Tensor) -> None:
        """Write rows of a tensor, from a row on; each row comes once."""
        spec, at = self._places[name]
        announced = (BY_NAME[spec.dtype].torch, spec.shape[1:], first_row + len(rows) <= spec.shape[0])
        assert announced == (rows.dtype, tuple(rows.shape[1:]), True), f"{name}: {rows.dtype} {tuple(rows.shape)}"
        row_bytes = spec.bytes // spec.shape[0]
        self._out.seek(self._start + at + first_row * row_bytes)
        self._out.write(rows.contiguous().view(torch.uint8).numpy().data)
        self._missing[name] -= len(rows) * row_bytes

    def close(self) -> None:
        """The file is complete."""
        self._out.close()
        short = sorted(name for name, count in self._missing.items() if count)
        assert not short, f"{short} were announced and not written"

    def abandon(self) -> None:
        """The file stays as it is, unfinished."""
        self._out.close()
