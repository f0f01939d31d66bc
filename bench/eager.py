"""A runner of a pair in eager torch: nothing to compile, so that acceptance is measured and tested quickly."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.demo import spec
from model.attention import KEY_TILE
from model.cache import Cache, empty_caches
from model.drafters import Drafter, DraftState
from model.dtypes import BY_NAME
from model.graph_io import StepInputs, StepOutputs
from model.graph_key import GraphKey
from model.ops import EAGER
from model.parallel import ONE_RANK
from model.sampling import Sampling
from model.speculative import Pair
from model.weights import RANK
from trnspec.bundle.checkpoint import Checkpoint
from trnspec.bundle.part import Part
from trnspec.bundle.plan import KEPT, make_plan
from trnspec.engine.config import EngineConfig
from trnspec.engine.engine import Engine


class Eager:
    """Prefills and steps of one pair; `kept` is the drafter's empty state, `keys` the graphs that would have run.

    Caches are pools of so many blocks.
    """

    def __init__(self, pair: Pair, kept: tuple[Tensor, ...], pool: int) -> None:
        draft = () if pair.draft_model is None else self._caches(pair.draft_model, pool)
        self.pair, self.state = pair, DraftState([*draft], kept)
        self.caches, self.keys = self._caches(pair.target_model, pool), list[GraphKey]()

    @staticmethod
    def _caches(model: Any, pool: int) -> list[Cache]:
        return empty_caches(model.config, ONE_RANK, pool, KEY_TILE, torch.float32)

    @torch.no_grad()
    def run(self, key: GraphKey, inputs: StepInputs) -> StepOutputs:
        stage = self.pair.prefill if key.is_prefill else self.pair.step
        out = stage(key.k, *self._given(key, inputs))
        self.state, self.caches = out.draft_state, list(out.target_caches)
        return out

    @torch.no_grad()
    def draft(self, key: GraphKey, inputs: StepInputs) -> Any:
        raise AssertionError("no step here is in halves")

    def _given(self, key: GraphKey, inputs: StepInputs) -> tuple[StepInputs, Sampling, DraftState, list[Cache]]:
        self.keys.append(key)
        tensors = StepInputs(*(torch.from_numpy(np.asarray(x).copy()) if x is not None else None for x in inputs))
        return tensors, tensors.sampling(key.filters), self.state, self.caches

    def clear(self, slot: int, blocks: Sequence[int]) -> None:
        for tensor in self.state.kept:
            tensor[slot] = 0
        for tensor in (t for cache in (*self.caches, *self.state.caches) for t in cache):
            tensor[list(blocks)] = 0


def engine(drafter: str, k: int, batch: int) -> Engine:
    """An engine of the demo target and a drafter."""
    asked = spec(Path(), drafter, k, batch=batch)
    bundle, folders = asked.bundle, asked.checkpoints
    target, drafting = _loaded(bundle.parts[0], Checkpoint(folders["target"], bundle.target_config)), Drafter()
    if bundle.has_draft:
        assert bundle.kind.model is not None
        part, of_target = bundle.parts[1], Checkpoint(folders["target"], bundle.target_config)
        own = _loaded(part, Checkpoint(folders["draft"], bundle.draft_config, of_target))
        drafting = bundle.kind.model.drafter(own, bundle.target_config)
    target.taps = drafting.taps
    state = (t for t in make_plan(bundle).state if t.name.startswith(KEPT))
    kept = tuple(torch.zeros(t.shape, dtype=BY_NAME[t.dtype].torch) for t in state)
    runner = Eager(Pair(target, drafting, EAGER), kept, bundle.pool)
    length, vocab_size = bundle.max_len, bundle.target_config.vocab_size
    prompts = (KEY_TILE, length), (length, length)
    config = EngineConfig((k,), batch, length, (KEY_TILE, length), vocab_size, bundle.pool, prompts, bundle.host_drafts)
    return Engine(runner, config)


def _loaded(part: Part, checkpoint: Checkpoint) -> Any:
    """The model of a part on one rank."""
    module = part.model.module(part.config, ONE_RANK, part.backing)
    pieces = {w.ours: checkpoint.pieces(w, [0], 1, torch.float32) for w in part.weights}
    weights = {ours: torch.cat([piece.rows for piece in of_weight]) for ours, of_weight in pieces.items()}
    module.load_state_dict(weights | {RANK: torch.zeros(1, dtype=torch.int32)})
    return module.eval()
