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
from model.parallel import ids_per_rank
from model.weights import RANK
from trnspec.bundle.part import Part
from trnspec.bundle.spec import BundleSpec, logprobs_prompt

# the prefix of a drafter's state other than caches
SLOTS = "draft_model.slots."
# how often each id occurs in each slot's request, in full-sampling graphs
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
    without_drafts = (both, state) if spec.drafter_type.runs_without_drafts else (target_weights, target_caches)
    graphs = list[GraphSpec]()
    for rows, keys in spec.prompts:
        graphs.append(_prompt(GraphKey(Stage.PREFILL, spec.k, keys, rows=rows), spec, both, state))
    if spec.graphs == "all":
        rows, keys = logprobs_prompt(spec.prompts, spec.max_len)
        graphs.append(_prompt(GraphKey(Stage.PREFILL_LOGPROBS, spec.k, keys, rows=rows), spec, both, state))
    for bucket in spec.buckets:
        for k in (*reversed(spec.ks), 0):
            fused = _fused_step(GraphKey(Stage.STEP, k, bucket), spec, *((both, state) if k else without_drafts))
            graphs += [fused] * (spec.graphs == "all") + [replace(fused, key=fused.key._replace(filters=False))]
        if spec.graphs == "all":
            graphs += _split_step(_fused_step(GraphKey(Stage.STEP, spec.k, bucket), spec, both, state), spec)
    return BundlePlan(spec, tuple(graphs), target_weights, draft_weights, (*state, _counts(spec)))


def _prompt(key: GraphKey, spec: BundleSpec, weights: Tensors, state: Tensors) -> GraphSpec:
    """The graph of at most `key.rows` ids of a prompt, with its log-probabilities or that of the id after it."""
    inputs = tensor_specs(INPUTS, B=1, T=key.rows, L=key.bucket // KEY_TILE, F=1)
    graph = GraphSpec(key, weights, inputs, state, tensor_specs(OUTPUTS, B=1, N=spec.rows))
    return _full_sampling(graph, spec, key.rows if key.stage is Stage.PREFILL_LOGPROBS else 1)


def _fused_step(key: GraphKey, spec: BundleSpec, weights: Tensors, state: Tensors) -> GraphSpec:
    """A step with top-k, top-p and min-p."""
    # a host that drafts sends the drafts with the input ids
    rows = 1 if spec.has_draft else key.k + 1
    inputs = tensor_specs(INPUTS, B=spec.batch, D=spec.batch, T=rows, L=key.bucket // KEY_TILE)
    return GraphSpec(key, weights, inputs, state, tensor_specs(OUTPUTS, B=spec.batch, N=key.k + 1))


def _split_step(fused: GraphSpec, spec: BundleSpec) -> Iterator[GraphSpec]:
    """A step with logits processors: a graph that drafts, unless the host does or k is 0, and one that verifies.

    Each has only the tensors that it reads.
    """
    drafter, key = spec.drafter_type, fused.key
    if not spec.has_draft:
        yield _full_sampling(replace(fused, key=key._replace(stage=Stage.VERIFY)), spec, fused.rows)
        return
    outputs = tensor_specs(DRAFT_OUTPUTS, B=spec.batch, N=fused.rows)
    draft = replace(fused, key=key._replace(stage=Stage.DRAFT), outputs=outputs)
    yield _full_sampling(_with_tensors_of(draft, "draft_model."), spec)
    inputs = tensor_specs(INPUTS, B=spec.batch, D=spec.batch, T=fused.rows, L=key.bucket // KEY_TILE)
    verify = replace(fused, key=key._replace(stage=Stage.VERIFY), inputs=inputs)
    with_state = "draft_model." if drafter.verify_passes else SLOTS
    yield _full_sampling(_with_tensors_of(verify, "target_model.", with_state), spec, fused.rows)


def _with_tensors_of(graph: GraphSpec, *prefixes: str) -> GraphSpec:
    """A graph with only the weights and the state whose names begin so."""
    weights, state = (tuple(t for t in group if t.name.startswith(prefixes)) for group in (graph.weights, graph.state))
    return replace(graph, weights=weights, state=state)


def _full_sampling(graph: GraphSpec, spec: BundleSpec, scores: int = 0) -> GraphSpec:
    """The graph with logits processors, with the counts of ids and with the log-probabilities of so many rows."""
    batch, vocabulary = graph.inputs[0].shape[0], spec.target_config.vocab_size
    rows = 1 if graph.key.is_prefill else graph.rows
    sizes = {"B": batch, "N": rows, "W": mask_words(vocabulary), "A": NUM_PENALTY_FIELDS, "M": MAX_BIASES}
    sizes |= {"V": vocabulary} if graph.key.is_prefill else {}
    inputs = graph.inputs + tensor_specs({name: INPUTS[name] for name in FULL_SAMPLING}, **sizes)
    named = {"scores": OUTPUTS["scores"]} if scores else {}
    outputs = graph.outputs + tensor_specs(named, B=batch, N=scores, C=COLUMNS)
    return replace(graph, inputs=inputs, state=(*graph.state, _counts(spec)), outputs=outputs)


def _counts(spec: BundleSpec) -> TensorSpec:
    """The counts of the ids of one rank's logits."""
    vocabulary = spec.target_config.vocab_size
    width = ids_per_rank(vocabulary, spec.tp if spec.parts[0].ctx.sharded else 1)
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
