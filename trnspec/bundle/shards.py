"""A rank's file of weights: its header follows from the plan, so a loader compares it byte by byte and parses nothing.

Format of safetensors: eight bytes with the header's length, the header as JSON, the tensors' bytes without gaps.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np

from model.dtypes import BY_NAME
from model.errors import UserError
from model.graph_spec import TensorSpec
from model.weights import RANK, shard_file
from trnspec.bundle.manifest import canonical_hash
from trnspec.bundle.opening import Bundle
from trnspec.bundle.plan import BundlePlan


def shard_specs(plan: BundlePlan) -> list[TensorSpec]:
    """The tensors of a shard in its file's order.

    Readers want each number at a multiple of its size; a rank's number comes before its weights.
    """
    specs = plan.target_weights + plan.draft_weights
    return sorted(specs, key=lambda t: (-BY_NAME[t.dtype].bytes, t.dtype != "int32", not t.name.endswith(RANK)))


def shard_header(plan: BundlePlan, rank: int) -> bytes:
    """The first bytes of a rank's file: names, shapes, dtypes, and a label of the models, their split and the rank.

    Shards of a different rank or model may have the same names; only the label tells them apart before a run.
    """
    spec = plan.spec
    split = [p.ranks for p in spec.parts], [p.head_ranks for p in spec.parts], [list(p.packing) for p in spec.parts]
    layout = canonical_hash([[repr(p.config) for p in spec.parts], split, spec.tp, spec.dtype])
    header, at = dict[str, object](), 0
    for tensor in shard_specs(plan):
        shape = list(tensor.shape)
        header[tensor.name] = {
            "dtype": BY_NAME[tensor.dtype].safetensors,
            "shape": shape,
            "data_offsets": [at, at + tensor.bytes],
        }
        at += tensor.bytes
    label = {"cut": f"rank {rank} of layout {layout[:16]}"}
    text = json.dumps({"__metadata__": label} | header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def shard_fault(content: bytes | bytearray, plan: BundlePlan, rank: int) -> str:
    """Why a file's bytes are not this rank's shard of this plan, as the end of a sentence; "" if they are."""
    header = shard_header(plan, rank)
    if content[: len(header)] != header:
        return "was cut for another model, rank or layout"
    size = len(header) + sum(t.bytes for t in shard_specs(plan))
    if len(content) != size:
        return f"has {len(content)} bytes, its tensors need {size}"
    # NaN and infinities have all bits of the exponent
    for name, array in _tensors(content, plan, len(header)):
        if array.dtype != np.int32 and not np.isfinite(array.astype(np.float32)).all():
            return f"holds a NaN or an infinity in {name}"
    return ""


def shard_tensors(bundle: Bundle, rank: int) -> dict[str, np.ndarray]:
    """The weights of a rank by name, checked; UserError names the file's fault."""
    name = shard_file(rank)
    content = bundle.read(name)
    if clause := shard_fault(content, bundle.plan, rank):
        raise UserError(f"{bundle.path} cannot run: {name} {clause}; build the bundle again")
    return dict(_tensors(content, bundle.plan, len(shard_header(bundle.plan, rank))))


def _tensors(content: bytes | bytearray, plan: BundlePlan, at: int) -> Iterator[tuple[str, np.ndarray]]:
    for tensor in shard_specs(plan):
        dtype = BY_NAME[tensor.dtype].numpy
        yield tensor.name, np.frombuffer(content, dtype, tensor.bytes // dtype.itemsize, at).reshape(tensor.shape)
        at += tensor.bytes
