"""A runner that computes nothing: tokens and acceptance are functions of (seed, position), and it counts costs."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from model.serving.switching import Curve, Table, expected_tokens

from model.bundle.manifest import DECODE, FUSED, PREFILL
from model.graph_io import StepInputs, StepOutputs
from model.serving.engine import Engine
from model.serving.request import Params, Request, Result, Shape

# in steps of the target alone; what a demo bundle of k 7 measures, rounded
ALONE, PER_DRAFT, PROMPT = 1.0, 0.17, 3.0
# a draft that lacks tokens in its cache accepts this share of what it would
STALE_SHARE = 0.3
ALPHAS = tuple(i / 10 for i in range(11))
Alpha = Callable[[int], float]


def fused_cost(k: int) -> float:
    """What a fused step of k drafts costs."""
    return ALONE + PER_DRAFT * k


def table(k: int, batch: int = 4, refresh: float | None = PROMPT) -> Table:
    """The exact table of these costs."""
    curves = [
        Curve(b, few, ALPHAS, tuple(expected_tokens(a, few) / fused_cost(k) for a in ALPHAS))
        for b in range(1, batch + 1)
        for few in range(1, k + 1)
    ]
    return Table(tuple(curves), "synthetic", refresh)


@dataclass
class Synthetic:
    """Acceptance of the request with seed s at position p has chance alphas[s](p).

    With `other_prompt_graph`, the prompt's graph draws another id than a step would at the same position.
    """

    k: int
    alphas: dict[int, Alpha]
    other_prompt_graph: bool = False
    cost: float = 0.0
    runs: list[str] = field(default_factory=list)
    cached: dict[int, int] = field(default_factory=dict)

    def run(self, tag: str, bucket: int, inputs: StepInputs) -> StepOutputs:
        self.runs.append(tag)
        self.cost += {PREFILL: PROMPT, DECODE: ALONE, FUSED: fused_cost(self.k)}[tag]
        if tag == PREFILL:
            length = int(inputs.attention_mask.sum())
            self.cached[int(inputs.seq_ids[0])] = length
            drawn_11 = np.array([[_token(_seed(inputs, 0), length) + self.other_prompt_graph]])
            return _outputs(drawn_11, np.array([[length]]))
        rows = len(inputs.position_ids)
        accepted, positions = np.full((rows, self.k + 1), -1), np.zeros((rows, 1), np.int32)
        for row in range(rows):
            new = self._row(tag, row, inputs)
            accepted[row, : len(new)], positions[row] = new, inputs.position_ids[row] + len(new)
        return _outputs(accepted, positions)

    def _row(self, tag: str, row: int, inputs: StepInputs) -> list[int]:
        seed, position = _seed(inputs, row), int(inputs.position_ids[row, 0])
        count, limit = 0, int(inputs.k_limits[row]) if tag == FUSED and seed in self.alphas else 0
        fresh = self.cached.get(row) == position
        alpha = self.alphas[seed](position) * (1 if fresh else STALE_SHARE) if limit else 0.0
        while count < limit and random.Random(seed * 7919 + position + count).random() < alpha:
            count += 1
        if tag == FUSED and fresh:
            self.cached[row] = position + count + 1
        return [_token(seed, position + 1 + i) for i in range(count + 1)]


def _outputs(accepted: np.ndarray, next_pos: np.ndarray) -> StepOutputs:
    """What is kept, and what a next step may be given; nobody reads the ids or the mask."""
    return StepOutputs(accepted, next_ids=accepted[:, :1], next_mask=next_pos, next_pos=next_pos)


def _seed(inputs: StepInputs, row: int) -> int:
    return int(inputs.seeds[row, 0])


def _token(seed: int, position: int) -> int:
    return random.Random(f"{seed} {position}").randrange(1000)


def serve(
    alphas: list[Alpha], k: int, batch: int, tokens: int, policy: Table | None, speculative: bool = True
) -> tuple[Synthetic, list[Result]]:
    """Serve one request per alpha; the runner with its costs, and the results."""
    runner = Synthetic(k, dict(enumerate(alphas, 1)))
    engine = Engine(runner, Shape(k, batch, 1 << 12, (1 << 12,)), speculative, policy)
    requests = [Request((1, 2, 3), Params(seed=seed), tokens) for seed in runner.alphas]
    return runner, engine.run(requests)
