"""Every planned graph is what its plan says, and each departure is named."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
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
from model.errors import UserError
from model.graph_key import GraphKey, Stage
from model.graph_spec import GraphSpec
from model.layers import Embedding
from model.nki.launches import Launch, Result
from tests.compile.tiny import spec
from tests.model.family import DRAFTERS, family_spec
from trnspec.bundle import contract, hlo
from trnspec.bundle.contract import CONSTANT_BYTES, OPCODES, signature, violations
from trnspec.bundle.plan import BundlePlan, make_plan

ROOT = Path(__file__).resolve().parents[2]
CASES: list[dict[str, Any]] = [
    {"k": 1},
    {"tp": 8, "dtype": "bf16", "batch": 1},
    {"tp": 2, "kernels": "nki"},
    {"tp": 2, "k": 0, "max_len": 256},
]


@pytest.mark.parametrize("changes", CASES, ids=str)
def test_every_graph_is_what_the_plan_says(base: Path, changes: dict[str, Any]) -> None:
    """A device's runtime finds tensors by name, and state must be aliased, all of it in its own order."""
    plan = make_plan(spec(base, **changes).bundle)
    for graph in plan.graphs[:: 1 + 2 * (plan.spec.kernels == "nki")]:
        proto = lower_graph(plan.spec, graph)
        assert violations(graph, proto, plan.spec) == []
        module = hlo.parse(proto)
        inputs, state = [t.name for t in (*graph.weights, *graph.inputs)], [t.name for t in graph.state]
        found = {i.parameter_number: i for i in hlo.entry(module).instructions if i.opcode == "parameter"}
        names = [*inputs, *(f"{name}.must_alias_input" for name in state)]
        ordered = [found[at] for at in range(len(found))]
        assert [i.name for i in ordered] == [hlo.io_names(i)[0] for i in ordered] == names
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
    other = next(g for g in plan.graphs if g.weights != graph.weights)
    with pytest.raises(UserError, match=f"{other.file} is not what is planned: .*report it"):
        list(lower_graphs(plan.spec, [graph, other]))


def _all(module: Any) -> list[Any]:
    return [i for c in module.computations for i in c.instructions]


def _first(module: Any, opcode: str) -> Any:
    return next(i for i in _all(module) if i.opcode == opcode)


def _root(module: Any) -> Any:
    return next(i for i in hlo.entry(module).instructions if i.id == hlo.entry(module).root_id)


@functools.cache
def _fused(base: Path) -> tuple[BundlePlan, GraphSpec, bytes]:
    plan = make_plan(spec(base, tp=2).bundle)
    graph = plan.by_key[GraphKey(Stage.STEP, 3, 128)]
    return plan, graph, lower_graph(plan.spec, graph)


def _swap_parameters(module: Any) -> None:
    one, other = [i for i in hlo.entry(module).instructions if i.opcode == "parameter"][5:7]
    one.parameter_number, other.parameter_number = other.parameter_number, one.parameter_number


def _swap_results(module: Any) -> None:
    root, shapes = _root(module), _root(module).shape.tuple_shapes
    root.operand_ids[0], root.operand_ids[1] = root.operand_ids[1], root.operand_ids[0]
    first = shapes[0].SerializeToString()
    shapes[0].CopyFrom(shapes[1])
    shapes[1].ParseFromString(first)


def _cross_aliases(module: Any) -> None:
    one, other = module.input_output_alias.entries[:2]
    one.parameter_number, other.parameter_number = other.parameter_number, one.parameter_number


def _rename(module: Any) -> None:
    first = next(i for i in hlo.entry(module).instructions if i.opcode == "parameter" and not i.parameter_number)
    first.frontend_attributes.map[0].value = "x"


def _one_rank_s_groups(module: Any) -> None:
    for instruction in (i for i in _all(module) if i.opcode == "all-gather"):
        instruction.replica_groups[0].replica_ids[:] = [0]


def _opcode(name: str, old: str = "sine") -> Callable[[Any], None]:
    return lambda module: setattr(_first(module, old), "opcode", name)


DEPARTURES: dict[Callable[[Any], Any], str] = {
    _swap_parameters: "parameter ",
    _swap_results: "result 0 is accepted_tokens int32 (2, 1), expected accepted_tokens int32 (2, 4)",
    _rename: "parameter 0 is x ",
    lambda module: module.input_output_alias.entries.add(output_shape_index=[1], parameter_number=39): "its aliases",
    lambda module: module.input_output_alias.entries.pop(): "its aliases",
    _cross_aliases: "its aliases",
    lambda module: setattr(module.input_output_alias.entries[0], "kind", 1): "its aliases",
    _one_rank_s_groups: "its all-gather has the groups [[0]], expected all 2 ranks",
    **{_opcode(name): f"it has the operation {name}, which no build of its spec writes" for name in (
        "topk", "partition-id", "replica-id", "dynamic-reshape", "conditional", "rng", "infeed", "fft", "sort",
        "convolution", "reduce-window", "custom-call", "")},
}  # fmt: skip


@pytest.mark.parametrize(("mutation", "said"), DEPARTURES.items(), ids=lambda v: v[:40] if isinstance(v, str) else "")
def test_each_departure_is_named(base: Path, mutation: Callable[[Any], Any], said: str) -> None:
    plan, graph, proto = _fused(base)
    module = hlo.parse(proto)
    mutation(module)
    found = violations(graph, module.SerializeToString(), plan.spec)
    assert [s for s in found if s.startswith(said)], found


