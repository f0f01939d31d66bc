"""A runner that computes nothing: tokens and acceptance are functions of (seed, position)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from model.graph_io import StepInputs, StepOutputs
from model.graph_key import GraphKey


@dataclass
class Synthetic:
    """Each draft is accepted with chance alpha until the first miss; `keys` and `inputs` are those of all runs."""

    alpha: float = 0.6
    keys: list[GraphKey] = field(default_factory=list)
    inputs: list[StepInputs] = field(default_factory=list)
    cleared: list[tuple[int, list[int]]] = field(default_factory=list)

    def run(self, key: GraphKey, inputs: StepInputs) -> StepOutputs:
        self.keys.append(key)
        self.inputs.append(inputs)
        if key.is_prefill:
            length = inputs.positions + inputs.num_tokens
            return _outputs(np.array([[token_of(_seed(inputs, 0), int(length[0]))]]), length)
        rows = len(inputs.positions)
        emitted, positions = np.full((rows, key.k + 1), -1), np.zeros(rows, np.int32)
        for row in range(rows):
            new = self._row(row, inputs)
            emitted[row, : len(new)], positions[row] = new, inputs.positions[row] + len(new)
        return _outputs(emitted, positions)

    def draft(self, key: GraphKey, inputs: StepInputs) -> Any:
        """The input ids, and zeros as drafts."""
        self.keys.append(key)
        return np.pad(inputs.input_ids, ((0, 0), (0, key.k)))

    def clear(self, slot: int, blocks: Sequence[int]) -> None:
        self.cleared.append((slot, list(blocks)))

    def _row(self, row: int, inputs: StepInputs) -> list[int]:
        seed, position, count = _seed(inputs, row), int(inputs.positions[row]), 0
        while count < inputs.k_limits[row] and random.Random(seed * 7919 + position + count).random() < self.alpha:
            count += 1
        return [token_of(seed, position + 1 + i) for i in range(count + 1)]


def _outputs(emitted: np.ndarray, positions: np.ndarray) -> StepOutputs:
    """Emitted ids, and what a next step may be given: its ids are not read."""
    return StepOutputs(emitted, next_ids=emitted[:, :1], next_positions=positions)


def _seed(inputs: StepInputs, row: int) -> int:
    return int(inputs.seeds[row, 0])


def token_of(seed: int, position: int) -> int:
    """The token at a position of every request with this seed."""
    return random.Random(f"{seed} {position}").randrange(1000)
