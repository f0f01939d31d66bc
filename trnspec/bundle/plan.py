"""The plan of a bundle, computed from its spec: every graph, shape and byte."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from model.cache import KEY_TILE, cache_shape
from model.dtypes import BY_FLAG
from model.graph_io import DRAFT_OUTPUTS, FULL_SAMPLING, INPUTS, OUTPUTS, mask_words, tensor_specs
from model.graph_key import GraphKey, Stage
from model.graph_spec import GraphSpec, TensorSpec
from model.logits_processors import MAX_BIASES, NUM_PENALTY_FIELDS
from model.logprobs import COLUMNS
from model.weights import RANK
from trnspec.bundle.part import Part
from trnspec.bundle.spec import BundleSpec

# the prefix of a drafter's state other than caches
SLOTS = "draft_model.slots."
# how often each id occurs in each slot's request, in asking graphs
COUNTS = "counts"
Tensors = tuple[TensorSpec, ...]


def is_cache(name: str) -> bool:
    """Whether a state of this name is keys or values."""
    return ".kv." in name


@dataclass(frozen=True)
class BundlePlan:
    """The contents of a bundle, known before anything is made; weights, caches and state are those of one rank."""

    spec: BundleSpec
    graphs: tuple[GraphSpec, ...]
    target_weights: Tensors
    draft_weights: Tensors
    state: Tensors

    @functools.cached_property
    def by_key(self) -> dict[GraphKey, GraphSpec]:
        return {graph.key: graph for graph in self.graphs}

    @property
    def weight_bytes(self) -> int:
        return sum(t.bytes for t in self.target_weights + self.draft_weights)

    @property
    def cache_bytes(self) -> int:
        return sum(t.bytes for t in self.state if t.name != COUNTS)


def make_plan(spec: BundleSpec) -> BundlePlan:
    target_weights, *_draft = (_weights(part, spec) for part in spec.parts)
    target_caches, *draft_caches = (_caches(part, spec) for part in spec.parts)
    draft_weights: Tensors = sum(_draft, ())
    both, state = draft_weights + target_weights, sum(draft_caches, ()) + _drafter_state(spec) + target_caches
    graphs = list[GraphSpec]()
    for rows, keys in spec.prompts:
        inputs = tensor_specs(INPUTS, B=1, T=rows, L=keys // KEY_TILE, F=1)
        key, outputs = GraphKey(Stage.PREFILL, spec.k, keys, rows=rows), tensor_specs(OUTPUTS, B=1, N=spec.rows)
        prompt = GraphSpec(key, both, inputs, state, outputs)
        graphs += [prompt, _asking(prompt, spec)]
    for bucket in spec.buckets:
        for k in reversed(spec.ks):
            graphs += _steps(GraphKey(Stage.STEP, k, bucket), spec, both, state)
        without_drafts = (both, state) if spec.drafter_type.runs_without_drafts else (target_weights, target_caches)
        graphs += _steps(GraphKey(Stage.STEP, 0, bucket), spec, *without_drafts)
    return BundlePlan(spec, tuple(graphs), target_weights, draft_weights, (*state, _counts(spec)))


def _steps(key: GraphKey, spec: BundleSpec, weights: Tensors, state: Tensors) -> Iterator[GraphSpec]:
    """A step with top-k, top-p and min-p and one without; of the largest k and of 0 also an asking one.

    The asking step of drafts is split: one graph drafts, unless the host does, and one verifies.
    """
    # a host that drafts sends the drafts with the input ids
    rows = 1 if spec.has_draft else key.k + 1
    inputs = tensor_specs(INPUTS, B=spec.batch, D=spec.batch, T=rows, L=key.bucket // KEY_TILE)
    outputs = tensor_specs(OUTPUTS, B=spec.batch, N=key.k + 1)
    for filters in (True, False):
        graph = GraphSpec(key._replace(filters=filters), weights, inputs, state, outputs)
        yield graph
        if filters and key.k in (0, spec.k):
            yield from (_asking(g, spec) for g in (_split_step(graph, spec) if key.k else (graph,)))


def _split_step(fused: GraphSpec, spec: BundleSpec) -> Iterator[GraphSpec]:
    """A fused step as two graphs, one that drafts and one that verifies, each with only the tensors that it reads."""
    drafter, key = spec.drafter_type, fused.key
    if not spec.has_draft:
        yield replace(fused, key=key._replace(stage=Stage.VERIFY))
        return
    outputs = tensor_specs(DRAFT_OUTPUTS, B=spec.batch, N=fused.rows)
    draft = replace(fused, key=key._replace(stage=Stage.DRAFT), outputs=outputs)
    yield _with_tensors_of(draft, "draft_model.")
    inputs = tensor_specs(INPUTS, B=spec.batch, D=spec.batch, T=fused.rows, L=key.bucket // KEY_TILE)
    verify = replace(fused, key=key._replace(stage=Stage.VERIFY), inputs=inputs)
    yield _with_tensors_of(verify, "target_model.", "draft_model." if drafter.verify_passes else SLOTS)


def _with_tensors_of(graph: GraphSpec, *prefixes: str) -> GraphSpec:
    """A graph with only the weights and the state whose names begin so."""
    weights, state = (tuple(t for t in group if t.name.startswith(prefixes)) for group in (graph.weights, graph.state))
    return replace(graph, weights=weights, state=state)


def _asking(graph: GraphSpec, spec: BundleSpec) -> GraphSpec:
    """The same graph for requests beyond sampling parameters, with the counts of ids and with scores."""
    key, batch, vocabulary = graph.key._replace(asking=True), graph.inputs[0].shape[0], spec.target_config.vocab_size
    rows = 1 if key.is_prefill else graph.rows
    sizes = {"B": batch, "N": rows, "W": mask_words(vocabulary), "A": NUM_PENALTY_FIELDS, "M": MAX_BIASES}
    sizes |= {"V": vocabulary} if key.is_prefill else {}
    inputs = graph.inputs + tensor_specs({name: INPUTS[name] for name in FULL_SAMPLING}, **sizes)
    # drafts have no scores
    named = {"scores": OUTPUTS["scores"]} if key.stage is not Stage.DRAFT else {}
    outputs = graph.outputs + tensor_specs(named, B=batch, N=key.rows or rows, C=COLUMNS)
    return GraphSpec(key, graph.weights, inputs, (*graph.state, _counts(spec)), outputs)


def _counts(spec: BundleSpec) -> TensorSpec:
    """The counts of the ids of one rank's logits."""
    vocabulary = spec.target_config.vocab_size
    width = vocabulary // spec.tp if spec.parts[0].ctx.sharded else vocabulary
    # three axes, so that no output of ids has its shape
    return TensorSpec(COUNTS, (spec.batch, 1, width), "int32")


