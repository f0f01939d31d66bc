"""Weights by columns: on a CPU, XLA's products of a few rows read a weight (inputs, outputs) as it lies.

A checkpoint has (outputs, inputs), which the compiled code would turn at every step. Turned once, when the weights
are loaded, the products of two rows and more keep every bit and the target's step takes a third of its time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax._src.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from model.bundle.manifest import TensorSpec

_OF_PRODUCTS = ("_proj.weight", "lm_head.weight")


def turned(weight: TensorSpec) -> bool:
    """Whether the runtime holds this weight by columns: a product alone reads it."""
    return len(weight.shape) == 2 and weight.name.endswith(_OF_PRODUCTS)


def turn(weight: np.ndarray) -> np.ndarray:
    """(inputs, outputs) of a weight (outputs, inputs)."""
    return np.ascontiguousarray(weight.T)


def take_turned(module: bytes, weights: Sequence[TensorSpec]) -> bytes:
    """A StableHLO module whose first parameters are these weights, changed to take them as the runtime holds them."""
    with mlir.make_ir_context(), ir.Location.unknown():
        parsed = ir.Module.parse(module)
        main = ir.SymbolTable(parsed.operation)["main"]
        entry = main.regions[0].blocks[0]
        with ir.InsertionPoint.at_block_begin(entry):
            for weight, parameter in zip(weights, entry.arguments, strict=False):
                if turned(weight):
                    _turn_parameter(parameter)
        results = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value).results
        kinds = ir.FunctionType.get([p.type for p in entry.arguments], results)
        main.attributes["function_type"] = ir.TypeAttr.get(kinds)
        return bytes(mlir.module_to_bytecode(parsed))


def _turn_parameter(parameter: ir.Value[Any]) -> None:
    held = ir.RankedTensorType(parameter.type)
    parameter.set_type(ir.RankedTensorType.get(held.shape[::-1], held.element_type))
    back = stablehlo.TransposeOp(parameter, ir.DenseI64ArrayAttr.get([1, 0]))
    parameter.replace_all_uses_except(back.result, back.operation)
