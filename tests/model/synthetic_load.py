"""A runner that computes nothing: tokens and acceptance are functions of (seed, position)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from model.graph_io import StepInputs, StepOutputs
from model.graph_key import GraphKey
from trnspec.engine.slots import Slot
from trnspec.engine.step_k import Always


class BySeated(Always):
    """A k for each number of seated requests."""

    def __init__(self, *of_seated: int) -> None:
        super().__init__(max(of_seated))
        self.of_seated = of_seated

    @property
    def ks(self) -> tuple[int, ...]:
        return self.of_seated

    def choose(self, slots: Sequence[Slot]) -> int:
        return self.of_seated[min(len(slots), len(self.of_seated)) - 1]


@dataclass
class Synthetic:
    """Each draft is accepted with chance alpha until the first miss; `keys` are those of the graphs that ran, and
    `first` their first positions in the slot of the first row."""

    alpha: float = 0.6
    keys: list[GraphKey] = field(default_factory=list)
    first: list[tuple[int, int]] = field(default_factory=list)

    def run(self, key: GraphKey, inputs: StepInputs) -> StepOutputs:
        self._ran(key, inputs)
        if key.is_prefill:
            length = int(inputs.positions[0] + inputs.num_tokens[0])
            return _outputs(np.array([[_token(_seed(inputs, 0), length)]]), np.array([length]))
        rows = len(inputs.positions)
        accepted, positions = np.full((rows, key.k + 1), -1), np.zeros(rows, np.int32)
        for row in range(rows):
            new = self._row(row, inputs)
            accepted[row, : len(new)], positions[row] = new, inputs.positions[row] + len(new)
        return _outputs(accepted, positions)

    def draft(self, key: GraphKey, inputs: StepInputs) -> Any:
        """The input ids, and zeros as drafts."""
        self._ran(key, inputs)
        return np.pad(inputs.input_ids, ((0, 0), (0, key.k)))

    def clear(self, slot: int, blocks: Sequence[int]) -> None:
        """There is no state."""

    def _ran(self, key: GraphKey, inputs: StepInputs) -> None:
        self.keys.append(key)
        self.first.append((int(inputs.slots[0]) if key.is_prefill else 0, int(inputs.positions[0])))

    def _row(self, row: int, inputs: StepInputs) -> list[int]:
        seed, position, count = _seed(inputs, row), int(inputs.positions[row]), 0
        while count < inputs.k_limits[row] and random.Random(seed * 7919 + position + count).random() < self.alpha:
            count += 1
        return [_token(seed, position + 1 + i) for i in range(count + 1)]


def _outputs(accepted: np.ndarray, next_positions: np.ndarray) -> StepOutputs:
    """Accepted ids, and what a next step may be given: its ids are not read."""
    return StepOutputs(accepted, next_ids=accepted[:, :1], next_positions=next_positions)


def _seed(inputs: StepInputs, row: int) -> int:
    return int(inputs.seeds[row, 0])


def _token(seed: int, position: int) -> int:
    return random.Random(f"{seed} {position}").randrange(1000)
