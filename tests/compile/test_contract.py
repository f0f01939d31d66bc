"""What NxDI's host relies on, read back from the graphs: order, shapes, aliases, collectives, weights outside."""

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
from torch import Tensor, nn

from compile.build import build
from compile.doctor import main as doctor
from compile.graph import collectives
from compile.graph.custom_call import launch_in_graph
from compile.graph.torchax_seam import interop
from compile.graph.trace import lower_graph, traced_pair
from model import qwen3
from model.graph_key import GraphKey, Stage
from model.graph_spec import GraphSpec
from model.nki.launches import Launch, Result
from model.parallel import Embedding
from tests.compile.tiny import relist, spec, write_model
from trnspec.bundle import hlo
from trnspec.bundle.contract import CONSTANT_BYTES, declared, violations
from trnspec.bundle.opening import read_bundle
from trnspec.bundle.plan import BundlePlan, make_plan, whole_prompts

ROOT = Path(__file__).resolve().parents[2]


# prompts of every size, and of one
CASES: list[dict[str, Any]] = [
    {"k": 1, "chunks": ()},
    {"tp": 8, "dtype": "bf16", "batch": 1},
    {"tp": 2, "kernels": "nki"},
    {"tp": 2, "k": 0, "max_len": 256},
]


@pytest.mark.parametrize("changes", CASES, ids=str)
def test_every_graph_is_what_the_plan_says(base: Path, changes: dict[str, Any]) -> None:
    plan = make_plan(spec(base, **changes).bundle)
    tp = plan.spec.tp
    for graph in (*plan.graphs, *whole_prompts(plan)):
        proto = lower_graph(plan.spec, graph)
        assert violations(graph, proto, plan.spec) == []
        found = declared(proto)
        # draft and target alike: nothing but caches is aliased, every cache is, and in its own order
        names = [t.name for t in (*graph.weights, *graph.inputs, *graph.state)]
        assert [names[found.aliases[i]] for i in sorted(found.aliases)] == [t.name for t in graph.state]
        of_ours = graph.key.asking or graph.key.stage is Stage.PREFILL_DRAFT
        assert of_ours or min(found.aliases) == 4, "NxDI reads four results before the caches"
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
    _swap_results: "result 0 is accepted_tokens int32 (2, 128), expected accepted_tokens int32 (2, 4)",
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


@pytest.fixture
def traced_anew() -> Iterator[None]:
    """Nothing that was traced of a layer before is called, and nothing of this test later."""
    traced_pair.cache_clear()
    yield
    traced_pair.cache_clear()


@pytest.mark.usefixtures("traced_anew")
@pytest.mark.parametrize("kernels", ["reference", "nki"])
def test_a_graph_does_not_depend_on_those_traced_before_it(base: Path, kernels: str) -> None:
    """A build that goes on traces the missing ones alone."""
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
        assert violations(graph, lower_graph(plan.spec, graph), plan.spec) == [
            "nothing reads draft_model.embed_tokens.weight",
            "nothing reads target_model.embed_tokens.weight",
            f"a constant of {values.nbytes} bytes is folded in, the largest may have {CONSTANT_BYTES}",
        ]

    # too small for the bound, but then nothing reads the parameter, in no layer
    def ones(self: nn.Module, x: Tensor) -> Tensor:
        return interop.call_jax(lambda a: a * jnp.asarray(values[:1, : a.shape[-1]]), x) if x.shape[-1] == 8 else x

    monkeypatch.setattr(qwen3.RMSNorm, "forward", ones)
    traced_pair.cache_clear()
    found = violations(graph, lower_graph(plan.spec, graph), plan.spec)
    assert "nothing reads target_model.layers.1.self_attn.q_layernorm.weight" in found
    assert not [s for s in found if "constant" in s]


def _proto(function: Callable[..., Any], *arguments: Any) -> bytes:
    module: Any = jax.jit(function).lower(*arguments).compiler_ir("hlo")
    return hlo.canonical(module.as_serialized_hlo_module_proto())


def _scattered(x: jax.Array, at: jax.Array) -> jax.Array:
    numbers = jax.lax.ScatterDimensionNumbers((), (0,), (0,))
    return jax.lax.scatter(x, at[:, None], jnp.ones(at.shape), numbers, mode="promise_in_bounds")


def _gathered(x: jax.Array, at: jax.Array) -> jax.Array:
    numbers = jax.lax.GatherDimensionNumbers((), (0,), (0,))
    return jax.lax.gather(x, at[:, None], numbers, (1,), mode="promise_in_bounds")


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
    "dot of integers (NCC_EVRF035)": lambda x: jnp.dot(x.astype(jnp.int32), x.astype(jnp.int32)),
    # four rows of three, as the pages of the codes have it
    "scatter outside of its operand (NCC_EVRF031)": lambda x: _scattered(x, jax.lax.iota(jnp.int32, 4)),
    "gather outside of its operand (NCC_EVRF056)": lambda x: _gathered(x, jax.lax.iota(jnp.int32, 4)),
    "scatter that computes with integers (NCC_EVRF060)": lambda x: x.astype(jnp.int32).at[jnp.argsort(x)].add(1),
    "all-reduce of integers (NCC_EVRF061)": lambda x: collectives.all_reduce(x.astype(jnp.int32), 2, 2),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_sdk_does_not_take_is_refused(base: Path, what: str) -> None:
    proto = _proto(REFUSED[what], jnp.ones(3))
    assert what in declared(proto).refused
    plan, graph, _ = _fused(base)
    assert f"it holds a {what}, which the Neuron SDK does not take" in violations(graph, proto, plan.spec)


