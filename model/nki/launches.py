"""Launches of NKI kernels as data: the kernel's name, its arguments, its results.

Tensors among the arguments are numbered, so that a launch can be stored in a graph as JSON. Kernels update caches in
place; a launch returns the kernel's results, then the updated tensors.
"""

import json
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from model.cache import KEY_TILE, AttentionMetadata, Cache
from model.dtypes import FP8
from model.errors import UserError
from nki_kernels.limits import CHUNK, attention_limit_error

# the custom call target by which neuronx-cc recognizes NKI kernels
CUSTOM_CALL_TARGET = "AwsNeuronCustomNativeKernel"
# the custom call API version with a string configuration
API_VERSION = 3
# physical cores per launch; neuronx-cc rejects graphs that mix it with a different --lnc (NCC_EVRF066)
LNC: Final = 2
Argument = Tensor | int | float | None | tuple[Any, ...]
Groups = tuple[tuple[int, ...], ...]
# the kernel of several layers, and the index of its argument `groups`
LAYERS, _GROUPS = "decode_layers", 6


class Result(NamedTuple):
    """The shape and dtype of a result or an operand."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Launch:
    """A launch of a kernel on `lnc` cores. `arguments`: in order, "#i" for tensor i, lists for tuples; `changed`: the
    numbers of the tensors that the kernel updates in place."""

    kernel: str
    arguments: list[Any]
    results: tuple[Result, ...]
    changed: tuple[int, ...] = ()
    lnc: int = LNC

    def outputs(self, operands: Sequence[Result]) -> list[Result]:
        """The specs of all outputs: the results, then the updated tensors."""
        return [*self.results, *(operands[i] for i in self.changed)]

    @property
    def sums(self) -> tuple[int, Groups]:
        """The number of all-reduces inside the kernel, two per layer of `decode_layers`, and their replica groups."""
        groups = self.arguments[_GROUPS] if self.kernel == LAYERS else None
        ranks = tuple(tuple(map(operator.index, group)) for group in groups or ())
        return (2 * len(self.arguments[1]) if ranks else 0), ranks


def like(x: Tensor) -> Result:
    """The shape and dtype of a tensor."""
    name = FP8.name if x.dtype == FP8.torch else str(x.dtype).removeprefix("torch.")
    return Result(tuple(x.shape), name)


def padded_table(meta: AttentionMetadata, cache: Cache, group_rows: int = 1) -> Tensor:
    """The block table, padded with block 0 to a multiple of the attention kernels' key chunk.

    Raises UserError if the kernels do not support these sizes; `group_rows` is the number of rows per kv head.
    """
    table_BL = F.pad(meta.block_table_BL, (0, -meta.block_table_BL.shape[1] % (CHUNK // KEY_TILE)))
    blocks, kv_heads = cache.k.shape[:2]
    (batch, length), pool_rows = table_BL.shape, blocks * kv_heads * KEY_TILE
    if reason := attention_limit_error(batch, group_rows, length * KEY_TILE, pool_rows):
        raise UserError(f"{reason}, or use --kernels reference")
    return table_BL


Launcher = Callable[[Launch, tuple[Tensor, ...]], tuple[Tensor, ...]]


def to_text(launch: Launch, operands: Sequence[Result]) -> str:
    """The launch and the specs of its operands as JSON, the custom call's configuration."""
    return json.dumps(vars(launch) | {"operands": list(operands)})


def from_text(text: str) -> tuple[Launch, list[Result]]:
    """Parses the JSON of `to_text`."""
    read = json.loads(text)
    results, operands = ([Result(tuple(s), d) for s, d in read[name]] for name in ("results", "operands"))
    return Launch(read["kernel"], read["arguments"], tuple(results), tuple(read["changed"]), read["lnc"]), operands


def numbered(arguments: Sequence[Argument]) -> tuple[list[Any], tuple[Tensor, ...]]:
    """Replaces tensors among the arguments by "#i"; returns the arguments and the tensors in order."""
    tensors: list[Tensor] = []

    def plain(argument: Argument) -> Any:
        if isinstance(argument, tuple):
            return [plain(item) for item in argument]
        if not isinstance(argument, Tensor):
            return argument
        tensors.append(argument)
        return f"#{len(tensors) - 1}"

    return [plain(argument) for argument in arguments], tuple(tensors)


def filled(arguments: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
    """Replaces each "#i" by array i: the inverse of `numbered`."""

    def full(argument: Any) -> Any:
        if isinstance(argument, list):
            return tuple(full(item) for item in argument)
        return arrays[int(argument[1:])] if isinstance(argument, str) else argument

    return [full(argument) for argument in arguments]
