"""Pools of keys that the runtime holds transposed: what a graph is told, and that only transposes move."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import numpy as np
import pytest
from jax._src.interpreters import mlir
from jaxlib import xla_client
from jaxlib.mlir import ir

from model.graph_key import GraphKey, Stage
from model.graph_spec import TensorSpec
from tests.model.family import DRAFTERS, graphs
from trnspec.runtime import columns, key_columns, pjrt
from trnspec.runtime.quicker import operations

SHAPE, ROWS = (3, 2, 4, 5), (6, 2, 5)
POOL, HELD, NEW, PLACES = (f"tensor<{t}>" for t in ("3x2x4x5xf32", "3x2x5x4xf32", "6x2x5xf32", "6x2xi32"))
STATES = (TensorSpec("m.kv.0.k", SHAPE, "float32"), TensorSpec("m.kv.0.v", SHAPE, "float32"))
APPEND = (
    '"stablehlo.scatter"(%pool, %places, %new) <{scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = '
    "[1, 2], inserted_window_dims = [0, 2], scatter_dims_to_operand_dims = [0, 2], index_vector_dim = 1>}> ({ "
    "^bb0(%old: tensor<f32>, %other: tensor<f32>): stablehlo.return %other : tensor<f32> }) : "
    f"({POOL}, {PLACES}, {NEW}) -> {POOL}"
)
FUNCTIONS = {
    "append": f"func.func private @append(%pool: {POOL}, %places: {PLACES}, %new: {NEW}) -> {POOL} "
    f"{{ %0 = {APPEND} return %0 : {POOL} }}",
    "twice": f"func.func private @twice(%pool: {POOL}) -> {POOL} "
    f"{{ %0 = stablehlo.add %pool, %pool : {POOL} return %0 : {POOL} }}",
}
APPENDED = "call @append({0}, %places, %new) : (" + f"{POOL}, {PLACES}, {NEW}) -> {POOL}"
SAME = APPENDED.format("%k")
TWICE = "call @twice({0}) : (" + f"{POOL}) -> {POOL}"


def _main(body: str) -> str:
    takes = f"%places: {PLACES}, %new: {NEW}, %k: {POOL}, %v: {POOL}"
    return f"{' '.join(FUNCTIONS.values())} func.func @main({takes}) -> ({POOL}, {POOL}) {{ {body} }}"


def _ran(text: str, given: list[np.ndarray], held: bool) -> tuple[list[np.ndarray], str]:
    with mlir.make_ir_context(), ir.Location.unknown():
        module = ir.Module.parse(text)
        if held:
            key_columns.take_turned(module, STATES)
            columns.retype(module)
        assert module.operation.verify()
        device, said = jax.devices("cpu")[0], str(module)
        code, devices = mlir.module_to_bytecode(module), xla_client.DeviceList((device,))
        executable = device.client.compile_and_load(bytes(code), devices, xla_client.CompileOptions())
        arrays = executable.execute_sharded([jax.device_put(a, device) for a in given])
        return [np.asarray(parts[0]) for parts in arrays.disassemble_into_single_device_arrays()], said


@pytest.mark.parametrize(
    ("body", "left"),
    [
        (f"%0 = {APPENDED} %1 = {APPENDED} return %0, %1", 2),
        (f"%0 = {SAME} %1 = {SAME} return %0, %1", 1),
        (f"%a = {APPENDED} %0 = {APPENDED} %1 = {APPENDED} return %0, %1", 2),
        (f"%0 = {TWICE} %1 = {TWICE} return %0, %1", 2),
        ("return %k, %v", 0),
        ("return %v, %k", 2),
    ],
    ids=[
        "one function for keys and values",
        "two calls with one pool",
        "one behind the other",
        "a different use",
        "nothing",
        "changed places",
    ],
)
def test_results_are_the_graph_s_own(body: str, left: int) -> None:
    """Whatever reads a pool; and how many whole transposes of keys and values XLA is left with."""
    pools = iter(["%k", "%a", "%v"] if "%a =" in body else ["%k", "%v"])
    text = _main(re.sub(r"\{0\}", lambda _: next(pools), body) + f" : {POOL}, {POOL}")
    rng = np.random.default_rng(0)
    places = np.array([[0, 0], [2, 3], [2, 1], [1, 2], [0, 3], [1, 1]], np.int32)
    given = [places, *(rng.normal(size=s).astype(np.float32) for s in (ROWS, SHAPE, SHAPE))]
    expected, _ = _ran(text, given, False)
    assert not all(map(np.array_equal, expected, given[2:])) or body.startswith("return %k")
    (keys, values), said = _ran(text, [*given[:2], np.ascontiguousarray(key_columns.turn(given[2])), given[3]], True)
    assert np.array_equal(key_columns.turn(keys), expected[0])
    assert np.array_equal(values, expected[1])
    assert f"%arg2: {HELD}, %arg3: {POOL}) -> ({HELD}, {POOL})" in said
    assert said.count("stablehlo.transpose") == left


@pytest.mark.parametrize("drafter", sorted(DRAFTERS))
def test_no_graph_transposes_a_pool(family: Path, drafter: str) -> None:
    """But for the append's own reading of a row that stays: XLA takes those rows alone."""
    bundle = graphs(family, drafter).bundle
    states = {key_columns.turned(state) for graph in bundle.graphs for state in graph.state}
    assert states == {True, False}
    for graph in bundle.graphs:
        with mlir.make_ir_context(), ir.Location.unknown():
            module = pjrt.stablehlo_of(bytes(bundle.read(graph.file)))
            pjrt._take_as_held(module, graph)
            assert module.operation.verify()
            main = ir.SymbolTable(module.operation)["main"]
            held = [tuple(a.type.shape) for a in list(main.regions[0].blocks[0].arguments)[-len(graph.state) :]]
            of_graph = [np.broadcast_to(0, state.shape) for state in graph.state]
            pools = [
                key_columns.turn(a).shape for a, t in zip(of_graph, graph.state, strict=True) if key_columns.turned(t)
            ]
            assert [shape for shape in held if shape in pools] == pools
            for operation in operations(module):
                if operation.name == "stablehlo.transpose" and tuple(operation.operands[0].type.shape) in pools:
                    users = [use.owner.operation for use in operation.results[0].uses]
                    assert [u.name for u in users if "_inside" not in str(u)] == []


def test_a_compiled_graph_copies_no_pool(family: Path) -> None:
    held = graphs(family)
    key = GraphKey(Stage.STEP, held.bundle.spec.k, held.bundle.spec.buckets[0], filters=False)
    held.prepare(key)
    state = next(t for t in held.bundle.plan.by_key[key].state if key_columns.turned(t))
    blocks, heads, positions, dim = state.shape
    text = held._executables[key].hlo_modules()[0].to_string()
    pool = rf"f32\[{blocks},{heads},(?:{dim},{positions}|{positions},{dim})\]\S* "
    # inside of a fusion only the rows that it takes are read
    parts = [part for part in text.split("\n\n") if not part.startswith("%fused_computation")]
    assert any(re.search(pool + "(?:scatter|fusion)", part) for part in parts)
    assert not any(re.search(pool + r"(?:copy|transpose)\(", part) for part in parts)
