"""All-reduce and all-gather as JAX primitives of the per-rank graph, with explicit replica groups."""

from typing import Any

import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo


def _groups(ranks: int) -> ir.Attribute:
    return ir.DenseIntElementsAttr.get(np.arange(ranks, dtype=np.int64)[None])  # type: ignore[call-overload]


def _lower_all_reduce(context: mlir.LoweringRuleContext, x: Any, *, ranks: int) -> Any:
    reduce = stablehlo.AllReduceOp([x.type], [x], replica_groups=_groups(ranks))
    scalar = ir.RankedTensorType.get([], ir.RankedTensorType(x.type).element_type)
    body = reduce.regions[0].blocks.append(scalar, scalar)
    with ir.InsertionPoint(body):
        stablehlo.return_([stablehlo.add(*body.arguments)])
    return reduce.results


def _lower_all_gather(context: mlir.LoweringRuleContext, x: Any, *, ranks: int) -> Any:
    (out,) = context.avals_out
    gather_dim = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), out.ndim - 1)
    gathered = ir.RankedTensorType.get(out.shape, ir.RankedTensorType(x.type).element_type)
    return stablehlo.AllGatherOp([gathered], [x], gather_dim, _groups(ranks)).results


ALL_REDUCE = Primitive("tp_all_reduce")
ALL_REDUCE.def_abstract_eval(lambda x, *, ranks: ShapedArray(x.shape, x.dtype))
mlir.register_lowering(ALL_REDUCE, _lower_all_reduce)

# concatenates along the last axis, in rank order
ALL_GATHER = Primitive("tp_all_gather")
ALL_GATHER.def_abstract_eval(lambda x, *, ranks: ShapedArray((*x.shape[:-1], x.shape[-1] * ranks), x.dtype))
mlir.register_lowering(ALL_GATHER, _lower_all_gather)
