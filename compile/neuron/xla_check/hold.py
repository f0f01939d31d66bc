"""Compares a graph that torch_xla lowered with the plan."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from compile.neuron.module import REQUEST_COUNTS
from compile.neuron.xla_check.lower import INPUTS
from model.graph_spec import GraphSpec, TensorSpec
from trnspec.bundle.contract import declared, unsupported_sentence
from trnspec.bundle.plan import BundlePlan

# constants that the tracer turns into parameters, as angles and steps; every weight of a real model is larger
_CONSTANT_BYTES = 1024


def opcodes(proto: bytes) -> dict[str, int]:
    """How often each opcode is written."""
    return dict(sorted(declared(proto).opcodes.items()))


def departures(plan: BundlePlan, graph: GraphSpec, proto: bytes, lowered: dict[str, Any]) -> Iterator[str]:
    """One clause for each difference between a lowered graph and the plan."""
    found = declared(proto)
    yield from (f"{name} fell back to the CPU" for name in lowered["fallbacks"])
    yield from (unsupported_sentence(what) for what in found.refused)
    counts = TensorSpec(REQUEST_COUNTS, (plan.spec.batch,), "int32")
    state = (*graph.state, counts)
    yield from _parameters(graph, state, found.parameters, lowered["parameters"])
    visible = tuple(graph.outputs) if plan.spec.k else (TensorSpec("", (graph.outputs[1].shape[0],), "int32"),)
    for i, wanted in enumerate((*visible, *state)):
        result = found.results[i] if i < len(found.results) else None
        if result is None or (result.shape, result.dtype) != (wanted.shape, wanted.dtype):
            yield f"result {i} is {result}, expected {wanted.dtype} {wanted.shape}"
    aliases = {t.name: len(visible) + i for i, t in enumerate(state)}
    if lowered["aliases"] != aliases:
        yield "its aliases are not the caches and the counts in the plan's order"
    yield from _collectives(plan, graph, found.collectives)


def _parameters(
    graph: GraphSpec, state: tuple[TensorSpec, ...], parameters: tuple[TensorSpec, ...], numbers: dict[str, int]
) -> Iterator[str]:
    wanted = {t.name: t for t in (*graph.weights, *state)} | {t.name: t for t in graph.inputs if t.name in INPUTS}
    for name, number in numbers.items():
        if name in wanted and (parameters[number].shape, parameters[number].dtype) != (
            wanted[name].shape,
            wanted[name].dtype,
        ):
            yield f"parameter {name} is {parameters[number].dtype} {parameters[number].shape}"
    for name in wanted.keys() - numbers.keys():
        if name.endswith(".weight") and not _dead(graph, name):
            yield f"nothing reads {name}"
    strangers = [p for i, p in enumerate(parameters) if i not in set(numbers.values())]
    # at most 8 bytes an element
    large = [p.shape for p in strangers if 8 * math.prod(p.shape) > _CONSTANT_BYTES]
    yield from (f"a constant of the shape {shape} is a parameter" for shape in large)


def _dead(graph: GraphSpec, name: str) -> bool:
    """Whether a prefill never reads a weight: the last layer of its draft only writes caches."""
    last = max(
        (int(t.name.split(".")[2]) for t in graph.weights if t.name.startswith("draft_model.layers.")), default=0
    )
    behind = ("o_proj", "mlp", "post_attention_layernorm", "q_proj", "q_layernorm")
    of_last = name.startswith(f"draft_model.layers.{last}.") and any(part in name for part in behind)
    head = name in ("draft_model.norm.weight", "draft_model.lm_head.weight")
    return graph.key.is_prefill and (of_last or head)


def _collectives(plan: BundlePlan, graph: GraphSpec, found: Counter[Any]) -> Iterator[str]:
    spec = plan.spec
    of_target, of_draft = spec.parallel()
    wanted = Counter({opcode: times for opcode, times in graph.collectives.items() if times})
    if graph.key.is_prefill and spec.has_draft and of_draft.tp > 1:
        # the tracer drops the draft's operations after its last keys; in a step, later collectives keep them
        wanted["all-reduce"] -= 2
    counted = Counter[str]()
    for (opcode, groups), times in found.items():
        counted[opcode] += times
        if sorted(rank for group in groups for rank in group) != list(range(spec.tp)):
            yield f"an {opcode} has the groups {groups}, which do not share out {spec.tp} ranks"
    if counted != +wanted:
        yield f"it runs the collectives {dict(counted)}, expected {dict(wanted)}"
    sizes = {of_target.tp, of_draft.tp}
    if strange := {len(group) for _, groups in found for group in groups} - sizes:
        yield f"its groups have {strange} ranks, expected {sizes - {1}}"
