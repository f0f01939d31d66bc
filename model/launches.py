"""Launches of NKI kernels as values; `model/simulated.py` serves them on the CPU.

A launch names a kernel and its arguments; tensors among them are numbered, so that it can travel through a graph
as text. Kernels change caches in place; a launch returns what was changed after the kernel's results.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from torch import Tensor

# the one name by which Trainium's compiler knows a call of an NKI kernel
TARGET = "AwsNeuronCustomNativeKernel"
NUMPY = {"float32": np.float32, "int32": np.int32, "bfloat16": ml_dtypes.bfloat16}
Argument = Tensor | int | float | str | None


class Result(NamedTuple):
    """The shape and dtype of one result."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Launch:
    """One kernel on one core: arguments in order, "#i" for tensor i; `changed` lists the tensors written in place."""

    kernel: str
    arguments: tuple[Any, ...]
    results: tuple[Result, ...]
    changed: tuple[int, ...] = ()

    def outputs(self, operands: Sequence[Result]) -> list[Result]:
        """Everything that the launch returns."""
        return [*self.results, *(operands[i] for i in self.changed)]


def to_text(launch: Launch, operands: Sequence[Result]) -> str:
    """The launch and its operands as JSON, for a graph."""
    return json.dumps({
        "kernel": launch.kernel, "arguments": launch.arguments, "results": launch.results,
        "changed": launch.changed, "operands": list(operands),
    })  # fmt: skip


def from_text(text: str) -> tuple[Launch, list[Result]]:
    """What `to_text` wrote."""
    read = json.loads(text)
    results, operands = ([Result(tuple(s), d) for s, d in read[name]] for name in ("results", "operands"))
    return Launch(read["kernel"], tuple(read["arguments"]), tuple(results), tuple(read["changed"])), operands
