"""A runner of a pair in eager torch: nothing to compile, so that acceptance is measured and tested quickly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from model.attention import KEY_TILE
from model.cache import Cache, empty_caches
from model.drafters import DraftState
from model.graph_io import StepInputs, StepOutputs
from model.graph_key import GraphKey
from model.parallel import ONE_RANK
from model.sampling import Sampling
from model.speculative import Pair


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
