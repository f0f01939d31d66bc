"""A safetensors file written one tensor at a time: a shard of any size needs the memory of its largest tensor.

Format: eight bytes with the header's length, the header as JSON, the tensors' bytes without gaps.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.bundle.manifest import TensorSpec
from model.dtypes import BY_NAME, DTYPES

_BY_TORCH = {d.torch: d for d in DTYPES}


def write_shard(
    path: Path, specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, Tensor]], label: dict[str, str]
) -> None:
    """Write the tensors, in any order, each once, with the shapes and dtypes that `specs` announce, and the label."""
    header, at = dict[str, Any](), 0
    # wide numbers first: readers want each at a multiple of its size
    for spec in sorted(specs, key=lambda t: -BY_NAME[t.dtype].bytes):
        offsets = [at, at := at + spec.bytes]
        stored = BY_NAME[spec.dtype].safetensors
        header[spec.name] = {"dtype": stored, "shape": list(spec.shape), "data_offsets": offsets}
    text = json.dumps({"__metadata__": label} | header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors:
            announced = header.pop(name)
            found = {"dtype": _BY_TORCH[tensor.dtype].safetensors, "shape": list(tensor.shape)}
            assert announced == found | {"data_offsets": announced["data_offsets"]}, f"{name}: {found}"
            out.seek(8 + len(text) + announced["data_offsets"][0])
            out.write(tensor.contiguous().view(torch.uint8).numpy().data)
    assert not header, f"{sorted(header)} were announced and not written"
