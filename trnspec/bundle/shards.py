"""A rank's file of weights (safetensors): the plan gives its header, so a reader compares bytes and parses nothing.

Eight bytes with the header's length, the header as JSON, the tensors' bytes without gaps.
"""

import functools
import json
from typing import TYPE_CHECKING

import numpy as np

from model.dtypes import BY_NAME
from model.errors import UserError
from model.graph_spec import TensorSpec
from model.weights import RANK, shard_file
from trnspec.bundle.plan import BundlePlan

if TYPE_CHECKING:
    from trnspec.bundle.opening import Bundle


def shard_specs(plan: BundlePlan) -> list[TensorSpec]:
    """The tensors of a shard in the file's order: by falling size of an element, for alignment, rank numbers first."""
    specs = plan.target_weights + plan.draft_weights
    return sorted(specs, key=lambda t: (-BY_NAME[t.dtype].bytes, t.dtype != "int32", not t.name.endswith(RANK)))


def shard_header(plan: BundlePlan, rank: int) -> bytes:
    """The first bytes of a rank's file; its metadata is the rank, since all ranks have the same names and shapes."""
    text = f'{{"__metadata__":{{"rank":"{rank} of {plan.spec.tp}"}},{_tensors_json(tuple(shard_specs(plan)))}}}'
    text += " " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text.encode()


@functools.lru_cache(maxsize=2)
def _tensors_json(specs: tuple[TensorSpec, ...]) -> str:
    entries, at = list[str](), 0
    for spec in specs:
        entry = {"dtype": BY_NAME[spec.dtype].safetensors, "shape": spec.shape, "data_offsets": [at, at + spec.bytes]}
        entries.append(f"{json.dumps(spec.name)}:{json.dumps(entry, separators=(',', ':'))}")
        at += spec.bytes
    return ",".join(entries)


def shard_tensors(bundle: "Bundle", rank: int) -> dict[str, np.ndarray]:
    """The weights of a rank by name, views of the file's bytes; UserError if the file is not this rank's."""
    name, tensors = shard_file(rank), dict[str, np.ndarray]()
    content = bundle.read(name)
    if not content.startswith(header := shard_header(bundle.plan, rank)):
        raise UserError(f"{bundle.path} cannot run: {name} was cut for another model, rank or layout; build it again")
    at = len(header)
    for spec in shard_specs(bundle.plan):
        dtype = BY_NAME[spec.dtype].numpy
        tensors[spec.name] = np.frombuffer(content, dtype, spec.bytes // dtype.itemsize, at).reshape(spec.shape)
        at += spec.bytes
    return tensors
