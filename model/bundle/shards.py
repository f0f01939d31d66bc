"""A bundle's weight files against its graphs: ranks, names, shapes and dtypes, from the files' headers alone.

Nothing else notices shards of another rank, tp, model or layout before a graph has run on them: two ranks' files have
one set of names, and an engine takes whatever has these.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from safetensors import SafetensorError, safe_open

from model.bundle.manifest import Bundle, TensorSpec
from model.bundle.weights import shard_file
from model.dtypes import BY_SAFETENSORS


def cut_label(layout: dict[str, Any], rank: int) -> dict[str, str]:
    """What a shard's file says about itself: the manifest's layout of weights, and the rank that it was cut for.

    One entry, because a header's entries come in another order in every file.
    """
    return {"cut": json.dumps(layout | {"rank": rank}, sort_keys=True)}


def faults(bundle: Bundle) -> Iterator[str]:
    """A clause for each file of weights that was cut for other graphs than the bundle's, the first difference each."""
    wanted = {t.name: t for graph in bundle.graphs for t in graph.weights}
    tp, ranks = bundle["tp"], bundle["weights"]["ranks"]
    if ranks != tp:
        yield f"its weights were cut for {ranks} ranks and its graphs for {tp}"
    for rank in range(tp):
        try:
            found, label = _header(bundle, rank)
        except (OSError, SafetensorError) as error:
            yield f"{shard_file(rank)} cannot be read ({error})"
            continue
        differences = [*(_differences(wanted, found) if wanted else ()), *_other_cut(label, bundle["weights"], rank)]
        for difference in differences[:1]:
            yield f"{shard_file(rank)} was cut for another model, rank or layout: {difference}"


def _header(bundle: Bundle, rank: int) -> tuple[dict[str, TensorSpec], dict[str, str]]:
    with safe_open(bundle.path / shard_file(rank), framework="np") as shard:
        slices = {name: shard.get_slice(name) for name in shard.keys()}  # noqa: SIM118
        return {n: TensorSpec(n, tuple(s.get_shape()), _dtype(s)) for n, s in slices.items()}, shard.metadata() or {}


def _dtype(stored: Any) -> str:
    # one that no graph takes keeps its name: the difference says it
    name: str = stored.get_dtype()
    return BY_SAFETENSORS[name].name if name in BY_SAFETENSORS else name


def _other_cut(label: dict[str, str], layout: dict[str, Any], rank: int) -> Iterator[str]:
    was, needed = (json.loads(found.get("cut", "{}")) for found in (label, cut_label(layout, rank)))
    for key in sorted(needed):
        if was.get(key) != needed[key]:
            yield f"its {key} is {was.get(key)}, the graphs take {needed[key]}"


def _differences(wanted: dict[str, TensorSpec], found: dict[str, TensorSpec]) -> Iterator[str]:
    for name, tensor in wanted.items():
        if name not in found:
            yield f"it lacks {name}"
        elif found[name] != tensor:
            one = found[name]
            yield f"it has {name} as {one.dtype} {one.shape}, the graphs take {tensor.dtype} {tensor.shape}"
    for name in found.keys() - wanted.keys():
        if name.endswith(".weight"):
            yield f"it has {name}, which no graph takes"
