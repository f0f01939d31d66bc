"""Sums along rows in one order on a CPU, whatever the number of rows: each of 16 columns first, then halves.

XLA lets the compiler of its CPU code choose the order of a reduction, which depends on the width of vectors, and with
wide ones on the number of rows too. Additions outside of a reduction keep their order.
"""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from trnspec.runtime.quicker import COLUMNS, along_rows, of_columns, operations


def in_order(module: ir.Module) -> None:
    """Change a parsed module's sums of fp32 numbers along the last axis."""
    for operation in list(operations(module)):
        if operation.name == "stablehlo.reduce" and along_rows(operation, "stablehlo.add"):
            _in_order(operation)


def _in_order(reduce: Any) -> None:
    rows, none = reduce.operands
    *others, numbers = rows.type.shape
    if not isinstance(rows.type.element_type, ir.F32Type):
        return
    axes = len(others)
    with ir.InsertionPoint(reduce), reduce.location:
        if numbers % COLUMNS:
            zeros, more = [0] * axes, -numbers % COLUMNS
            rows = stablehlo.pad(rows, none, [*zeros, 0], [*zeros, more], [*zeros, 0])
        sums, count = of_columns(reduce, rows), COLUMNS
        while count > 1:
            first = [0] * axes
            halves = (
                stablehlo.slice(sums, [*first, begin], [*others, begin + count // 2], [1] * (axes + 1))
                for begin in (0, count // 2)
            )
            sums, count = stablehlo.add(*halves), count // 2
        reduce.results[0].replace_all_uses_with(stablehlo.reshape(reduce.results[0].type, sums))
    reduce.erase()
