"""Keys by columns: on a CPU, scores read a tile of keys (head dim, positions) as it lies.

A graph's pools of keys are (blocks, heads, 128, head dim), whose tiles the compiled code would transpose wherever they
are read: a third of a step's attention over long caches. The runtime holds them transposed. In a parsed module such a
pool is transposed back where it begins, and that moves behind appends, into functions and out of them, until it meets
the transpose of attention (`block_attention.py`) or the end, and is gone. Where something else reads a pool, it stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from model.graph_spec import TensorSpec
from trnspec.bundle.plan import is_cache
from trnspec.runtime import columns
from trnspec.runtime.quicker import operations

_ORDER = (0, 1, 3, 2)
_CALL = "func.call"


def turned(state: TensorSpec) -> bool:
    """Whether the runtime holds this state transposed: a pool of keys."""
    return is_cache(state.name) and state.name.endswith(".k")


def turn(pool: np.ndarray) -> np.ndarray:
    """A pool as the runtime holds it, of one as a graph has it, and the other way round; not a copy."""
    return pool.transpose(_ORDER)


def take_turned(module: ir.Module, states: Sequence[TensorSpec]) -> None:
    """Change a parsed module, whose last parameters and results are these states, to take and return them as held.

    The types of its functions are left to `columns.retype`.
    """
    main = ir.SymbolTable(module.operation)["main"]
    parameters, end, rewriting = main.regions[0].blocks[0].arguments, _end(main), _Rewriting(module)
    for number, state in enumerate(states):
        if turned(state):
            place = number - len(states)
            end.operands[len(end.operands) + place] = _other_way(end.operands[len(end.operands) + place], end)
            rewriting.hold(parameters[len(parameters) + place])
    rewriting.run()


def _other_way(value: Any, before: Any) -> Any:
    """The transpose of a value: the value that it is the transpose of, or a new operation."""
    owner = value.owner
    if isinstance(owner, ir.Operation | ir.OpView) and _transposes(owner):
        return owner.operands[0]
    with ir.InsertionPoint(before):
        return stablehlo.TransposeOp(value, ir.DenseI64ArrayAttr.get(_ORDER)).result


def _transposes(operation: Any) -> bool:
    return operation.name == "stablehlo.transpose" and tuple(operation.attributes["permutation"]) == _ORDER


def _appends(operation: Any, place: int) -> bool:
    """Whether an operation writes rows to the pool that is this operand: heads and numbers of each stay together."""
    if operation.name != "stablehlo.scatter" or place or len(operation.results) != 1:
        return False
    numbers = stablehlo.ScatterDimensionNumbers(operation.attributes["scatter_dimension_numbers"])
    return list(numbers.inserted_window_dims) == [0, 2] and not list(numbers.input_batching_dims)


def _of_columns(attribute: Any) -> Any:
    numbers = stablehlo.ScatterDimensionNumbers(attribute)
    return stablehlo.ScatterDimensionNumbers.get(
        update_window_dims=list(numbers.update_window_dims),
        inserted_window_dims=[0, 3],
        input_batching_dims=[],
        scatter_indices_batching_dims=[],
        scattered_dims_to_operand_dims=[_ORDER[axis] for axis in numbers.scattered_dims_to_operand_dims],
        index_vector_dim=numbers.index_vector_dim,
    )


def _callee(call: Any) -> str:
    return ir.FlatSymbolRefAttr(call.attributes["callee"]).value


def _end(function: Any) -> Any:
    operations = function.regions[0].blocks[0].operations
    return operations[len(operations) - 1].operation


class _Rewriting:
    """The pools that are transposed back, and what moves behind them."""

    def __init__(self, module: ir.Module) -> None:
        self._calls = dict[str, list[Any]]()
        for operation in operations(module):
            if operation.name == _CALL:
                self._calls.setdefault(_callee(operation), []).append(operation)
        self._functions = {
            ir.StringAttr(f.attributes["sym_name"]).value: f.operation for f in list[Any](module.body.operations)
        }
        self._backs = list[Any]()

    def hold(self, value: Any) -> None:
        """Give a pool, an argument or a result, the type that the runtime's has; its transpose back is to be moved."""
        self._backs.append(columns.hold(value, _ORDER))

    def run(self) -> None:
        """Move each transpose behind the uses of its pool that can take the pool as it is held."""
        while self._backs:
            back = self._backs.pop()
            for user, place in [(use.owner.operation, use.operand_number) for use in back.result.uses]:
                # a call of a function that has been entered takes the pool as it is held
                if user.operands[place] == back.result:
                    self._move(user, place, back.operands[0])
            if not list(back.result.uses):
                back.operation.erase()

    def _move(self, user: Any, place: int, pool: Any) -> None:
        if _transposes(user):
            user.results[0].replace_all_uses_with(pool)
            user.erase()
        elif _appends(user, place):
            user.attributes["scatter_dimension_numbers"] = _of_columns(user.attributes["scatter_dimension_numbers"])
            user.operands[0] = pool
            self.hold(user.results[0])
        elif user.name == _CALL:
            self._enter(_callee(user), place)
        elif user.name == "func.return":
            self._leave(ir.StringAttr(user.parent.attributes["sym_name"]).value, place)

    def _enter(self, function: str, place: int) -> None:
        """A function takes a pool as it is held."""
        if self._takes(function, place):
            for call in self._calls[function]:
                call.operands[place] = _other_way(call.operands[place], call)
            self.hold(self._argument(function, place))

    def _argument(self, function: str, place: int) -> Any:
        return self._functions[function].regions[0].blocks[0].arguments[place]

    def _takes(self, function: str, place: int) -> bool:
        """Whether a function appends to a pool or transposes it, or gives it to one that does."""
        uses = [(use.owner.operation, use.operand_number) for use in self._argument(function, place).uses]
        return any(
            _transposes(user) or _appends(user, number) or (user.name == _CALL and self._takes(_callee(user), number))
            for user, number in uses
        )

    def _leave(self, function: str, place: int) -> None:
        """A function returns a pool as it is held; `main` has its own end."""
        if function != "main":
            end = _end(self._functions[function])
            end.operands[place] = _other_way(end.operands[place], end)
            for call in self._calls[function]:
                self.hold(call.results[place])
