"""The pair of models that a planned graph runs, and which of its stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from model import halves
from model.backing import Backing
from model.cache import Cache
from model.drafters import Drafter, DraftState, in_slot
from model.dtypes import BY_FLAG
from model.graph_io import Outputs, StepInputs, StepOutputs
from model.graph_key import Stage
from model.graph_spec import GraphSpec
from model.ops import Ops
from model.qwen3 import Qwen3
from model.speculative import Pair
from trnspec.bundle.plan import COUNTS, KEPT
from trnspec.bundle.spec import BundleSpec

_CACHES = ("draft_model.kv.", "target_model.kv.")
_STAGES: dict[Stage, Callable[..., Outputs]] = {
    Stage.PREFILL: Pair.prefill,
    Stage.STEP: Pair.step,
    Stage.DRAFT: halves.draft,
    Stage.VERIFY: halves.verify,
}


def stage_of(graph: GraphSpec) -> Callable[..., Outputs]:
    """The work of a graph: a function of a pair, inputs and state."""
    key = graph.key

    def run(
        pair: Pair, inputs: StepInputs, state: DraftState, caches: list[Cache], counts_B1V: Tensor | None = None
    ) -> Outputs:
        sampling, shard = inputs.sampling(key.filters, counts_B1V), pair.target_model.shard
        if sampling.asks is not None and key.is_prefill:
            sampling = sampling._replace(asks=sampling.asks.of_prompt(inputs.prompt_token_counts, shard))
        out = _STAGES[key.stage](pair, key.k, inputs, sampling, state, caches)
        if sampling.asks is None or counts_B1V is None:
            return out
        if isinstance(out, StepOutputs):
            counted = sampling.asks.counted(out.accepted_tokens, shard)
            counts_B1V = in_slot(counts_B1V, counted, inputs.slots) if key.is_prefill else counted
        return out._replace(counts_B1V=counts_B1V)

    return run


def drafts(graph: GraphSpec) -> bool:
    """Whether a graph needs the drafter."""
    return any(t.name.startswith("draft_model.") for t in (*graph.weights, *graph.state))


def make_pair(spec: BundleSpec, drafts: bool, ops: Ops, backing: Backing) -> Pair:
    """The target, and its drafter if it `drafts`, on the meta device: the caller brings the weights."""
    of_target, of_draft = spec.parallel(ops)
    drafting = spec.kind.model if drafts else None
    with torch.device("meta"):
        target = Qwen3(spec.target_config, of_target, backing)
        drafter = Drafter()
        if drafting:
            drafter = drafting.drafter(drafting.module(spec.draft_config, of_draft, backing), target.config)
        target.taps = drafter.taps
        return Pair(target, drafter, ops).to(BY_FLAG[spec.dtype].torch)


def grouped_state(graph: GraphSpec, values: Sequence[Tensor]) -> tuple[DraftState, list[Cache], Tensor | None]:
    """A graph's state as its stages take it, from tensors in the plan's order."""
    named = dict(zip((t.name for t in graph.state), values, strict=True))
    draft, target = (_caches([v for n, v in named.items() if n.startswith(prefix)]) for prefix in _CACHES)
    return DraftState(draft, tuple(v for n, v in named.items() if n.startswith(KEPT))), target, named.get(COUNTS)


def _caches(tensors: list[Tensor]) -> list[Cache]:
    return [Cache(*pair) for pair in zip(tensors[::2], tensors[1::2], strict=True)]