def _weights(part: Part, spec: BundleSpec) -> Tensors:
    shapes, dtype = part.shapes, BY_FLAG[spec.dtype].name
    weights = (TensorSpec(f"{part.prefix}.{w.name}", shapes[w.name], w.dtype or dtype) for w in part.weights)
    return (*weights, TensorSpec(f"{part.prefix}.{RANK}", (1,), "int32"))


def _caches(part: Part, spec: BundleSpec) -> Tensors:
    shape, dtype = cache_shape(part.config, spec.tp, spec.pool), BY_FLAG[spec.dtype].name
    names = (f"{part.prefix}.kv.{i}.{which}" for i in range(part.config.num_hidden_layers) for which in "kv")
    return tuple(TensorSpec(name, shape, dtype) for name in names)


def _drafter_state(spec: BundleSpec) -> Tensors:
    """The drafter's state other than caches."""
    if not spec.has_draft:
        return ()
    sizes, dtype = {"B": spec.batch, "K": spec.k, "H": spec.draft_config.hidden_size}, BY_FLAG[spec.dtype].name
    return tuple(
        TensorSpec(SLOTS + state.name, tuple(sizes.get(a) or int(a) for a in state.axes.split()), state.dtype or dtype)
        for state in spec.drafter_type.state_spec
    )
