"""Every planned graph is what its plan says, and each departure is named."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from torch import Tensor

import compile.graph.trace
from compile.graph import collectives
from compile.graph.torchax_seam import interop
from compile.graph.trace import launch_in_graph, lower_graph, lower_graphs, traced_pair
from compile.recipes import ROOT
from model.graph_key import GraphKey, Stage
from model.graph_spec import GraphSpec
from model.nki.launches import LAYERS, Launch, Result
from tests.compile.tiny import refused, spec
from tests.model.family import DRAFTERS, family_spec
from trnspec.bundle import contract, hlo
from trnspec.bundle.contract import CONSTANT_BYTES, OPCODES, signature, violations
from trnspec.bundle.plan import BundlePlan, make_plan

VALUES = np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32)
CASES: list[dict[str, Any]] = [
    {"k": 1}, {"tp": 8, "dtype": "bf16", "batch": 1}, {"tp": 2, "kernels": "nki"}, {"tp": 2, "k": 0, "max_len": 256},
]  # fmt: skip


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_graph_is_what_is_planned(base: Path, case: dict[str, Any], part: int) -> None:
    """A device's runtime finds tensors by name, and state must be aliased, all of it in its own order."""
    plan = make_plan(spec(base, **case).bundle)
    for graph in plan.graphs[part::4]:
        proto = lower_graph(plan.spec, graph)
        assert violations(graph, proto, plan.spec) == []
        module = hlo.parse(proto)
        inputs, state = [t.name for t in (*graph.weights, *graph.inputs)], [t.name for t in graph.state]
        names = [*inputs, *(f"{name}.must_alias_input" for name in state)]
        parameters = _parameters(module)
        assert [i.name for i in parameters] == [hlo.io_names(i)[0] for i in parameters] == names
        assert hlo.io_names(_root(module)) == [*(t.name for t in graph.outputs), *state]
        assert [names[at] for _, at in sorted(signature(module).aliases.items())] == names[len(inputs) :]
        # one group of all ranks, in a field for each age of reader
        for instruction in _all(module):
            assert instruction.replica_groups == instruction.collective_device_list.replica_groups
        assert str(ROOT).encode() not in proto, "a graph must not depend on the place of its build"


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_build_of_every_drafter_writes_the_listed_operations(family: Path, drafter: str) -> None:
    for changes in ({}, {"tp": 2, "dtype": "bf16"}, {"tp": 2, "kernels": "nki"}):
        plan = make_plan(family_spec(family, drafter, **changes).bundle)
        for graph in plan.graphs:
            proto = lower_graph(plan.spec, graph)
            assert violations(graph, proto, plan.spec) == []
            assert {i.opcode for i in _all(hlo.parse(proto))} <= OPCODES