def _as_reduce_scatter(module: Any) -> None:
    next(i for i in _all(module) if i.opcode == "all-reduce").opcode = "reduce-scatter"


def _as_int64(module: Any) -> None:
    next(i for i in _all(module) if i.opcode == "power").shape.element_type = 5


def _on_one_core(module: Any) -> None:
    call = next(i for i in _all(module) if i.custom_call_target)
    call.backend_config = call.backend_config.replace(b'"lnc": 2', b'"lnc": 1')


def _of_a_file_elsewhere(module: Any) -> None:
    next(i for i in _all(module) if i.custom_call_target).backend_config = b"eyJrbGlyX2JpbmFyeSI6ICJnb25lIn0="


def _not_in_place(module: Any) -> None:
    del next(i for i in _all(module) if i.output_operand_aliasing).output_operand_aliasing[:]


# refusals of graphs that jax does not write, or not without a device: an edit of one that it does
EDITED: dict[Callable[[Any], None], str] = {
    _as_reduce_scatter: "reduce-scatter of integers (NCC_EVRF063)",
    _as_int64: "power of int64 (NCC_EVRF062)",
    _on_one_core: "call of verify_attention on 1 cores in a graph of 2 (NCC_EVRF066)",
    _of_a_file_elsewhere: "kernel call whose text is no launch (NCC_EVRF059)",
    _not_in_place: "call of verify_attention that does not say what it writes in place",
}


def _all(module: Any) -> list[Any]:
    return [i for c in module.computations for i in c.instructions]


def _calling(q: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    launch = Launch("verify_attention", [f"#{i}" for i in range(6)], (Result((1, 1, 1, 64), "float32"),), (3, 4))
    return launch_in_graph(launch, (q, *others))


@pytest.mark.parametrize(("edit", "said"), EDITED.items(), ids=lambda v: getattr(v, "__name__", ""))
def test_what_no_build_writes_is_refused_by_its_code(edit: Callable[[Any], None], said: str) -> None:
    rows, cache = jnp.ones((1, 1, 1, 64)), jnp.ones((1, 1, 64, 64))
    functions: tuple[Callable[..., Any], ...] = (
        lambda x: collectives.all_reduce(x.astype(jnp.int32), 2, 2),
        lambda x: jnp.power(x, x + 1),
        lambda x: interop.call_torch(_calling, rows, rows, rows, cache, cache, jnp.zeros((1, 1), jnp.int32)),
    )
    found = list[str]()
    for function in functions:
        module = hlo.parse(_proto(function, jnp.ones(4)))
        assert not {said} & set(declared(module.SerializeToString()).refused)
        with contextlib.suppress(StopIteration):
            edit(module)
            found += declared(module.SerializeToString()).refused
    assert said in found


def test_the_border_is_named_as_the_plan_names_it(base: Path) -> None:
    """What a device's runtime knows tensors by; state must be aliased, and a result is never a parameter itself."""
    plan, graph, proto = _fused(base)
    module = hlo.parse(proto)
    entry = hlo.entry(module)
    parameters = sorted((i for i in entry.instructions if i.opcode == "parameter"), key=lambda i: i.parameter_number)
    inputs, state = [t.name for t in (*graph.weights, *graph.inputs)], [t.name for t in graph.state]
    names = [*inputs, *(f"{name}.must_alias_input" for name in state)]
    assert [p.name for p in parameters] == [hlo.input_name(p) for p in parameters] == names
    root = next(i for i in entry.instructions if i.id == entry.root_id)
    assert hlo.output_names(root) == [*(t.name for t in graph.outputs), *state]
    assert {alias.kind for alias in module.input_output_alias.entries} == {hlo.MUST_ALIAS}
    for mutation, said in {
        _rename: "parameter 0 is x ",
        _may_alias: "its aliases",
        _pass_through: "result 4 is a par",
    }.items():
        edited = hlo.parse(proto)
        mutation(edited)
        found = violations(graph, edited.SerializeToString(), plan.spec)
        assert [s for s in found if s.startswith(said)], found


def _rename(module: Any) -> None:
    first = next(i for i in hlo.entry(module).instructions if i.parameter_number == 0 and i.opcode == "parameter")
    first.frontend_attributes.map[0].value = "x"


def _may_alias(module: Any) -> None:
    module.input_output_alias.entries[0].kind = 1


def _pass_through(module: Any) -> None:
    entry = hlo.entry(module)
    root = next(i for i in entry.instructions if i.id == entry.root_id)
    number = module.input_output_alias.entries[0].parameter_number
    root.operand_ids[4] = next(
        i.id for i in entry.instructions if i.opcode == "parameter" and i.parameter_number == number
    )


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


@pytest.mark.parametrize("rows", [3, 4])
def test_an_index_that_stays_inside_is_taken(rows: int) -> None:
    """A row of each place, and one more."""
    for function in (_scattered, _gathered):
        proto = _proto(lambda x, f=function: f(x, jax.lax.iota(jnp.int32, rows)), jnp.ones(3))  # type: ignore[misc]
        assert bool(declared(proto).refused) == (rows == 4)
