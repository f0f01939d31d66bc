"""Attention over blocks as a CPU runs it: each sequence by itself, and no further than the last tile that a row sees.

A graph's own loop (`attend_blocks` of `model/attention.py`) has a fixed number of rounds for all sequences together,
since Trainium's compiler takes no other. The tiles that it has more are a sequence's last ones and change nothing, nor
does a mask on tiles that all rows see to their end, which go without one here. Weights are powers of two, in fewer
operations than XLA's exp, so results differ from the graph's in their rounding, and in nothing else. Rows of an idle
slot, which has no block and which nobody reads, are zeros here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir

from model.attention import LOWEST, attend_blocks
from trnspec.runtime.quicker import functions_of

_NAMES_OF_TYPES = {"f32": "float32", "bf16": "bfloat16", "i32": "int32"}
_Tensor = tuple[tuple[int, ...], str]
_State = tuple[jax.Array, ...]
# rows of a kv head that go through the tiles which all of them see together, and of these, through the last ones; fewer
# than the least go through one loop, since a second one costs a step more than its masks
_ROWS, _PART, _LEAST = 512, 128, 65
# exp(x) is 2 to the x times this
_OF_TWO = math.log2(math.e)
# 2^x is 1 + c0 x + c1 x^2 + ... for x of -1/2 to 1/2, to 1.7e-7 of it in fp32: fitted for the least largest error
_POWERS = (0.6931470036506653, 0.24022242426872253, 0.05550733581185341, 0.009671512991189957, 0.001326472731307149)
# a number plus this has the nearest integer in its last bits
_INTEGER, _MANTISSA = 1.5 * 2**23, 23


def take_over(module: ir.Module) -> None:
    """Put the attention of this file where a parsed module calls that of its graph.

    ValueError if a function of that name takes something else.
    """
    functions = ir.SymbolTable(module.operation)
    for name, function in functions_of(module, attend_blocks):
        try:
            text = _lowered(*map(_tensor, function.arguments))
        except (TypeError, KeyError, IndexError, ValueError) as error:
            raise ValueError(f"{name} takes something else than attention over blocks") from error
        own = _inserted(text, functions, module)
        ir.SymbolTable.replace_all_symbol_uses(name, own, module.operation)
        functions.erase(function)


def _tensor(argument: Any) -> _Tensor:
    return tuple(argument.type.shape), _NAMES_OF_TYPES[str(argument.type.element_type)]


@functools.cache
def _lowered(*tensors: _Tensor) -> str:
    """The module of `_attend` on tensors of these shapes and types."""
    structs = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in tensors]
    return str(jax.jit(_attend).trace(*structs).lower(lowering_platforms=("cpu",)).compiler_ir("stablehlo"))


def _inserted(text: str, functions: ir.SymbolTable, module: ir.Module) -> str:
    """The name that the main function of a module has, once all of its functions are in a different one."""
    others = ir.Module.parse(text)
    parts = list[Any](others.body.operations)
    for number, function in enumerate(parts):
        before = ir.StringAttr(function.attributes["sym_name"]).value
        name = f"{attend_blocks.__name__}_on_cpu_{len(module.body.operations)}_{number}"
        ir.SymbolTable.set_symbol_name(function, name)
        ir.SymbolTable.replace_all_symbol_uses(before, name, others.operation)
        if before == "main":
            main = name
    for function in parts:
        function.detach_from_parent()
        ir.SymbolTable.set_visibility(function, "private")
        module.body.append(function)
        functions.insert(function)
    return main


def _attend(
    q_BGRD: jax.Array, last_BR: jax.Array, keys_TK: jax.Array, k_PGKD: jax.Array, v_PGKD: jax.Array, table_BL: jax.Array
) -> jax.Array:
    """As `attend_blocks`: (B, G, R, D)."""
    q_BGRD = q_BGRD * (_OF_TWO * q_BGRD.shape[-1] ** -0.5)
    k_PGDK = k_PGKD.transpose(0, 1, 3, 2)
    of_one: Callable[..., Any] = functools.partial(_of_one, keys_TK=keys_TK, k_PGDK=k_PGDK, v_PGKD=v_PGKD)
    if len(q_BGRD) == 1:
        return of_one((q_BGRD[0], last_BR[0], table_BL[0]))[None]
    return jax.lax.map(of_one, (q_BGRD, last_BR, table_BL))


def _of_one(
    sequence: tuple[jax.Array, jax.Array, jax.Array], keys_TK: jax.Array, k_PGDK: jax.Array, v_PGKD: jax.Array
) -> jax.Array:
    q_GRD, last_R, table_L = sequence

    def add(q_GRD: jax.Array, last_1R: jax.Array | None, tile: jax.Array, state: _State) -> _State:
        """The sums with a tile more: what of it rows see up to their last position, or all of it."""
        out_GRD, total_GR, best_GR = state
        k_GDK, v_GKD = k_PGDK[table_L[tile]], v_PGKD[table_L[tile]]
        scores = jnp.einsum("grd,gdk->grk", q_GRD, k_GDK.astype(jnp.float32))
        if last_1R is not None:
            scores = jnp.where(keys_TK[tile] <= last_1R[..., None], scores, -jnp.inf)
        higher_GR = jnp.maximum(best_GR, scores.max(-1))
        from_GR1 = jnp.maximum(higher_GR, LOWEST)[..., None]
        weights, kept_GR1 = _power(scores - from_GR1), _power(best_GR[..., None] - from_GR1)
        rounded = weights.astype(v_GKD.dtype).astype(jnp.float32)
        more_GRD = jnp.einsum("grk,gkd->grd", rounded, v_GKD.astype(jnp.float32))
        return out_GRD * kept_GR1 + more_GRD, total_GR * kept_GR1[..., 0] + weights.sum(-1), higher_GR

    def tiles(seen_T: jax.Array) -> jax.Array:
        return jnp.where(table_L[0] > 0, seen_T.sum(), 0)

    def whole(q_GRD: jax.Array, last_1R: jax.Array) -> jax.Array:
        """Through the tiles that all rows see to their end without a mask, then each part through its last ones."""
        nothing = jnp.zeros_like(q_GRD)
        state = nothing, nothing[..., 0], jnp.full_like(nothing[..., 0], -jnp.inf)
        first: jax.Array | int = 0
        if q_GRD.shape[1] >= _LEAST:
            first = tiles(keys_TK[:, -1] <= last_1R.min())
            state = jax.lax.fori_loop(0, first, functools.partial(add, q_GRD, None), state)

        def rest(q_GRD: jax.Array, last_1R: jax.Array, *state: jax.Array) -> jax.Array:
            end = tiles(keys_TK[:, 0] <= last_1R.max())
            out_GRD, total_GR, _ = jax.lax.fori_loop(first, end, functools.partial(add, q_GRD, last_1R), state)
            return out_GRD / jnp.where(end > 0, total_GR, 1)[..., None]

        return _in_parts(rest, _PART, q_GRD, last_1R, *state)

    return _in_parts(whole, _ROWS, q_GRD, last_R[None])


def _power(x: jax.Array) -> jax.Array:
    """2 to the x, for x of at most 0: exactly 1 of 0, and exactly 0 from -127 on and of a NaN."""
    x = jnp.where(x > -127, x, -127)
    exponent = jax.lax.bitcast_convert_type(x + np.float32(_INTEGER), jnp.int32) << _MANTISSA
    rest, power = x - jax.lax.round(x, jax.lax.RoundingMethod.TO_NEAREST_EVEN), jnp.full_like(x, _POWERS[-1])
    for factor in (*_POWERS[-2::-1], 1):
        power = power * rest + factor
    return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(power, jnp.int32) + exponent, jnp.float32)


def _in_parts(function: Callable[..., jax.Array], size: int, *rows: jax.Array) -> jax.Array:
    """function(*rows), (G, R, D), of `size` rows at a time, the second axis of each array, if that divides them."""
    groups, count, *others = rows[0].shape
    if count <= size or count % size:
        return function(*rows)
    parts = [x.reshape(len(x), -1, size, *x.shape[2:]).swapaxes(0, 1) for x in rows]
    out = jax.lax.map(lambda part: function(*part), parts)
    return out.swapaxes(0, 1).reshape(groups, count, *others)
