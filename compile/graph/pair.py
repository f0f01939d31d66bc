"""The pair of models that a planned graph runs, and which of its stages."""

from __future__ import annotations

from collections.abc import Callable

import torch

from compile.spec import BuildSpec
from model.backing import Backing
from model.bundle.manifest import PREFILL, GraphSpec
from model.bundle.schema import UNFILTERED
from model.dtypes import BY_FLAG
from model.graph_io import StepOutputs
from model.ops import Ops
from model.qwen3 import Qwen3
from model.speculative import Pair


def stage_of(graph: GraphSpec) -> Callable[..., StepOutputs]:
    """What of a pair a graph runs."""
    if graph.tag.startswith(PREFILL):
        return Pair.prefill
    return Pair.unfiltered_step if graph.tag.endswith(UNFILTERED) else Pair.step


def make_pair(spec: BuildSpec, graph: GraphSpec, ops: Ops, backing: Backing) -> Pair:
    """The target, and its draft where the graph drafts, on the meta device: whoever runs it brings the weights."""
    of_target, of_draft = spec.parallel(ops)
    with torch.device("meta"):
        draft = Qwen3(spec.draft_config, of_draft, backing) if graph.drafts else None
        return Pair(Qwen3(spec.target_config, of_target, backing), draft, ops).to(BY_FLAG[spec.dtype].torch)
