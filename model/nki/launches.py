"""Launches of NKI kernels as values; `model/nki/simulated.py` serves them on the CPU.

A launch names a kernel and its arguments; tensors among them are numbered, so that it can travel through a graph
as text. Kernels change caches in place; a launch returns the kernel's results, then the changed tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

# the one name by which Trainium's compiler knows a call of an NKI kernel
TARGET = "AwsNeuronCustomNativeKernel"
# the version whose calls get their configuration as text
API_VERSION = 3
Argument = Tensor | int | float | str | None | tuple["Argument", ...]


class Result(NamedTuple):
    """The shape and dtype of one result."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Launch:
    """One kernel on one core: arguments in order, "#i" for tensor i, tuples as lists; `changed` are written."""

    kernel: str
    arguments: list[Any]
    results: tuple[Result, ...]
    changed: tuple[int, ...] = ()

    def outputs(self, operands: Sequence[Result]) -> list[Result]:
        """Everything that the launch returns."""
        return [*self.results, *(operands[i] for i in self.changed)]


Launcher = Callable[[Launch, tuple[Tensor, ...]], tuple[Tensor, ...]]


def to_text(launch: Launch, operands: Sequence[Result]) -> str:
    """The launch and its operands as JSON, for a graph."""
    return json.dumps(
        {
            "kernel": launch.kernel,
            "arguments": launch.arguments,
            "results": launch.results,
            "changed": launch.changed,
            "operands": list(operands),
        }
    )


def from_text(text: str) -> tuple[Launch, list[Result]]:
    """Read the text of `to_text`."""
    read = json.loads(text)
    results, operands = ([Result(tuple(s), d) for s, d in read[name]] for name in ("results", "operands"))
    return Launch(read["kernel"], read["arguments"], tuple(results), tuple(read["changed"])), operands


def numbered(arguments: Sequence[Argument]) -> tuple[list[Any], tuple[Tensor, ...]]:
    """Arguments with "#i" for their tensors, and the tensors in order."""
    tensors: list[Tensor] = []

    def name(argument: Argument) -> Any:
        if isinstance(argument, tuple):
            return [name(a) for a in argument]
        if not isinstance(argument, Tensor):
            return argument
        tensors.append(argument)
        return f"#{len(tensors) - 1}"

    return [name(a) for a in arguments], tuple(tensors)


def filled(arguments: Any, arrays: Sequence[Any]) -> Any:
    """The arguments of `numbered` with arrays in their places and lists as tuples again."""
    if isinstance(arguments, list):
        return tuple(filled(a, arrays) for a in arguments)
    return arrays[int(arguments[1:])] if isinstance(arguments, str) else arguments
