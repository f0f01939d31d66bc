"""The target's scores at one position, computed eagerly from a bundle's weights: what a divergence hung on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from safetensors.torch import load_file

from model.bundle.manifest import Bundle
from model.bundle.weights import names, shard_file
from model.cache import Placement, empty_caches
from model.config import Qwen3Config
from model.dtypes import BY_FLAG
from model.filters import filtered
from model.ops import Ops
from model.packing import Packing
from model.parallel import Parallel
from model.qwen3 import Qwen3
from model.sampling import Sampling, gumbel
from model.serving.request import Params

_WORD = 1 << 32
# a bucket is a multiple of this many positions
_BLOCK = 128


@dataclass(frozen=True)
class Gap:
    """The target's own figures for the two ids at the first divergence.

    `logits` is the target's logit of its own id less that of the other id; `scores` the same for what the draw
    compares (logits over temperature, plus noise; minus infinity where a filter removed the id), equal to `logits`
    when greedy; `own_is_best` says whether this eager pass draws the id that the target's graph drew.
    """

    logits: float
    scores: float
    own_is_best: bool


class TargetLogits:
    """The eager target of a bundle of one rank; `available` is False for more ranks and for packed weights."""

    def __init__(self, bundle: Bundle) -> None:
        packed = any(bundle["weights"]["packed"]["target_model"].values())
        self.bundle, self.available = bundle, bundle["tp"] == 1 and not packed
        self._model: Qwen3 | None = None

    def gap(self, known: tuple[int, ...], own: int, other: int, params: Params) -> Gap | None:
        """What separates the target's id from another id after the known ones; None if it cannot be computed."""
        if not self.available:
            return None
        logits = self._logits(known)
        scores = _scores(logits, params, len(known))
        return Gap(float(logits[own] - logits[other]), float(scores[own] - scores[other]), int(scores.argmax()) == own)

    @torch.no_grad()
    def _logits(self, known: tuple[int, ...]) -> torch.Tensor:
        model, dtype = self._load(), BY_FLAG[self.bundle["dtype"]].torch
        # as in a prompt's graph, the cache is longer than the prompt: rows past its end are never looked at
        length = -len(known) // _BLOCK * -_BLOCK
        ids = torch.zeros(1, length, dtype=torch.int32)
        ids[0, : len(known)] = torch.tensor(known, dtype=torch.int32)
        positions = torch.arange(length, dtype=torch.int32)
        caches = empty_caches(model.config, model.parallel, 1, length, dtype)
        x, _ = model.hidden(ids, caches, Placement(positions[None], positions))
        return model.logits(x[:, len(known) - 1])[0]

    def _load(self) -> Qwen3:
        if self._model is None:
            self._model = eager_model(self.bundle, "target")
        return self._model


def eager_model(bundle: Bundle, role: str) -> Qwen3:
    """The target or the draft of a bundle of one rank whose weights are not packed."""
    config, prefix = bundle.config(role), f"{role}_model"
    assert isinstance(config, Qwen3Config), "only a decoder is run by itself"
    stored = load_file(bundle.path / shard_file(0))
    stored_names = names(prefix, config, Packing(), alone=not bundle.drafting.of_kind.has_model)
    model = Qwen3(config, Parallel()).to(BY_FLAG[bundle["dtype"]].torch)
    model.load_state_dict({o.removeprefix(f"{prefix}."): stored[name] for o, name in stored_names.items()})
    return model.eval()


def _scores(logits_V: torch.Tensor, params: Params, position: int) -> torch.Tensor:
    """What the coupled draw takes the largest of, docs/sampling.md."""
    if params.temperature == 0:
        return logits_V
    seed = np.array([[params.seed % _WORD, params.seed // _WORD]], np.uint32).view(np.int32)
    temperature, top_k, top_p, min_p = (
        torch.tensor([float(v)]) for v in (params.temperature, params.top_k, params.top_p, params.min_p)
    )
    rule = Sampling(temperature, top_k, top_p, min_p, torch.from_numpy(seed)).draw(torch.tensor([[position]]))
    scaled = logits_V[None] / params.temperature
    kept = filtered(Ops(), scaled - scaled.amax(-1, keepdim=True), rule)
    return (kept + gumbel(rule.seed_R2, rule.position_R, logits_V.shape[-1]))[0]
