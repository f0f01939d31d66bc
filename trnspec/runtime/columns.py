"""Weights by columns: on a CPU, XLA's products of a few rows read a weight (inputs, outputs) as it lies.

A checkpoint has (outputs, inputs), which the compiled code would transpose at every step. Transposed once, when the
weights are loaded, they give products of two or more rows the same bits, and a target's step takes a third of the time.
Where YNNPACK multiplies (`products.py`) they stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from model.graph_spec import TensorSpec
from trnspec.runtime.products import BY_YNNPACK

_OF_PRODUCTS = ("_proj.weight", "lm_head.weight")


def turned(weight: TensorSpec) -> bool:
    """Whether the runtime holds this weight by columns: only a product reads it."""
    return not BY_YNNPACK and len(weight.shape) == 2 and weight.name.endswith(_OF_PRODUCTS)


def turn(weight: np.ndarray) -> np.ndarray:
    """(inputs, outputs) of a weight (outputs, inputs)."""
    return np.ascontiguousarray(weight.T)


def take_turned(main: ir.Block, weights: Sequence[TensorSpec]) -> None:
    """Change a parsed module, by its entry block, whose first parameters are these weights, to take them as held."""
    for weight, parameter in zip(weights, main.arguments, strict=False):
        if turned(weight):
            hold(parameter, (1, 0))


def hold(value: Any, order: Sequence[int]) -> Any:
    """Give a parameter or a result the type that it has with its axes in this order, which is its own inverse.

    Returns the transpose back, which takes its place wherever it was used.
    """
    type_, owner = ir.RankedTensorType(value.type), value.owner
    value.set_type(ir.RankedTensorType.get([type_.shape[axis] for axis in order], type_.element_type))
    begins = isinstance(owner, ir.Block)
    with ir.InsertionPoint.at_block_begin(owner) if begins else ir.InsertionPoint.after(owner):
        back = stablehlo.TransposeOp(value, ir.DenseI64ArrayAttr.get(order))
    value.replace_all_uses_except(back.result, back.operation)
    return back


def retype(module: ir.Module) -> None:
    """Give every function the types that its arguments and its return have."""
    for function in module.body.operations:
        block = function.regions[0].blocks[0]
        takes = [argument.type for argument in block.arguments]
        returns = [operand.type for operand in block.operations[len(block.operations) - 1].operands]
        function.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(takes, returns))
