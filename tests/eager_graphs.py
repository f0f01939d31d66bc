"""The graphs of target and drafter in eager torch, without compilation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from model.context import Context
from model.drafter import Drafter, DraftState
from model.drafters.registry import drafter_of
from model.dtypes import BY_NAME
from model.graph_io import Outputs, StepInputs, StepOutputs
from model.graph_key import GraphKey
from model.nki.context import make_context, no_launch
from model.nki.launches import Launcher
from model.speculative import Pair
from model.stages import run_stage
from model.weights import RANK
from tests.model.paged import empty_caches
from trnspec.bundle.checkpoint import Checkpoint
from trnspec.bundle.part import Part
from trnspec.bundle.plan import SLOTS, make_plan
from trnspec.bundle.spec import BundleSpec


class EagerGraphs:
    """Every stage on one rank in fp32; `slots` is the drafter's empty state, `keys` the graphs that ran."""

    def __init__(self, pair: Pair, slots: tuple[Tensor, ...], pool: int, batch: int) -> None:
        models = [m for m in (pair.draft_model, pair.target_model) if m is not None]
        caches = [empty_caches(model.config, 1, pool, torch.float32) for model in models]
        self.pair, self.state, self.caches = pair, DraftState(caches[0] if len(models) > 1 else [], slots), caches[-1]
        self.counts_B1V = torch.zeros((batch, 1, pair.target_model.config.vocab_size), dtype=torch.int32)
        self.keys, self._target = list[GraphKey](), Pair(pair.target_model, Drafter())
        pair.target_model.taps = pair.drafter.taps

    def run(self, key: GraphKey, inputs: StepInputs) -> StepOutputs:
        """Run a graph on NumPy inputs or on outputs of the last run."""
        out = self._run(key, inputs)
        self.caches = list(out.target_caches)
        return StepOutputs(*(t.numpy() for t in out.visible))

    def draft(self, key: GraphKey, inputs: StepInputs) -> Any:
        """Run the first half of a step; its candidates."""
        return self._run(key, inputs).visible[0].numpy()

    @torch.no_grad()
    def _run(self, key: GraphKey, inputs: StepInputs) -> Outputs:
        self.keys.append(key)
        tensors = StepInputs(*(torch.from_numpy(np.asarray(x).copy()) if x is not None else None for x in inputs))
        counts_B1V = self.counts_B1V if key.full_sampling and inputs.allowed is not None else None
        pair = self.pair if key.k or key.is_prefill or self.pair.drafter.runs_without_drafts else self._target
        out = pair(run_stage, key, tensors, self.state, self.caches, counts_B1V)
        self.state = out.draft_state
        if out.counts_B1V is not None:
            self.counts_B1V = out.counts_B1V
        return out

    def clear(self, slot: int, blocks: Sequence[int]) -> None:
        """Zero a slot's state and its blocks."""
        for tensor in (self.counts_B1V, *self.state.slots):
            tensor[slot] = 0
        for tensor in (t for cache in (*self.caches, *self.state.caches) for t in cache):
            tensor[list(blocks)] = 0


def eager_graphs(spec: BundleSpec, folders: dict[str, Path], launch: Launcher = no_launch) -> EagerGraphs:
    """The graphs of a spec, from the checkpoint folders of target and draft; `launch` runs NKI kernels."""
    ctx = make_context(
        spec.kernels, 1, launch=launch, layers=spec.layers, without=spec.without, fp8=spec.weights == "fp8"
    )
    target_checkpoint, drafter = Checkpoint(folders["target"], spec.target_config), Drafter()
    if spec.has_draft:
        checkpoint = Checkpoint(folders["draft"], spec.draft_config, target_checkpoint)
        drafter = spec.drafter_type(_loaded(spec.parts[1], checkpoint, ctx))
    pair = Pair(_loaded(spec.parts[0], target_checkpoint, ctx), drafter)
    slots = (t for t in make_plan(spec).state if t.name.startswith(SLOTS))
    zeros = tuple(torch.zeros(t.shape, dtype=BY_NAME[t.dtype].torch) for t in slots)
    return EagerGraphs(pair, zeros, spec.pool, spec.batch)


def _loaded(part: Part, checkpoint: Checkpoint, ctx: Context) -> Any:
    """The model of a part on one rank."""
    model: Any = ctx.fuse(drafter_of(part.config).model_type(part.config, ctx))
    weights = {w.name: next(checkpoint.shards(w, 1, torch.float32)) for w in part.weights}
    model.load_state_dict(weights | {RANK: torch.zeros(1, dtype=torch.int32)})
    return model.eval()
