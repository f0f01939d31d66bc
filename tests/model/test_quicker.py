"""What is said quicker for XLA's CPU: which operations, which are left alone; test_quicker_bits.py has their bits."""

from __future__ import annotations

import re

import pytest
from jax._src.interpreters import mlir
from jaxlib.mlir import ir

from trnspec.runtime import quicker

ROWS, NUMBERS = 4, 128


def _rewritten(body: str, takes: str, returns: str) -> str:
    text = f"func.func @main({takes}) -> {returns} {{ {body} }}"
    with mlir.make_ir_context(), ir.Location.unknown():
        module = ir.Module.parse(text)
        quicker.rewrite(module)
        assert module.operation.verify()
        return str(module)


def _reduced(operation: str, numbers: int = NUMBERS, axis: int = 1) -> str:
    row, left = f"tensor<{ROWS}x{numbers}xf32>", f"tensor<{(ROWS, numbers)[1 - axis]}xf32>"
    body = (
        f"%0 = stablehlo.constant dense<0xFF800000> : tensor<f32> "
        f"%1 = stablehlo.reduce(%a init: %0) applies stablehlo.{operation} across dimensions = [{axis}] : "
        f"({row}, tensor<f32>) -> {left} return %1 : {left}"
    )
    return _rewritten(body, f"%a: {row}", left)


def test_a_maximum_is_taken_of_columns_first() -> None:
    text = _reduced("maximum")
    assert text.count("stablehlo.reduce(") == 2
    # XLA joins two reductions that nothing parts
    assert text.count("optimization_barrier") == 1
    assert "tensor<4x8x16xf32>, tensor<f32>) -> tensor<4x16xf32>" in text


def test_a_loop_s_body_is_rewritten_too() -> None:
    row = f"tensor<{ROWS}x{NUMBERS}xf32>"
    text = _rewritten(
        f"%0 = stablehlo.while(%x = %a) : {row} cond {{ %t = stablehlo.constant dense<true> : tensor<i1> "
        f"stablehlo.return %t : tensor<i1> }} do {{ %low = stablehlo.constant dense<0xFF800000> : tensor<f32> "
        f"%best = stablehlo.reduce(%x init: %low) applies stablehlo.maximum across dimensions = [1] : "
        f"({row}, tensor<f32>) -> tensor<{ROWS}xf32> %all = stablehlo.broadcast_in_dim %best, dims = [0] : "
        f"(tensor<{ROWS}xf32>) -> {row} stablehlo.return %all : {row} }} return %0 : {row}",
        f"%a: {row}",
        row,
    )
    assert text.count("stablehlo.reduce(") == 2


@pytest.mark.parametrize(
    ("operation", "numbers", "axis"),
    [("add", NUMBERS, 1), ("maximum", NUMBERS, 0), ("maximum", 100, 1), ("maximum", 48, 1)],
    ids=["a sum has an order", "columns already", "not whole columns", "short"],
)
def test_other_reductions_are_left_alone(operation: str, numbers: int, axis: int) -> None:
    text = _reduced(operation, numbers, axis)
    assert text.count("stablehlo.reduce(") == 1
    assert "optimization_barrier" not in text


def _product(left: str, right: str, out: str, batch: int, contracted: str) -> str:
    axes = f"[{', '.join(map(str, range(batch)))}]"
    batching = f"batching_dims = {axes} x {axes}, " if batch else ""
    body = (
        f"%0 = stablehlo.dot_general %a, %b, {batching}contracting_dims = {contracted} : "
        f"(tensor<{left}xf32>, tensor<{right}xf32>) -> tensor<{out}xf32> return %0 : tensor<{out}xf32>"
    )
    return _rewritten(body, f"%a: tensor<{left}xf32>, %b: tensor<{right}xf32>", f"tensor<{out}xf32>")


def test_the_keys_of_scores_are_turned_first() -> None:
    text = _product("4x2x6x32", "4x2x128x32", "4x2x6x128", 2, "[3] x [3]")
    assert "stablehlo.transpose" in text
    assert "contracting_dims = [3] x [2]" in text
    assert "optimization_barrier" in text


@pytest.mark.parametrize(
    ("left", "right", "out", "batch", "contracted"),
    [
        ("4x2x1x32", "4x2x128x32", "4x2x1x128", 2, "[3] x [3]"),
        ("4x2x6x128", "4x2x128x32", "4x2x6x32", 2, "[3] x [2]"),
        ("6x32", "128x32", "6x128", 0, "[1] x [1]"),
    ],
    ids=["one row", "turned already", "weights are held by columns"],
)
def test_other_products_are_left_alone(left: str, right: str, out: str, batch: int, contracted: str) -> None:
    text = _product(left, right, out, batch, contracted)
    assert "stablehlo.transpose" not in text
    assert f"contracting_dims = {contracted}" in text


@pytest.mark.parametrize("operation", ["cosine", "sine"])
def test_an_angle_s_functions_are_computed_once(operation: str) -> None:
    angles = "tensor<1x6x4xf32>"
    text = _rewritten(f"%0 = stablehlo.{operation} %a : {angles} return %0 : {angles}", f"%a: {angles}", angles)
    (name,) = re.findall(rf"(%\d+) = stablehlo.{operation} ", text)
    (product,) = re.findall(rf"(%\d+) = stablehlo.dot_general {name}, %\S+, contracting_dims = \[2\] x \[0\]", text)
    assert f"return {product} : {angles}" in text
    assert text.count(name) == 2


@pytest.mark.parametrize("angles", ["tensor<f32>", "tensor<4xbf16>"])
def test_other_angles_are_left_alone(angles: str) -> None:
    text = _rewritten(f"%0 = stablehlo.cosine %a : {angles} return %0 : {angles}", f"%a: {angles}", angles)
    assert "dot_general" not in text