@pytest.mark.parametrize("content", [b"no proto", b"", bytes(range(256)) * 9, "half"])
def test_what_is_no_proto_is_a_clause(base: Path, content: bytes | str) -> None:
    plan, graph, proto = _fused(base)
    content = proto[: len(proto) // 2] if isinstance(content, str) else content
    assert violations(graph, content, plan.spec)[0].startswith("it cannot be followed")


@pytest.fixture
def traced_anew() -> Iterator[None]:
    """Nothing that was traced of a layer before is called, and nothing of this test later."""
    traced_pair.cache_clear()
    yield
    traced_pair.cache_clear()


@pytest.mark.usefixtures("traced_anew")
@pytest.mark.parametrize("kernels", ["reference", pytest.param("nki", marks=pytest.mark.slow)])
def test_a_graph_does_not_depend_on_those_traced_before_it(base: Path, kernels: str) -> None:
    """A build that goes on traces the missing ones only."""
    plan = make_plan(spec(base, tp=2, kernels=kernels).bundle)
    protos = [(graph, lower_graph(plan.spec, graph)) for graph in plan.graphs[::4]]
    for graph, proto in reversed(protos):
        traced_pair.cache_clear()
        assert lower_graph(plan.spec, graph) == proto


@pytest.mark.usefixtures("traced_anew")
def test_a_weight_that_is_folded_in_is_found(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(spec(base, tp=2).bundle)
    graph = plan.by_key[GraphKey(Stage.STEP, 3, 128)]
    values = np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32)

    def folded(self: Embedding, ids: Tensor) -> Tensor:
        return self.ops.all_gather(interop.call_jax(lambda i: jnp.asarray(values)[i], ids))

    with monkeypatch.context() as patch:
        patch.setattr(Embedding, "forward", folded)
        # jax's own look-up by a constant is an operation that no build writes
        patch.setattr(contract, "OPCODES", OPCODES | {"clamp"})
        assert violations(graph, lower_graph(plan.spec, graph), plan.spec) == [
            f"a constant of {values.nbytes} bytes is folded in, the largest may have {CONSTANT_BYTES}",
        ]


def _proto(function: Callable[..., Any], *arguments: Any) -> Any:
    module: Any = jax.jit(function).lower(*arguments).compiler_ir("hlo")
    return hlo.canonical(module.as_serialized_hlo_module_proto())


def _summed(x: jax.Array, ranks: int = 4) -> jax.Array:
    return jax.jit(lambda y: collectives.ALL_REDUCE.bind(y, ranks=ranks))(x)


INTEGERS: dict[str, Callable[[jax.Array], Any]] = {
    "dot on integers, which no device takes (NCC_EVRF035)": lambda x: jnp.dot(x, x),
    "scatter on integers, which no device takes (NCC_EVRF060)": lambda x: x.at[x].add(1),
    "all-reduce on integers, which no device takes (NCC_EVRF061)": lambda x: _summed(x, 2),
}


def _call(*operands: Tensor) -> tuple[Tensor, ...]:
    launch = Launch("append_rows", [f"#{i}" for i in range(6)], (Result((1, 1, 1, 64), "float32"),), (3, 4))
    return launch_in_graph(launch, operands)


def _text(old: bytes, new: bytes) -> Callable[[Any], None]:
    return lambda call: setattr(call, "backend_config", call.backend_config.replace(old, new, 1))


def _not_in_place(call: Any) -> None:
    del call.output_operand_aliasing[:]


CALLS: dict[Callable[[Any], Any], str] = {
    _text(b'"lnc": 2', b'"lnc": 1'): "append_rows on 1 cores in a graph of 2 (NCC_EVRF066)",
    _text(b"append_rows", b"os.system"): "text is no launch",
    _text(b'"#5"', b'"#99"'): "text is no launch",
    _text(b"[1, 1, 64, 64]", b"[1, 1, 64, 1073741824]"): "append_rows with a text of other shapes",
    _text(b"[3, 4]", b"[999, 4]"): "text is no launch",
    lambda call: call.ClearField("backend_config"): "text is no launch",
    _not_in_place: "append_rows without what it writes in place",
    # XLA would call it without the text
    lambda call: setattr(call, "custom_call_api_version", 1): "append_rows in a form no build writes",
    lambda call: setattr(call, "custom_call_target", "xla_python_cpu_callback"): "it calls xla_python_cpu_callback",
}


@pytest.mark.parametrize(("edit", "said"), CALLS.items(), ids=lambda v: v if isinstance(v, str) else "")
def test_a_forged_kernel_call_is_named(base: Path, edit: Callable[[Any], Any], said: str) -> None:
    """Memory of the process is what a call's text says: nothing but a whole launch of ours may run."""
    rows, cache = jnp.ones((1, 1, 1, 64)), jnp.ones((1, 1, 64, 64))
    operands = rows, rows, rows, cache, cache, jnp.zeros((1, 1), jnp.int32)
    plan = make_plan(spec(base, kernels="nki").bundle)
    module = _proto(lambda x: interop.call_torch(_call, *operands), jnp.ones(4))
    found = list(contract._instruction_faults(module, plan.spec))
    assert found == []
    with contextlib.suppress(StopIteration):
        edit(_first(module, "custom-call"))
    (found_now,) = contract._instruction_faults(module, plan.spec)
    assert said in found_now


@pytest.mark.parametrize("said", INTEGERS)
def test_what_no_device_computes_with_integers_is_named(base: Path, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "OPCODES", OPCODES | {"clamp", "broadcast"})
    module = _proto(INTEGERS[said], jnp.arange(3, dtype=jnp.int32))
    assert f"it has {said}" in list(contract._instruction_faults(module, _fused(base)[0].spec))
