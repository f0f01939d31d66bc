"""A runner of a pair in eager torch: nothing to compile, so that a test of the engine may have real drafters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from model.cache import Cache, empty_caches
from model.drafters import DraftState
from model.graph_io import StepInputs, StepOutputs
from model.graph_key import GraphKey
from model.parallel import ONE_RANK
from model.speculative import Pair


class Eager:
    """Prefills and steps of one pair; `kept` is the drafter's empty state, `keys` the graphs that would have run.

    Caches are `batch` slots of a length, or a pool of so many blocks.
    """

    def __init__(self, pair: Pair, kept: tuple[Tensor, ...], batch: int, length: int) -> None:
        draft = () if pair.draft_model is None else self._caches(pair.draft_model, batch, length)
        self.pair, self.state = pair, DraftState([*draft], kept)
        self.caches, self.keys = self._caches(pair.target_model, batch, length), list[GraphKey]()

    @staticmethod
    def _caches(model: Any, batch: int, length: int) -> list[Cache]:
        return empty_caches(model.config, ONE_RANK, batch, length, torch.float32)

    @torch.no_grad()
    def run(self, key: GraphKey, inputs: StepInputs) -> StepOutputs:
        self.keys.append(key)
        tensors = StepInputs(*(torch.from_numpy(np.asarray(x).copy()) if x is not None else None for x in inputs))
        stage = self.pair.prefill if key.is_prefill else self.pair.step
        out = stage(key.k, tensors, tensors.sampling(key.filters), self.state, self.caches)
        self.state, self.caches = out.draft_state, list(out.target_caches)
        return out

    def draft(self, key: GraphKey, inputs: StepInputs) -> Any:
        raise AssertionError("no step here is in halves")

    def clear(self, slot: int, blocks: Sequence[int] = ()) -> None:
        for tensor in (*self.state.kept, *(t for cache in (*self.caches, *self.state.caches) for t in cache)):
            tensor[slot] = 0