def test_a_graph_that_is_not_what_is_planned_is_not_built(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, graph, proto = _fused(base)
    monkeypatch.setattr(compile.graph.trace, "lower_graph", lambda *_: proto)
    assert list(lower_graphs(plan.spec, [graph])) == [(graph, proto)]
    # the layers of target and draft have their own epsilon
    assert min(proto.count(np.float32(epsilon).tobytes()) for epsilon in (1e-6, 0.1)) > 1
    other = next(g for g in plan.graphs if g.weights != graph.weights)
    message = f"{other.file} is not what is planned: ", "report it"
    refused(lambda: list(lower_graphs(plan.spec, [graph, other])), *message)


def _all(module: Any) -> list[Any]:
    return [i for c in module.computations for i in c.instructions]


def _first(module: Any, opcode: str) -> Any:
    return next(i for i in _all(module) if i.opcode == opcode)


def _parameters(module: Any) -> list[Any]:
    actual = [i for i in hlo.entry(module).instructions if i.opcode == "parameter"]
    return sorted(actual, key=lambda i: i.parameter_number)


def _root(module: Any) -> Any:
    return next(i for i in hlo.entry(module).instructions if i.id == hlo.entry(module).root_id)


@functools.cache
def _fused(base: Path) -> tuple[BundlePlan, GraphSpec, bytes]:
    plan = make_plan(spec(base, tp=2).bundle)
    graph = plan.by_key[GraphKey(Stage.STEP, 3, 128)]
    return plan, graph, lower_graph(plan.spec, graph)


def _swap_numbers(pair: Any) -> None:
    one, other = pair
    one.parameter_number, other.parameter_number = other.parameter_number, one.parameter_number


def _swap_results(module: Any) -> None:
    root, shapes = _root(module), _root(module).shape.tuple_shapes
    root.operand_ids[0], root.operand_ids[1] = root.operand_ids[1], root.operand_ids[0]
    first = shapes[0].SerializeToString()
    shapes[0].CopyFrom(shapes[1])
    shapes[1].ParseFromString(first)


def _one_rank_s_groups(module: Any) -> None:
    for instruction in (i for i in _all(module) if i.opcode == "all-reduce"):
        instruction.replica_groups[0].replica_ids[:] = [0]


def _opcode(name: str, old: str = "sine") -> Callable[[Any], None]:
    return lambda module: setattr(_first(module, old), "opcode", name)


def _loop(edit: Callable[[Any, Any, Any], object]) -> Callable[[Any], None]:
    """An edit of the first loop: its operand, the counter in its body, its condition's limit."""

    def act(module: Any) -> None:
        loop = _first(module, "while")
        body, condition = (next(c for c in module.computations if c.id == i) for i in loop.called_computation_ids)
        named = {i.id: i for i in _all(module)}
        root, limit = named[body.root_id], named[named[condition.root_id].operand_ids[1]]
        edit(named[named[loop.operand_ids[0]].operand_ids[0]], named[root.operand_ids[0]], limit)

    return act


NO_LOOP = "it cannot be followed (a loop does not count"


def _many_rounds(start: Any, counter: Any, limit: Any) -> None:
    limit.literal.s32s[:] = [1 << 30]


DEPARTURES: dict[Callable[[Any], Any], str] = {
    _loop(_many_rounds): "it computes ",
    _loop(lambda start, *_: start.literal.s32s.__setitem__(0, -9)): NO_LOOP,
    _loop(lambda _, counter, __: setattr(counter, "opcode", "multiply")): NO_LOOP,
    _loop(lambda *actual: setattr(actual[2], "opcode", "iota")): NO_LOOP,
    lambda module: _first(module, "dot").shape.dimensions.__setitem__(0, 1 << 60): "it computes ",
    lambda module: _swap_numbers(_parameters(module)[5:7]): "parameter ",
    _swap_results: "result 0 is accepted_tokens int32 (2, 1), expected accepted_tokens int32 (2, 4)",
    lambda module: setattr(_parameters(module)[0].frontend_attributes.map[0], "value", "x"): "parameter 0 is x ",
    lambda module: module.input_output_alias.entries.add(output_shape_index=[1], parameter_number=39): "its aliases",
    lambda module: module.input_output_alias.entries.pop(): "its aliases",
    lambda module: _swap_numbers(module.input_output_alias.entries[:2]): "its aliases",
    lambda module: setattr(module.input_output_alias.entries[0], "kind", 1): "its aliases",
    _one_rank_s_groups: "its all-reduce has the groups [[0]], expected all 2 ranks",
    **{_opcode(name): f"it has the operation {name}, which no build of its spec writes" for name in (
        "topk", "partition-id", "replica-id", "dynamic-reshape", "conditional", "rng", "infeed", "fft", "sort",
        "convolution", "reduce-window", "custom-call", "")},
}  # fmt: skip


@pytest.mark.parametrize(
    ("mutation", "message"), DEPARTURES.items(), ids=lambda v: v[:40] if isinstance(v, str) else ""
)
def test_each_departure_is_named(base: Path, mutation: Callable[[Any], Any], message: str) -> None:
    plan, graph, proto = _fused(base)
    module = hlo.parse(proto)
    mutation(module)
    actual = violations(graph, module.SerializeToString(), plan.spec)
    assert [s for s in actual if s.startswith(message)], actual


def test_what_is_no_proto_is_a_clause(base: Path) -> None:
    plan, graph, proto = _fused(base)
    for content in (b"no proto", b"", bytes(range(256)) * 9, proto[: len(proto) // 2]):
        assert violations(graph, content, plan.spec)[0].startswith("it cannot be followed")


@pytest.mark.parametrize("kernels", ["reference", pytest.param("nki", marks=pytest.mark.slow)])
def test_a_graph_does_not_depend_on_those_traced_before_it(base: Path, kernels: str) -> None:
    """A build that goes on traces the missing ones only."""
    plan = make_plan(spec(base, tp=2, kernels=kernels).bundle)
    traced_pair.cache_clear()
    protos = [(graph, lower_graph(plan.spec, graph)) for graph in plan.graphs[::4]]
    for graph, proto in reversed(protos):
        traced_pair.cache_clear()
        assert lower_graph(plan.spec, graph) == proto


def _proto(function: Callable[..., Any], *arguments: Any) -> Any:
    module: Any = jax.jit(function).lower(*arguments).compiler_ir("hlo")
    return hlo.canonical(module.as_serialized_hlo_module_proto())


def _summed(x: jax.Array, ranks: int = 4) -> jax.Array:
    return jax.jit(lambda y: collectives.ALL_REDUCE.bind(y, ranks=ranks))(x)


_gathered = functools.partial(collectives.ALL_GATHER.bind, ranks=4)
# functions of three integers, and what a sentence says of their graphs
WRONG: dict[str, Callable[[jax.Array], Any]] = {
    "it has dot on integers, which no device takes (NCC_EVRF035)": lambda x: jnp.dot(x, x),
    "it has scatter on integers, which no device takes (NCC_EVRF060)": lambda x: x.at[x].add(1),
    "its all-gather has the groups [[0, 1, 2, 3]], expected all 2 ranks": _gathered,
    "it has all-reduce on integers, which no device takes (NCC_EVRF061)": lambda x: _summed(x, 2),
    f"a constant of 4096 bytes is folded in, the largest may have {CONSTANT_BYTES}": lambda x: jnp.asarray(VALUES)[x],
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_operations_are_named(base: Path, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # jax's look-up by a constant has operations that no build writes
    monkeypatch.setattr(contract, "OPCODES", OPCODES | {"clamp"})
    module = _proto(WRONG[message], jnp.arange(3, dtype=jnp.int32))
    assert message in list(contract._instruction_faults(module, _fused(base)[0].spec))


def _call(*operands: Tensor) -> tuple[Tensor, ...]:
    arguments = ["#0", ["#1"], "#2", "#3", "#4", "#5", [[0, 1]]]
    return launch_in_graph(Launch(LAYERS, arguments, (Result((1, 1, 1, 64), "float32"),), (3, 4)), operands)


def _text(old: bytes, new: bytes) -> Callable[[Any], None]:
    return lambda call: setattr(call, "backend_config", call.backend_config.replace(old, new, 1))


CALLS: dict[Callable[[Any], Any], str] = {
    _text(b'"lnc": 2', b'"lnc": 1'): "decode_layers on 1 cores in a graph of 2 (NCC_EVRF066)",
    _text(b"decode_layers", b"os.system"): "text is no launch",
    _text(b'"#5"', b'"#99"'): "text is no launch",
    _text(b"[[0, 1]]", b"[[0, 0]]"): "with the groups ((0, 0),), expected all 2 ranks",
    _text(b"[[0, 1]]", b'[["0"]]'): "text is no launch",
    _text(b"[1, 1, 64, 64]", b"[1, 1, 64, 1073741824]"): "decode_layers with a text of other shapes",
    _text(b"[3, 4]", b"[999, 4]"): "text is no launch",
    lambda call: call.ClearField("backend_config"): "text is no launch",
    lambda call: call.ClearField("output_operand_aliasing"): "decode_layers without what it writes in place",
    # XLA would call it without its configuration
    lambda call: setattr(call, "custom_call_api_version", 1): "decode_layers in a form no build writes",
    lambda call: setattr(call, "custom_call_target", "xla_python_cpu_callback"): "it calls xla_python_cpu_callback",
}


@pytest.mark.parametrize(("edit", "message"), CALLS.items(), ids=lambda v: v if isinstance(v, str) else "")
def test_a_forged_kernel_call_is_named(base: Path, edit: Callable[[Any], Any], message: str) -> None:
    """The CPU trusts a call's configuration for memory: only a complete launch of ours may run."""
    rows, cache = jnp.ones((1, 1, 1, 64)), jnp.ones((1, 1, 64, 64))
    operands = rows, rows, rows, cache, cache, jnp.zeros((1, 1), jnp.int32)
    plan = make_plan(spec(base, tp=2, kernels="nki").bundle)
    module = _proto(lambda x: interop.call_torch(_call, *operands), jnp.ones(4))
    assert list(contract._instruction_faults(module, plan.spec)) == []
    with contextlib.suppress(StopIteration):
        edit(_first(module, "custom-call"))
    (actual,) = contract._instruction_faults(module, plan.spec)
    assert message in actual
