"""The models that a planned graph runs, target and drafter, and their state."""

from collections.abc import Sequence

import torch
from torch import Tensor

from model.cache import Cache
from model.context import Context
from model.drafter import Drafter, DraftState
from model.dtypes import BY_FLAG
from model.graph_spec import GraphSpec
from model.qwen3 import Qwen3
from model.speculative import Pair
from trnspec.bundle.plan import COUNTS, SLOTS
from trnspec.bundle.spec import BundleSpec


def drafts(graph: GraphSpec) -> bool:
    """Whether a graph needs the drafter."""
    return any(t.name.startswith("draft_model.") for t in (*graph.weights, *graph.state))


def make_pair(spec: BundleSpec, drafts: bool, ctx: Context) -> Pair:
    """The target, and its drafter if the graph `drafts`, on the meta device."""
    with torch.device("meta"):
        target, drafter = ctx.fuse(Qwen3(spec.target_config, ctx)), Drafter()
        if drafts:
            drafter = spec.drafter_type(ctx.fuse(spec.drafter_type.model_type(spec.draft_config, ctx)))
        return Pair(target, drafter).to(BY_FLAG[spec.dtype].torch)


def grouped_state(graph: GraphSpec, values: Sequence[Tensor]) -> tuple[DraftState, list[Cache], Tensor | None]:
    """A graph's state as its stages take it, from tensors in the plan's order."""
    named = dict(zip((t.name for t in graph.state), values, strict=True))
    draft, target = (
        [v for n, v in named.items() if n.startswith(f"{model}_model.kv.")] for model in ("draft", "target")
    )
    caches = ([Cache(*pair) for pair in zip(t[::2], t[1::2], strict=True)] for t in (draft, target))
    slots = tuple(v for n, v in named.items() if n.startswith(SLOTS))
    return DraftState(next(caches), slots), next(caches), named.get(COUNTS)
