"""Requests that a host like NxDI's sends to a model.pt: one for each way of drawing."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from compile.bundle.cutting import Cutter
from compile.device_check.nxdi_host import Host, Sequence, Tensors
from compile.neuron.flags import nxdi_tag
from compile.neuron.sdk import nxdi_graphs, nxdi_tags
from model.bundle.graph_spec import GraphSpec
from model.bundle.plan import BundlePlan
from model.bundle.weights import shard_file

# top-k, top-p, temperature; NxDI writes greedy as top-k 1 at temperature 1
NXDI_REQUESTS: dict[str, tuple[tuple[int, ...], tuple[float, float, float]]] = {
    "greedy": (tuple(range(40, 60)), (1, 1.0, 1.0)),
    "top-k": (tuple(range(90, 102)), (20, 1.0, 0.8)),
    "top-p": (tuple(range(65, 90)), (-1, 0.9, 1.0)),
    "temperature": (tuple(range(97, 122)), (-1, 1.0, 1.3)),
    "greedy again, in a slot that was used": (tuple(range(40, 60)), (1, 1.0, 1.0)),
}
NEW_TOKENS = 12
# a graph's tag, NxDI's seven inputs -> the results before the caches
Model = Callable[[str, list[Tensor]], list[np.ndarray]]


def serve(plan: BundlePlan, model: Model) -> list[list[int]]:
    """The tokens of each request, served together in batches that fill and empty, as by NxDI's host."""
    graphs = [graph for tag in nxdi_tags(plan) for graph in nxdi_graphs(plan, tag)]

    def run(graph: GraphSpec, inputs: Tensors) -> list[np.ndarray]:
        return model(nxdi_tag(graph.key, plan.spec), [torch.from_numpy(np.ascontiguousarray(x)) for x in inputs])

    sequences: list[Any] = [Sequence(prompt, NEW_TOKENS, params) for prompt, params in NXDI_REQUESTS.values()]
    Host(graphs, run, plan.spec.k, plan.spec.max_len).serve(sequences, plan.spec.batch)
    return [s.ids for s in sequences]


def shard_of(plan: BundlePlan, folders: Mapping[str, Path], rank: int) -> dict[str, Tensor]:
    """A rank's weights by their names in the bundle, cut from the checkpoints in these folders."""
    with tempfile.TemporaryDirectory() as folder:
        path, cutter = Path(folder) / shard_file(rank), Cutter(plan, folders, Path(folder) / "sources")
        path.parent.mkdir()
        cutter.due([shard_file(rank)], Path(folder))
        cutter.write(rank, path)
        return {name: tensor.clone() for name, tensor in load_file(path).items()}
