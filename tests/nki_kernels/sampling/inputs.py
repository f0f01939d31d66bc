"""Random logits, parameters and generator operands of the sampling kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.nki_kernels.attention.inputs import DTYPES

NO_FLOOR = np.float32(-3.4028235e38)


class Dims(NamedTuple):
    """R rows of a shard of V ids from `start` on."""

    R: int
    V: int
    start: int = 0
    dtype: str = "fp32"


# odd shapes first: odd shards at odd places, one row, all partitions; then a shard, the vocabulary and another shard
SHAPES = [
    Dims(5, 333, 7), Dims(3, 4747, 9495, "bf16"), Dims(1, 9, 1), Dims(128, 61, 151875, "bf16"), Dims(32, 4748, 14244),
    Dims(4, 151936), Dims(7, 37984, 37984, "bf16"),
]  # fmt: skip
# the long ones and the other number of cores are slow
WAYS = [
    *((dims, 1 + n % 2) for n, dims in enumerate(SHAPES[:5])),
    *(pytest.param(dims, 2 - n % 2, marks=pytest.mark.slow) for n, dims in enumerate(SHAPES)),
    *(pytest.param(dims, 1 + n % 2, marks=pytest.mark.slow) for n, dims in enumerate(SHAPES[5:])),
]


@dataclass
class Inputs:
    """Operands in the kernels' layouts."""

    logits: Any
    noise: Any
    temperature: Any
    floor: Any
    start: Any


def draw(dims: Dims, seed: int = 0, spread: float = 3.0) -> Inputs:
    """Normal logits, Gumbel noise; a third of the rows greedy, half of the others with a floor."""
    rng = np.random.default_rng(seed)
    logits = (spread * rng.standard_normal((dims.R, dims.V))).astype(DTYPES[dims.dtype])
    noise = rng.gumbel(size=(dims.R, dims.V)).astype(np.float32)
    temperature = rng.choice([0.0, 0.7, 1.3], (dims.R, 1)).astype(np.float32)
    best = logits.astype(np.float32).max(1, keepdims=True)
    floor = np.where(rng.random((dims.R, 1)) < 0.5, NO_FLOOR, best - 2).astype(np.float32)
    return Inputs(logits, noise, temperature, floor, one(dims.start))


def one(number: int) -> Any:
    """A (1, 1) int32 operand."""
    return np.array([[number]], np.int32)


def generator_rows(rows: int, seed: int = 0) -> tuple[Any, Any]:
    """seeds (R, 2) and positions (R, 1), the extremes among them."""
    rng = np.random.default_rng(seed)
    seeds = rng.integers(-(2**31), 2**31, (rows, 2)).astype(np.int32)
    positions = rng.integers(0, 2**24, (rows, 1)).astype(np.int32)
    seeds[0], positions[0] = 0, 0
    seeds[-1], positions[-1] = -1, 2**24 - 1
    return seeds, positions


def merged(values: Any, ids: Any) -> Any:
    """The smallest id of the best value over the first axis."""
    return np.where(values == values.max(0), ids, np.iinfo(np.int32).max).min(0)
