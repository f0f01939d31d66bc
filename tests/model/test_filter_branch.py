"""The search of filters on a CPU: it runs where a row filters, and a bundle's graphs of drawn ids have it."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from jax._src.interpreters import mlir
from jaxlib import xla_client
from jaxlib.mlir import ir

from model.graph_key import Stage
from model.sampling import removed_by_filters
from tests.model.family import graphs
from trnspec.runtime import filter_branch

ROWS, IDS = "tensor<2xi1>", "tensor<2x3xi1>"
BELOW = "tensor<2x3xf32>"
# by itself it does not ask whether a row filters
SEARCH = (
    f"%0 = stablehlo.constant dense<1.0> : {BELOW} %1 = stablehlo.compare GT, %below, %0 : ({BELOW}, {BELOW}) -> {IDS}"
)


def _module(takes: str, name: str = removed_by_filters.__name__) -> ir.Module:
    types = f"({takes}, {BELOW}) -> {IDS}"
    return ir.Module.parse(
        f"func.func private @{name}(%a: {takes}, %below: {BELOW}) -> {IDS} {{ {SEARCH} return %1 : {IDS} }} "
        f"func.func @main(%a: {takes}, %below: {BELOW}) -> {IDS} "
        f"{{ %0 = call @{name}(%a, %below) : {types} return %0 : {IDS} }}"
    )


@pytest.mark.parametrize("name", [removed_by_filters.__name__, f"{removed_by_filters.__name__}_1.25", "other"])
@pytest.mark.parametrize("filtering", [(False, False), (False, True), (True, True)])
def test_nothing_is_searched_where_no_row_filters(name: str, filtering: tuple[bool, bool]) -> None:
    below = np.array([[0, 1, 2], [3, 0, 1]], np.float32)
    with mlir.make_ir_context(), ir.Location.unknown():
        module = _module(ROWS, name)
        filter_branch.branch(module)
        assert module.operation.verify()
        code, device = mlir.module_to_bytecode(module), jax.devices("cpu")[0]
    executable = device.client.compile_and_load(
        bytes(code), xla_client.DeviceList((device,)), xla_client.CompileOptions()
    )
    given = [jax.device_put(a, device) for a in (np.array(filtering), below)]
    ((removed,),) = executable.execute_sharded(given).disassemble_into_single_device_arrays()
    searched = name == "other" or any(filtering)
    assert np.array_equal(removed, searched * (below > 1))


def test_a_function_that_only_has_the_name_is_refused() -> None:
    said = pytest.raises(ValueError, match="removed_by_filters takes or returns something else than ids that filters")
    with mlir.make_ir_context(), ir.Location.unknown(), said:
        filter_branch.branch(_module("tensor<2xf32>"))


def test_a_prompt_s_graph_has_the_branch(family: Path) -> None:
    opened = graphs(family, max_len=256)
    key = next(key for key in opened.bundle.plan.by_key if key.stage is Stage.PREFILL)
    opened.prepare(key)
    assert opened._executables[key].hlo_modules()[0].to_string().count(" conditional(") == 1
