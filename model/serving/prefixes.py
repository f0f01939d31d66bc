"""Caches as far as a bucket reaches: on a CPU a slice of a cache is a copy, in every layer of every step.

A graph of a bucket reads the bucket's positions of caches that are as long as a context. Given caches that end where
the bucket does, the slices are the caches themselves, and rows beyond, which belong to no request of the step, are
dropped as those beyond the context are. The rest of each cache lies beside it until a longer bucket needs it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxlib.mlir import ir

from model.bundle.graph_spec import GraphSpec, TensorSpec

# of a cache in the reference's layout (B, G, S, D)
_POSITIONS = 2
_KV = ".kv."


class _Unknown(Exception):
    """An operation that reads a cache in a way that is not known here."""


def cut_caches(main: ir.Block, graph: GraphSpec, length: int) -> bool:
    """Change a parsed module, by its entry block, to take and return caches of this length, its bucket's; False if it
    reads a cache in a way that is not known here, and is then not to be used."""
    first = len(graph.weights) + len(graph.inputs)
    caches = [main.arguments[first + i] for i, t in enumerate(graph.state) if is_cache(t)]
    try:
        for cache in caches:
            _follow(cache, length)
    except _Unknown:
        return False
    return True


def is_cache(state: TensorSpec) -> bool:
    """Whether a state is keys or values."""
    return _KV in state.name and len(state.shape) == 4


def _follow(cache: ir.Value[Any], length: int) -> None:
    """Cut a value that holds whole caches, and those that are made of it."""
    whole = ir.RankedTensorType(cache.type)
    if whole.shape[_POSITIONS] == length:
        return
    cache.set_type(_shorter(whole, length))
    for use in list(cache.uses):
        for result in _made_of(use.owner, use.operand_number, whole.shape, length):
            _follow(result, length)


def _shorter(whole: ir.RankedTensorType, length: int) -> ir.RankedTensorType:
    shape = whole.shape
    return ir.RankedTensorType.get([*shape[:_POSITIONS], length, *shape[_POSITIONS + 1 :]], whole.element_type)


def _made_of(op: Any, place: int, whole: Sequence[int], length: int) -> list[ir.Value[Any]]:
    """The values that hold whole caches because operand `place` of an operation does."""
    if op.name == "func.call":
        return [_function(op, op.attributes["callee"].value).arguments[place]]
    if op.name == "func.return":
        return _returned(op, place)
    if op.name == "stablehlo.scatter" and place == 0:
        return list(op.results)
    if op.name == "stablehlo.slice":
        starts, limits = (list(op.attributes[name])[_POSITIONS] for name in ("start_indices", "limit_indices"))
        if (starts, limits) == (0, length):
            return []
    if op.name == "stablehlo.gather" and place == 0:
        sizes = list(op.attributes["slice_sizes"])
        if sizes[_POSITIONS] == whole[_POSITIONS] and list(ir.RankedTensorType(op.results[0].type).shape) == sizes:
            sizes[_POSITIONS] = length
            op.attributes["slice_sizes"] = ir.DenseI64ArrayAttr.get(sizes)
            return list(op.results)
        if sizes[_POSITIONS] == 1:
            # single rows, of which those beyond the bucket are dropped where they are written
            return []
    raise _Unknown(op.name)


def _module(op: Any) -> Any:
    while op.name != "builtin.module":
        op = op.parent
    return op


def _function(op: Any, name: str) -> ir.Block:
    symbols = ir.SymbolTable(_module(op))
    block: ir.Block = symbols[name].regions[0].blocks[0]
    return block


def _returned(op: Any, place: int) -> list[ir.Value[Any]]:
    """What a function's callers get for operand `place` of its return."""
    name, found = op.parent.attributes["sym_name"].value, []
    for function in _module(op).regions[0].blocks[0].operations:
        for block in function.regions[0].blocks:
            calls = (o.operation for o in block.operations if o.operation.name == "func.call")
            found += [call.results[place] for call in calls if call.attributes["callee"].value == name]
    return found


def retype(module: ir.Module) -> None:
    """Give every function the types that its arguments and its return have."""
    for function in module.body.operations:
        block = function.regions[0].blocks[0]
        takes = [argument.type for argument in block.arguments]
        returns = [operand.type for operand in block.operations[len(block.operations) - 1].operands]
        function.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(takes, returns))


@functools.partial(jax.jit, static_argnums=1)
def _split(caches: list[Any], length: int) -> tuple[list[Any], list[Any]]:
    return [c[:, :, :length] for c in caches], [c[:, :, length:] for c in caches]


@jax.jit
def _join(caches: list[Any], rests: list[Any]) -> list[Any]:
    return [jnp.concatenate(pair, _POSITIONS) for pair in zip(caches, rests, strict=True)]


class Prefixes:
    """The caches' rows of the first positions, by name, and behind them the rest, one piece a bucket."""

    def __init__(self, buckets: Sequence[int], length: int) -> None:
        self._buckets, self.length = sorted(buckets), length
        self._rests: list[list[Any]] = []

    def fit(self, caches: dict[str, Any], length: int) -> dict[str, Any]:
        """The same caches, with as many positions as a bucket has."""
        names, held = list(caches), list(caches.values())
        while self.length < length:
            held = _join(held, self._rests.pop())
            self.length = held[0].shape[_POSITIONS]
        while self.length > length:
            shorter = max(b for b in self._buckets if b < self.length)
            held, rest = _split(held, shorter)
            self._rests.append(rest)
            self.length = shorter
        return dict(zip(names, held, strict=True))
