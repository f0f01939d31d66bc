"""Whether ids are the target's own draws: the CPU's logits of the whole sequence, judged in one pass.

Ids that a device emits depend on nothing but the target, the parameters, the noise and the ids before them. So each is
judged behind the device's own ids, whatever drafts there were, and a near tie changes nothing behind it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from model.cache import KEY_TILE
from model.cache import Placement, empty_caches
from model.config import Qwen3Config, load_config
from model.dtypes import BY_FLAG
from model.filters import Filters
from model.ops import Ops
from model.parallel import ONE_RANK
from model.qwen3 import Qwen3
from model.sampling import gumbel
from model.weights import RANK

# how much further from the exact logits a device may be than a CPU in the same dtype: tests/close.py has the same rule
_FURTHER = 2
# how far apart the noise of two engines may be: some units in the last place of its largest number, 16
_NOISE = 2.0**-16


@dataclass(frozen=True)
class Drawing:
    """How a request draws: a top-k or a top-p that is off is 0 or 1, temperature 0 is greedy; the seed is two words."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    temperature: float = 0.0
    seed: tuple[int, int] = (0, 0)


class Judge:
    """The target of a checkpoint folder on the CPU, and the tolerance of a build of a dtype.

    The tolerance of a difference of two logits: each may be off by `_FURTHER` times the largest error of the CPU's
    own logits in bf16, measured on the ids that are judged. A build in fp32 gets it times the ratio of the unit
    roundoffs and, since its sums may have any order, the square root of the longest one's terms. Noise, which
    is fp32 everywhere, adds its own.
    """

    def __init__(self, folder: Path, dtype: str) -> None:
        self.config: Qwen3Config = load_config(str(folder))
        weights = {name.removeprefix("model."): t for name, t in load_file(folder / "model.safetensors").items()}
        self._exact, self._rounded = (self._model(weights, torch_) for torch_ in (torch.float32, torch.bfloat16))
        terms = max(self.config.intermediate_size, self.config.hidden_size)
        finest = torch.finfo(torch.float32).eps / torch.finfo(torch.bfloat16).eps
        self._scale = 1.0 if BY_FLAG[dtype].torch is torch.bfloat16 else finest * math.sqrt(terms)
        # near ties among the ids that were judged, and the largest tolerance of their logits
        self.ties, self.tolerance = 0, 0.0

    def _model(self, weights: dict[str, Tensor], dtype: torch.dtype) -> Qwen3:
        model = Qwen3(self.config)
        model.load_state_dict(weights | {RANK: torch.zeros(1, dtype=torch.int32)})
        return model.to(dtype).eval()

    @torch.no_grad()
    def fault(self, prompt: Sequence[int], ids: Sequence[int], drawing: Drawing) -> str:
        """How the first id that the target does not draw differs, as a clause; "" where there is none."""
        if odd := [i for i in ids if not 0 <= i < self.config.vocab_size]:
            return f"{odd[0]} is no id"
        known, first = [*prompt, *ids[:-1]], len(prompt) - 1
        exact, rounded = (self._logits(model, known)[first:] for model in (self._exact, self._rounded))
        of_logits = 2 * _FURTHER * self._scale * float((exact - rounded).abs().max())
        self.tolerance, tolerance = max(self.tolerance, of_logits), of_logits + _NOISE * drawing.temperature
        positions = torch.arange(len(prompt), len(prompt) + len(ids))
        short = _short(exact, drawing, positions, torch.tensor(ids), tolerance)
        self.ties += int(((short > 0) & (short <= tolerance)).sum())
        wrong = (short > tolerance).nonzero().flatten().tolist()
        if not wrong:
            return ""
        at = wrong[0]
        return (
            f"id {at} of {len(ids)}, at position {int(positions[at])}, is {ids[at]}, whose logit is "
            f"{float(short[at]):.3g} short of the drawn one's; {tolerance:.3g} would be a near tie"
        )

    def _logits(self, model: Qwen3, ids: Sequence[int]) -> Tensor:
        """(N, V) fp32 logits of every row of a sequence."""
        length = -(-len(ids) // KEY_TILE) * KEY_TILE
        dtype = model.norm.weight.dtype
        caches = empty_caches(self.config, ONE_RANK, 1, length, dtype)
        keys = torch.arange(length, dtype=torch.int32)
        placement = Placement(keys[None, : len(ids)], keys)
        x_BNE, *_ = model.hidden(torch.tensor([ids], dtype=torch.int32), caches, placement)
        return model.logits(x_BNE)[0].float()


def _short(logits_RV: Tensor, drawing: Drawing, positions_R: Tensor, ids_R: Tensor, tolerance: float) -> Tensor:
    """(R,) how far the logit of each id is below that at which it would be drawn; inf for an id that is filtered.

    Filters keep ids near their borders, or not: an id may be drawn if it may be kept, and only ids that are surely kept
    must be beaten.
    """
    below_RV = logits_RV.amax(-1, keepdim=True) - logits_RV
    if drawing.temperature <= 0:
        return below_RV.gather(-1, ids_R[:, None])[:, 0]
    heat = torch.full((len(logits_RV),), drawing.temperature)
    seeds = torch.tensor([drawing.seed], dtype=torch.int64).to(torch.int32).expand(len(logits_RV), -1)
    # in units of logits
    scores_RV = gumbel(seeds, positions_R, logits_RV.shape[1]) * drawing.temperature - below_RV
    surely, perhaps = (_kept(below_RV, heat, drawing, tolerance, sign) for sign in (-1, 1))
    beaten_R = torch.where(surely, scores_RV, -torch.inf).amax(-1)
    own_R = torch.where(perhaps, scores_RV, -torch.inf).gather(-1, ids_R[:, None])[:, 0]
    return beaten_R - own_R


def _kept(below_RV: Tensor, heat_R: Tensor, drawing: Drawing, tolerance: float, sign: int) -> Tensor:
    """(R, V) the ids that the filters keep, with borders moved in (-1) or out (1) as far as the tolerance can."""
    # the share of a mass of whose logits any may be off
    moved = sign * math.expm1(min(tolerance / drawing.temperature, 1.0))
    top_p = drawing.top_p if drawing.top_p >= 1 else min(1.0, max(0.0, drawing.top_p + moved))
    of_rows = (drawing.top_k, top_p, drawing.min_p * (1 - moved))
    filters = Filters(*(torch.full_like(heat_R, value) for value in of_rows))
    kept = filters.kept(Ops(), below_RV, heat_R)
    last_R1 = torch.where(kept, below_RV, 0.0).amax(-1, keepdim=True)
    return (below_RV <= last_R1 + sign * tolerance) | (below_RV == 0)
