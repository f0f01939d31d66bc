"""Torch to HLO: the step of one rank, each kind of layer traced once and called.

Weights and caches stay parameters of the graph; caches are aliased in and out. A launch of an NKI kernel is a custom
call by the name that Trainium's compiler knows, whose configuration is the launch as text (`model/nki/launches.py`):
the CPU runtime reads it, for a device `compile/neuron/specialise.py` puts the vendor's in its place.
"""

import functools
import io
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jaxlib import _jax
from torch import Tensor, nn

from compile.graph.collectives import ALL_GATHER, ALL_REDUCE
from compile.graph.pair import drafts, grouped_state, make_pair
from compile.graph.torchax_seam import interop
from model.errors import UserError
from model.graph_io import Outputs, StepInputs
from model.graph_spec import GraphSpec
from model.nki.context import make_context
from model.nki.launches import API_VERSION, CUSTOM_CALL_TARGET, Launch, Result, to_text
from model.ops import Ops, State
from model.speculative import Pair
from model.stages import run_stage
from trnspec.bundle import hlo
from trnspec.bundle.contract import violations
from trnspec.bundle.spec import BundleSpec


class TracedOps(Ops):
    """The graph's version of the operations, on torch tensors that represent JAX values."""

    def __init__(self, ranks: int, gather: str = "all_reduce") -> None:
        self.ranks, self.gather = ranks, gather
        self.groups = (tuple(range(ranks)),) if ranks > 1 else None
        self._kinds: dict[Any, Callable[..., Any]] = {}

    def call(self, module: nn.Module, *args: Any) -> Any:
        # modules of one type and config share a trace; other shapes make JAX trace again
        kind = (type(module), module.config)
        if kind not in self._kinds:

            def run(weights: Any, inner: Any) -> Any:
                return interop.call_torch(functools.partial(torch.func.functional_call, module), weights, inner)

            run.__name__ = type(module).__name__
            self._kinds[kind] = jax.jit(run)
        return interop.call_jax(self._kinds[kind], dict(module.named_parameters()), args)

    def fori_loop(self, count: int, body: Callable[[State], State], state: State) -> State:
        step = interop.jax_view(body)
        return interop.call_jax(lambda s: jax.lax.fori_loop(0, count, lambda _, x: step(x), s), state)

    def jit(self, function: Callable[..., Any], *given: Any, **fixed: Any) -> Any:
        return interop.call_jax(_jitted(function, self.ranks, self.gather, tuple(fixed.items())), *given)

    def append(self, pool_PGKD: Tensor, new_BGND: Tensor, blocks_BN: Tensor, offsets_BN: Tensor) -> Tensor:
        def write(pool: jax.Array, rows: jax.Array, blocks: jax.Array, offsets: jax.Array) -> jax.Array:
            at = pool.at[blocks, :, offsets]
            return at.set(rows, mode="promise_in_bounds", wrap_negative_indices=False)

        return interop.call_jax(write, pool_PGKD, new_BGND.transpose(1, 2), blocks_BN, offsets_BN)

    def all_reduce(self, x: Tensor) -> Tensor:
        return x if self.ranks == 1 else interop.call_jax(lambda a: ALL_REDUCE.bind(a, ranks=self.ranks), x)

    def all_gather(self, x: Tensor, rank_11: Tensor) -> Tensor:
        if self.ranks == 1 or self.gather == "all_reduce":
            return super().all_gather(x, rank_11)
        return interop.call_jax(lambda a: ALL_GATHER.bind(a, ranks=self.ranks), x)


