"""Torch to HLO: the step of one rank, each kind of layer traced once and called.

Weights and caches stay parameters of the graph; caches are aliased in and out.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Generator, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import Tensor, nn

from compile.graph import collectives
from compile.graph.conversion import Converter, converted
from compile.graph.custom_call import launch_in_graph
from compile.graph.pair import drafts, grouped_state, make_pair, stage_of
from compile.graph.torchax_seam import interop
from model.graph_io import Outputs, StepInputs
from model.graph_spec import GraphSpec, TensorSpec
from model.nki.backing import backing_of
from model.ops import Ops, State, rows_inside
from model.speculative import Pair
from trnspec.bundle import border
from trnspec.bundle.spec import BundleSpec


class TracedOps(Ops):
    """The graph's version of the operations, on torch tensors that represent JAX values."""

    def __init__(self, ranks: int, world: int = 0) -> None:
        self.ranks, self.world = ranks, world or ranks
        if ranks > 1:
            self.groups = tuple(tuple(range(r, r + ranks)) for r in range(0, self.world, ranks))
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

    def repeat(self, count: int, body: Callable[[State], State], state: State) -> State:
        step = interop.jax_view(body)
        return interop.call_jax(lambda s: jax.lax.fori_loop(0, count, lambda _, x: step(x), s), state)

    def shared(self, function: Callable[..., Any], *given: Any, **fixed: Any) -> Any:
        return interop.call_jax(_shared(function, self.ranks, self.world, tuple(fixed.items())), *given)

    def append(self, cache_BGSD: Tensor, new_BGND: Tensor, slots_BN: Tensor, positions_BN: Tensor) -> Tensor:
        def write(cache: jax.Array, rows: jax.Array, slots: jax.Array, places: jax.Array) -> jax.Array:
            at = (slots, slice(None), places)
            return cache.at[at].set(rows, mode="promise_in_bounds", wrap_negative_indices=False)

        inside = interop.call_jax(_inside, cache_BGSD, new_BGND, slots_BN, positions_BN)
        return interop.call_jax(write, cache_BGSD, *inside)

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.ranks == 1:
            return x
        return interop.call_jax(lambda a: collectives.all_reduce(a, self.ranks, self.world), x)

    def all_gather(self, x: Tensor) -> Tensor:
        if self.ranks == 1:
            return x
        return interop.call_jax(lambda a: collectives.all_gather(a, self.ranks, self.world), x)


@functools.cache
def _shared(
    function: Callable[..., Any], ranks: int, world: int, fixed: tuple[tuple[str, Any], ...]
) -> Callable[..., Any]:
    """The function for all graphs of a process: its trace is most of a step's, and no length changes it."""

    def run(*given: Any) -> Any:
        return interop.call_torch(functools.partial(function, TracedOps(ranks, world), **dict(fixed)), *given)

    run.__name__ = function.__name__
    return jax.jit(run)


@jax.jit
def _inside(*given: jax.Array) -> Any:
    """`rows_inside`, traced once in a process."""
    return interop.call_torch(rows_inside, *given)


def lower_graph(spec: BundleSpec, graph: GraphSpec) -> bytes:
    """The serialized HloModuleProto of one planned graph, for one rank.

    Its parameters are the graph's weights, inputs and state in the plan's order; its results the
    outputs, then the state, each state parameter aliased to its result.
    """
    return border.named(converted(_traced(spec, graph)), graph)


def lower_graphs(spec: BundleSpec, graphs: Iterable[GraphSpec]) -> Generator[bytes]:
    """The protos of graphs in their order, the same bytes; one is made by another process while the next is traced."""
    with Converter() as converter:
        begun = ((graph, converter.convert(_traced(spec, graph))) for graph in graphs)
        before = next(begun, None)
        while before:
            (graph, proto), before = before, next(begun, None)
            yield border.named(proto.result(), graph)


def _traced(spec: BundleSpec, graph: GraphSpec) -> bytes:
    """The StableHLO of a graph in bytecode."""
    pair, names = traced_pair(spec, drafts(graph))
    held = {t.name for t in graph.weights}
    stored = {ours: name for ours, name in names.items() if name in held}
    stage = stage_of(graph)

    # only arrays cross into torch: torchax would wrap a callable argument
    def step(named: dict[str, Tensor], inputs: StepInputs, *state: Any) -> tuple[Any, ...]:
        out: Outputs = torch.func.functional_call(pair, named, (stage, inputs, *state))
        return (*out.visible, out.draft_state, out.target_caches, out.counts_B1V)

    def run(weights: list[Any], inputs: list[Any], state: list[Any]) -> list[jax.Array]:
        by_name = {t.name: w for t, w in zip(graph.weights, weights, strict=True)}
        named = {ours: by_name[name] for ours, name in stored.items()}
        given = StepInputs(**{t.name: x for t, x in zip(graph.inputs, inputs, strict=True)})
        return jax.tree.leaves(interop.call_torch(step, named, given, *grouped_state(graph, state)))

    jitted = jax.jit(run, donate_argnums=(2,), keep_unused=True)
    run.__name__ = graph.key.name
    lowered = jitted.lower(*([_struct(t) for t in group] for group in (graph.weights, graph.inputs, graph.state)))
    module: Any = lowered.compiler_ir("stablehlo")
    bytecode = io.BytesIO()
    module.operation.write_bytecode(bytecode)
    return bytecode.getvalue()


@functools.lru_cache(maxsize=2)
def traced_pair(spec: BundleSpec, drafting: bool) -> tuple[Pair, dict[str, str]]:
    """The pair of a bundle's graphs, and its parameters' names there: what one has traced of a layer, others call."""
    backing, names = backing_of(spec.kernels, launch_in_graph, spec.layers), spec.weight_names()
    pair = make_pair(spec, drafting, TracedOps(spec.tp), backing)
    return pair, {ours: names[ours] for ours in pair.state_dict()}


def _struct(tensor: TensorSpec) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tensor.shape, jnp.dtype(tensor.dtype))
