"""One graph of a plan: its key and its I/O signature."""

import math
from dataclasses import dataclass

from model.dtypes import BY_NAME
from model.graph_key import GraphKey


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and dtype of one graph parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        return BY_NAME[self.dtype].bytes * math.prod(self.shape)


@dataclass(frozen=True)
class GraphSpec:
    """One graph. Its parameters are weights, inputs and state, in this order; state is aliased to outputs."""

    key: GraphKey
    weights: tuple[TensorSpec, ...]
    inputs: tuple[TensorSpec, ...]
    state: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    @property
    def rows(self) -> int:
        """N: rows that the target verifies per sequence, and the largest number of ids that a step emits."""
        return self.key.k + 1

    @property
    def file(self) -> str:
        return f"hlo/{self.key.name}.hlo.pb"
