"""Launches of NKI kernels as values; `model/nki/simulated.py` serves them on the CPU.

A launch names a kernel and its arguments; tensors among them are numbered, so that it can travel through a graph
as text. Kernels change caches in place; a launch returns the kernel's results, then the changed tensors.
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

# the one name by which Trainium's compiler knows a call of an NKI kernel
TARGET = "AwsNeuronCustomNativeKernel"
# the version whose calls get their configuration as text
API_VERSION = 3
# cores of a launch: one number for all kernels of a graph and for its compiler, which refuses a mixture (NCC_EVRF066)
LNC: Final = 2
Argument = Tensor | int | float | None | tuple[Any, ...]
Groups = tuple[tuple[int, ...], ...]
# the kernel of several layers, and its argument of the ranks that sum
LAYERS, _GROUPS = "decode_layers", 6


class Result(NamedTuple):
    """The shape and dtype of one result."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Launch:
    """One kernel on `lnc` cores: arguments in order, "#i" for tensor i; `changed` are the tensors that it writes.

    Arguments that are tuples are lists here.
    """

    kernel: str
    arguments: list[Any]
    results: tuple[Result, ...]
    changed: tuple[int, ...] = ()
    lnc: int = LNC

    def outputs(self, operands: Sequence[Result]) -> list[Result]:
        """Everything that the launch returns."""
        return [*self.results, *(operands[i] for i in self.changed)]

    @property
    def sums(self) -> tuple[int, Groups]:
        """How many sums over ranks the kernel runs, and the groups of these: two a layer of a kernel of layers."""
        groups = self.arguments[_GROUPS] if self.kernel == LAYERS else None
        ranks = tuple(tuple(map(operator.index, group)) for group in groups or ())
        return (2 * len(self.arguments[1]) if ranks else 0), ranks


def like(x: Tensor) -> Result:
    """A result of a tensor's shape and dtype."""
    name = str(x.dtype).removeprefix("torch.")
    return Result(tuple(x.shape), FP8.name if x.dtype == FP8.torch else name)


def padded_table(meta: AttentionMetadata, cache: Cache, group_rows: int = 1) -> Tensor:
    """The block table, padded with block 0 to the chunks of keys that attention's kernels read.

    Raises UserError if no launch takes these sizes, with `group_rows` rows of each kv head.
    """
    table_BL = F.pad(meta.block_table_BL, (0, -meta.block_table_BL.shape[1] % (CHUNK // KEY_TILE)))
    blocks, kv_heads = cache.k.shape[:2]
    (batch, length), pool_rows = table_BL.shape, blocks * kv_heads * KEY_TILE
    if misfit := attention_limit_error(batch, group_rows, length * KEY_TILE, pool_rows):
        raise UserError(f"{misfit}, or use --kernels reference")
    return table_BL


Launcher = Callable[[Launch, tuple[Tensor, ...]], tuple[Tensor, ...]]


def to_text(launch: Launch, operands: Sequence[Result]) -> str:
    """The launch and its operands as JSON, for a graph."""
    return json.dumps(vars(launch) | {"operands": list(operands)})


def from_text(text: str) -> tuple[Launch, list[Result]]:
    """Read the text of `to_text`."""
    read = json.loads(text)
    results, operands = ([Result(tuple(s), d) for s, d in read[name]] for name in ("results", "operands"))
    return Launch(read["kernel"], read["arguments"], tuple(results), tuple(read["changed"]), read["lnc"]), operands


def numbered(arguments: Sequence[Argument]) -> tuple[list[Any], tuple[Tensor, ...]]:
    """Arguments with "#i" for their tensors, and the tensors in order."""
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
    """The arguments of `numbered` with arrays in their places."""

    def full(argument: Any) -> Any:
        if isinstance(argument, list):
            return tuple(full(item) for item in argument)
        return arrays[int(argument[1:])] if isinstance(argument, str) else argument

    return [full(argument) for argument in arguments]
