"""What NxDI's host relies on, read back from the graphs: order, shapes, aliases, collectives, weights outside."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from torch import Tensor, nn

from compile.build import build
from compile.doctor import main as doctor
from compile.graph import collectives
from compile.graph.torchax_seam import interop
from compile.graph.trace import lower_graph
from model import qwen3
from model.bundle import hlo
from model.bundle.contract import CONSTANT_BYTES, declared, violations
from model.bundle.graph_spec import GraphSpec
from model.bundle.opening import read_bundle
from model.bundle.plan import BundlePlan, make_plan
from model.graph_key import GraphKey, Stage
from model.parallel import Embedding
from tests.compile.tiny import relist, spec, write_model

ROOT = Path(__file__).resolve().parents[2]


CASES: list[dict[str, Any]] = [
    {"k": 1},
    {"tp": 8, "dtype": "bf16", "batch": 1},
    {"tp": 2, "kernels": "nki"},
    {"tp": 2, "k": 0, "max_len": 256},
]


@pytest.mark.parametrize("changes", CASES, ids=str)
def test_every_graph_is_what_the_plan_says(base: Path, changes: dict[str, Any]) -> None:
    plan = make_plan(spec(base, **changes).bundle)
    tp = plan.spec.tp
    for graph in plan.graphs:
        proto = lower_graph(plan.spec, graph)
        assert violations(graph, proto, plan.spec) == []
        found = declared(proto)
        # draft and target alike: nothing but caches is aliased, every cache is, and in its own order
        names = [t.name for t in (*graph.weights, *graph.inputs, *graph.state)]
        assert [names[found.aliases[i]] for i in sorted(found.aliases)] == [t.name for t in graph.state]
        assert graph.key.asking or min(found.aliases) == 4, "NxDI reads four results before the caches"
        # one group of all ranks, in a field for each age of reader
        assert {groups for _, groups in found.collectives} <= {(tuple(range(tp)),)}
        assert bool(found.collectives) == (tp > 1)
        for instruction in _instructions(proto):
            assert instruction.replica_groups == instruction.collective_device_list.replica_groups
        assert str(ROOT).encode() not in proto, "a graph must not depend on the place of its build"


def _instructions(proto: bytes) -> list[Any]:
    return [i for c in hlo.parse(proto).computations for i in c.instructions]


@functools.cache
def _fused(base: Path) -> tuple[BundlePlan, GraphSpec, bytes]:
    plan = make_plan(spec(base, tp=2).bundle)
    graph = plan.by_key[GraphKey(Stage.STEP, 3, 128)]
    return plan, graph, lower_graph(plan.spec, graph)


def _entry(module: Any) -> Any:
    return next(c for c in module.computations if c.id == module.entry_computation_id)


def _swap_parameters(module: Any) -> None:
    one, other = [i for i in _entry(module).instructions if i.opcode == "parameter"][5:7]
    one.parameter_number, other.parameter_number = other.parameter_number, one.parameter_number


def _swap_results(module: Any) -> None:
    root = next(i for i in _entry(module).instructions if i.id == _entry(module).root_id)
    root.operand_ids[0], root.operand_ids[2] = root.operand_ids[2], root.operand_ids[0]
    shapes = root.shape.tuple_shapes
    first = shapes[0].SerializeToString()
    shapes[0].CopyFrom(shapes[2])
    shapes[2].ParseFromString(first)


def _alias_an_input(module: Any) -> None:
    module.input_output_alias.entries.add(output_shape_index=[1], parameter_number=39)


def _cross_aliases(module: Any) -> None:
    one, other = module.input_output_alias.entries[:2]
    one.parameter_number, other.parameter_number = other.parameter_number, one.parameter_number


def _drop_a_layer(module: Any) -> None:
    # a layer is a computation of its own: its call becomes the tuple of what it is given
    layers = {c.id for c in module.computations if c.name.startswith("Layer")}
    call = next(i for i in _entry(module).instructions if layers & {*i.called_computation_ids})
    call.opcode = "tuple"
    del call.called_computation_ids[:]


def _one_rank_s_groups(module: Any) -> None:
    for computation in module.computations:
        for instruction in computation.instructions:
            if instruction.opcode == "all-gather":
                del instruction.replica_groups[1:]
                instruction.replica_groups[0].replica_ids[:] = [0]


MUTATIONS: dict[Callable[[Any], None], str] = {
    _swap_parameters: "parameter ",
    _swap_results: "result 0 is  int32 (2, 128), expected  int32 (2, 4)",
    _alias_an_input: "its aliases",
    lambda module: module.input_output_alias.entries.pop(): "its aliases",
    _cross_aliases: "its aliases",
    _drop_a_layer: "it runs the collectives",
    _one_rank_s_groups: "an all-gather has the groups ((0,),), which do not share out 2 ranks",
}


@pytest.mark.parametrize(("mutation", "said"), MUTATIONS.items(), ids=lambda v: getattr(v, "__name__", ""))
def test_each_departure_is_named(base: Path, mutation: Callable[[Any], None], said: str) -> None:
    plan, graph, proto = _fused(base)
    module = hlo.parse(proto)
    mutation(module)
    found = violations(graph, module.SerializeToString(), plan.spec)
    assert [s for s in found if s.startswith(said)], found
    assert violations(graph, b"no proto", plan.spec)[0].startswith("it cannot be followed")


def test_a_weight_that_is_folded_in_is_found(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(spec(base, tp=2).bundle)
    graph = plan.by_key[GraphKey(Stage.STEP, 3, 128)]
    values = np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32)

    def folded(self: Embedding, ids: Tensor) -> Tensor:
        return self.ops.all_gather(interop.call_jax(lambda i: jnp.asarray(values)[i], ids))

    with monkeypatch.context() as patch:
        patch.setattr(Embedding, "forward", folded)
        assert violations(graph, lower_graph(plan.spec, graph), plan.spec) == [
            "nothing reads draft_model.embed_tokens.weight",
            "nothing reads target_model.embed_tokens.weight",
            f"a constant of {values.nbytes} bytes is folded in, the largest may have {CONSTANT_BYTES}",
        ]

    # too small for the bound, but then nothing reads the parameter, in no layer
    def ones(self: nn.Module, x: Tensor) -> Tensor:
        return interop.call_jax(lambda a: a * jnp.asarray(values[:1, : a.shape[-1]]), x) if x.shape[-1] == 8 else x

    monkeypatch.setattr(qwen3.RMSNorm, "forward", ones)
    found = violations(graph, lower_graph(plan.spec, graph), plan.spec)
    assert "nothing reads target_model.layers.1.self_attn.q_layernorm.weight" in found
    assert not [s for s in found if "constant" in s]


def _proto(function: Callable[..., Any], *arguments: Any) -> bytes:
    module: Any = jax.jit(function).lower(*arguments).compiler_ir("hlo")
    return hlo.canonical(module.as_serialized_hlo_module_proto())


def _summed(x: jax.Array) -> jax.Array:
    return jax.jit(lambda y: collectives.all_reduce(y, 4, 4))(x)


def test_calls_and_loops_are_counted() -> None:
    x = jnp.ones(3)
    key = ("all-reduce", ((0, 1, 2, 3),))

    def nested(x: jax.Array) -> jax.Array:
        inner = lambda y: jax.lax.fori_loop(0, 5, lambda _, z: _summed(_summed(z)), y)  # noqa: E731
        return _summed(jax.lax.fori_loop(0, 3, lambda _, y: inner(y) + 1, x))

    proto = declared(_proto(nested, x))
    assert proto.collectives == {key: 31}
    assert proto.refused == ()
    with pytest.raises(ValueError, match="runs a number of times that cannot be determined"):
        declared(_proto(lambda y: jax.lax.while_loop(lambda z: z[0] < 9, _summed, y), x))


# what the notes of the SDK say that no graph may hold
REFUSED: dict[str, Callable[[jax.Array], Any]] = {
    "conditional": lambda x: jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x),
    "while of unknown length": lambda x: jax.lax.while_loop(lambda z: z[0] < 9, lambda z: z + 1, x),
    "reduce of several operands": jnp.argmax,
    "reduce-precision": lambda x: jax.lax.reduce_precision(x, 5, 10),
    "dot of integers": lambda x: jnp.dot(x.astype(jnp.int32), x.astype(jnp.int32)),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_sdk_does_not_take_is_refused(base: Path, what: str) -> None:
    proto = _proto(REFUSED[what], jnp.ones(3))
    assert what in declared(proto).refused
    plan, graph, _ = _fused(base)
    assert f"it holds a {what}, which the Neuron SDK does not take" in violations(graph, proto, plan.spec)


def test_the_doctor_reads_the_graphs_too(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path / "target", 1)
    out = build(spec(tmp_path, k=0))
    doctor([str(out)])
    bundle = read_bundle(out)
    graph = bundle.graphs[0]
    module = hlo.parse((out / graph.file).read_bytes())
    _cross_aliases(module)
    (out / graph.file).write_bytes(module.SerializeToString())
    relist(out, graph.file)
    capsys.readouterr()
    with pytest.raises(SystemExit):
        doctor([str(out)])
    assert f"CANNOT GENERATE: {graph.file}: its aliases" in capsys.readouterr().out
