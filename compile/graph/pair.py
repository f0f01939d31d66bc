"""The pair of models that a planned graph runs, and which of its stages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from compile.spec import BuildSpec
from model.backing import Backing
from model.bundle.manifest import DECODE, PREFILL, GraphSpec
from model.bundle.schema import DRAFT, UNFILTERED, VERIFY, kind_of
from model.cache import Cache
from model.draft_config import Eagle3Config, MedusaConfig
from model.drafters import Drafter, DraftState
from model.drafters.chain import Chain
from model.drafters.eagle3 import Eagle3, Eagle3Draft
from model.drafters.medusa import Medusa, MedusaHeads
from model.drafters.parallel import Parallel as ParallelDrafter
from model.dtypes import BY_FLAG
from model.graph_io import Outputs
from model.ops import Ops
from model.parallel import Parallel
from model.qwen3 import Qwen3
from model.speculative import Pair

_CACHES = ("draft_model.kv.", "target_model.kv.")
# before the names of what a drafter remembers beside caches
KEPT = "draft_model.kept."


def stage_of(graph: GraphSpec) -> Callable[..., Outputs]:
    """What of a pair a graph runs."""
    parts: dict[str, Callable[..., Outputs]] = {PREFILL: Pair.prefill, DRAFT: Pair.draft, VERIFY: Pair.verify}
    stage = parts.get(kind_of(graph.tag), Pair.step)
    return functools.partial(stage, filters=False) if UNFILTERED in graph.tag else stage


def make_pair(spec: BuildSpec, graph: GraphSpec, ops: Ops, backing: Backing) -> Pair:
    """The target, and its drafter where the graph drafts, on the meta device: whoever runs it brings the weights."""
    of_target, of_draft = spec.parallel(ops)
    with torch.device("meta"):
        drafter = _drafter(spec, of_draft, backing) if spec.has_draft and kind_of(graph.tag) != DECODE else Drafter()
        target = Qwen3(spec.target_config, of_target, backing)
        target.taps = drafter.taps
        return Pair(target, drafter, ops, spec.tree_of(graph.k), spec.copies).to(BY_FLAG[spec.dtype].torch)


def _drafter(spec: BuildSpec, parallel: Parallel, backing: Backing) -> Drafter:
    config = spec.draft_config
    if isinstance(config, Eagle3Config):
        return Eagle3(Eagle3Draft(config, parallel, backing))
    if isinstance(config, MedusaConfig):
        return Medusa(MedusaHeads(config, parallel, backing), spec.target_config.num_hidden_layers)
    model = Qwen3(config, parallel, backing)
    if spec.drafting.mask_id is not None:
        return ParallelDrafter(model, spec.drafting.mask_id)
    return Chain(model)


def grouped_state(graph: GraphSpec, values: Sequence[Tensor]) -> tuple[DraftState, list[Cache]]:
    """A graph's state as its stages take it, from tensors in the plan's order."""
    named = dict(zip((t.name for t in graph.state), values, strict=True))
    draft, target = (_caches([v for n, v in named.items() if n.startswith(prefix)]) for prefix in _CACHES)
    return DraftState(draft, tuple(v for n, v in named.items() if n.startswith(KEPT))), target


def _caches(tensors: list[Tensor]) -> list[Cache]:
    return [Cache(*pair) for pair in zip(tensors[::2], tensors[1::2], strict=True)]