def launch_in_graph(launch: Launch, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The custom call of a launch, on torch tensors that represent JAX values."""

    def call(*operands: jax.Array) -> tuple[jax.Array, ...]:
        given = [Result(tuple(x.shape), str(x.dtype)) for x in operands]
        made = [jax.ShapeDtypeStruct(r.shape, jnp.dtype(r.dtype)) for r in launch.outputs(given)]
        text = to_text(launch, given)
        # what the kernel writes in place is the operand and the result
        aliases = {number: len(launch.results) + at for at, number in enumerate(launch.changed)}
        run = jax.ffi.ffi_call(
            CUSTOM_CALL_TARGET,
            made,
            custom_call_api_version=API_VERSION,
            legacy_backend_config=text,
            input_output_aliases=aliases,
        )
        return tuple(run(*operands))

    return tuple(interop.call_jax(call, *tensors))


@functools.cache
def _jitted(
    function: Callable[..., Any], ranks: int, gather: str, fixed: tuple[tuple[str, Any], ...]
) -> Callable[..., Any]:
    """The function for all graphs of a process: its trace is most of a step's, and no length changes it."""

    def run(*given: Any) -> Any:
        return interop.call_torch(functools.partial(function, TracedOps(ranks, gather), **dict(fixed)), *given)

    run.__name__ = function.__name__
    return jax.jit(run)


def lower_graph(spec: BundleSpec, graph: GraphSpec) -> bytes:
    """The serialized HloModuleProto of one planned graph, for one rank.

    Its parameters are the graph's weights, inputs and state in the plan's order; its results the outputs, then the
    state, each state parameter aliased to its result.
    """
    pair = traced_pair(spec, drafts(graph))
    parameters = pair.state_dict().keys()

    # only arrays cross into torch: torchax would wrap a callable argument
    def step(weights: dict[str, Tensor], inputs: StepInputs, *state: Any) -> tuple[Any, ...]:
        out: Outputs = torch.func.functional_call(pair, weights, (run_stage, graph.key, inputs, *state))
        return (*out.visible, out.draft_state, out.target_caches, out.counts_B1V)

    def run(weights: list[Any], inputs: list[Any], state: list[Any]) -> list[jax.Array]:
        named = {t.name: w for t, w in zip(graph.weights, weights, strict=True) if t.name in parameters}
        given = StepInputs(**{t.name: x for t, x in zip(graph.inputs, inputs, strict=True)})
        return jax.tree.leaves(interop.call_torch(step, named, given, *grouped_state(graph, state)))

    jitted = jax.jit(run, donate_argnums=(2,), keep_unused=True)
    run.__name__ = graph.key.name
    groups = (graph.weights, graph.inputs, graph.state)
    lowered = jitted.lower(*([jax.ShapeDtypeStruct(t.shape, jnp.dtype(t.dtype)) for t in group] for group in groups))
    return proto_of(lowered, graph)


def proto_of(lowered: Any, graph: GraphSpec) -> bytes:
    """The HloModuleProto of a function that JAX has lowered, with the names of a graph's I/O."""
    module: Any = lowered.compiler_ir("stablehlo")
    bytecode = io.BytesIO()
    module.operation.write_bytecode(bytecode)
    computation = _jax.mlir.mlir_module_to_xla_computation(bytecode.getvalue(), use_tuple_args=False, return_tuple=True)
    return hlo.annotated(hlo.canonical(computation.as_serialized_hlo_module_proto()), graph)


def lower_graphs(spec: BundleSpec, graphs: Iterable[GraphSpec]) -> Iterator[tuple[GraphSpec, bytes]]:
    """Graphs with their protos; UserError for one that is not what its plan says."""
    for graph in graphs:
        proto = lower_graph(spec, graph)
        if clauses := violations(graph, proto, spec):
            raise UserError(f"{graph.file} is not what is planned: {clauses[0]}; this is a fault of trnspec, report it")
        yield graph, proto


@functools.lru_cache(maxsize=2)
def traced_pair(spec: BundleSpec, drafting: bool) -> Pair:
    """Target and drafter of a bundle's graphs, which share the traces of their layers."""
    ctx = make_context(
        spec.kernels,
        spec.tp,
        TracedOps(spec.tp, spec.gather),
        launch_in_graph,
        spec.layers,
        spec.without,
        spec.weights == "fp8",
    )
    return make_pair(spec, drafting, ctx)
