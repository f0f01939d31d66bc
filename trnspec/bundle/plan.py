"""The plan: every graph, shape, byte and collective of a bundle, by arithmetic alone, from its spec."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from model.asks import ASKED, BIASES
from model.attention import KEY_TILE
from model.cache import cache_shape
from model.drafters.kind import Counts, DraftPass, decoder_collectives
from model.dtypes import BY_FLAG
from model.graph_io import ASKS, DRAFTED, INPUTS, OUTPUTS, tensor_specs, words_of
from model.graph_key import GraphKey, Stage
from model.graph_spec import GraphSpec, TensorSpec
from model.nki.filter_floor import ALL_GATHERS, GUESS_GATHERS
from model.scores import COLUMNS, blocks
from model.weights import RANK
from trnspec.bundle.part import Part
from trnspec.bundle.spec import BundleSpec

# the prefix of the names of a drafter's state beside caches
KEPT = "draft_model.kept."
# how often each id occurs in each slot's request, in asking graphs
COUNTS = "counts"
# a draft's pass over a prompt
_PROMPT = (DraftPass(0, 0),)


def is_cache(name: str) -> bool:
    """Whether a state of this name is keys or values."""
    return ".kv." in name


@dataclass(frozen=True)
class BundlePlan:
    """The contents of a bundle, known before anything is made."""

    spec: BundleSpec
    graphs: tuple[GraphSpec, ...]
    target_weights: tuple[TensorSpec, ...]
    draft_weights: tuple[TensorSpec, ...]
    state: tuple[TensorSpec, ...]

    @functools.cached_property
    def by_key(self) -> dict[GraphKey, GraphSpec]:
        """Every graph by its key."""
        return {graph.key: graph for graph in self.graphs}

    @property
    def weight_bytes(self) -> int:
        """Weights of both models on one rank."""
        return sum(t.bytes for t in self.target_weights + self.draft_weights)

    @property
    def cache_bytes(self) -> int:
        """Caches of both models on one rank."""
        return sum(t.bytes for t in self.state if t.name != COUNTS)


def make_plan(spec: BundleSpec) -> BundlePlan:
    """The plan of a checked spec."""
    weights = {part.role: _weights(part, spec) for part in spec.parts}
    caches = {part.role: _caches(part, spec) for part in spec.parts}
    target_weights, draft_weights = weights["target"], weights.get("draft", ())
    both, state = draft_weights + target_weights, caches.get("draft", ()) + _kept(spec) + caches["target"]
    graphs = list[GraphSpec]()
    for rows, keys in spec.prompts:
        prompt = _prefill(spec, rows, keys, both, state)
        graphs += [prompt, _asking(prompt, spec)]
    for bucket in spec.buckets:
        for k in reversed(spec.ks):
            graphs += _steps(GraphKey(Stage.STEP, k, bucket), spec, both, state)
        alone = (both, state) if spec.kind.follows else (target_weights, caches["target"])
        graphs += _steps(GraphKey(Stage.STEP, 0, bucket), spec, *alone)
    return BundlePlan(spec, tuple(graphs), target_weights, draft_weights, (*state, _counts(spec)))


def whole_prompts(plan: BundlePlan) -> tuple[GraphSpec, ...]:
    """The graphs of whole prompts, one a bucket, as a host takes them that knows no chunks."""
    weights = plan.draft_weights + plan.target_weights
    state = tuple(t for t in plan.state if t.name != COUNTS)
    return tuple(_prefill(plan.spec, bucket, bucket, weights, state) for bucket in plan.spec.buckets)


def _prefill(
    spec: BundleSpec, rows: int, keys: int, weights: tuple[TensorSpec, ...], state: tuple[TensorSpec, ...]
) -> GraphSpec:
    """The graph of at most `rows` ids of a prompt, which attend `keys` positions."""
    inputs = tensor_specs(INPUTS, B=1, T=rows, L=keys // KEY_TILE, F=1)
    outputs = tensor_specs(OUTPUTS, B=1, N=spec.rows)
    key = GraphKey(Stage.PREFILL, spec.k, keys, rows=rows)
    return GraphSpec(key, weights, inputs, state, outputs, _collectives(spec, _PROMPT))


def _tensors_of(graph: GraphSpec, *prefixes: str) -> dict[str, Any]:
    """A graph's weights and state whose names begin so."""
    own = (tuple(t for t in tensors if t.name.startswith(prefixes)) for tensors in (graph.weights, graph.state))
    return dict(zip(("weights", "state"), own, strict=True))


def _steps(
    key: GraphKey, spec: BundleSpec, weights: tuple[TensorSpec, ...], state: tuple[TensorSpec, ...]
) -> Iterator[GraphSpec]:
    """A step for rows that filter and one for rows that do not; of the largest k and of 0 also an asking one.

    The asking step of drafts is in halves: one that drafts, unless the host does, and one that verifies.
    """
    # a host that drafts brings the drafts with the input ids
    rows = 1 if spec.has_draft else key.k + 1
    inputs = tensor_specs(INPUTS, B=spec.batch, D=spec.batch, T=rows, L=key.bucket // KEY_TILE)
    outputs = tensor_specs(OUTPUTS, B=spec.batch, N=key.k + 1)
    passes = spec.kind.passes(key.k, spec.k) if key.k or spec.kind.follows else ()
    for filters in (True, False):
        counts = _collectives(spec, passes, filters)
        graph = GraphSpec(key._replace(filters=filters), weights, inputs, state, outputs, counts)
        yield graph
        if filters and key.k in (0, spec.k):
            yield from (_asking(g, spec) for g in (_halves(graph, spec) if key.k else (graph,)))


def _halves(fused: GraphSpec, spec: BundleSpec) -> Iterator[GraphSpec]:
    """A fused step as two graphs, the first drafts and the second verifies: each has only the tensors that it reads."""
    kind, key = spec.kind, fused.key
    if not spec.has_draft:
        yield replace(fused, key=key._replace(stage=Stage.VERIFY))
        return
    passes = kind.passes(key.k, spec.k)
    keeping = tuple(p._replace(drawn=0) for p in passes[: kind.keeps])
    verifying = _collectives(spec, keeping, key.filters)
    drafting = {op: count - verifying[op] for op, count in _collectives(spec, passes, key.filters).items()}
    outputs = tensor_specs(DRAFTED, B=spec.batch, N=fused.rows)
    draft_key, verify_key = (key._replace(stage=stage) for stage in (Stage.DRAFT, Stage.VERIFY))
    yield replace(fused, key=draft_key, outputs=outputs, collectives=drafting, **_tensors_of(fused, "draft_model."))
    models = ("target_model.", "draft_model.") if kind.keeps else ("target_model.",)
    rows = tensor_specs(INPUTS, B=spec.batch, D=spec.batch, T=fused.rows, L=key.bucket // KEY_TILE)
    yield replace(fused, key=verify_key, inputs=rows, collectives=verifying, **_tensors_of(fused, *models, KEPT))


def _asking(graph: GraphSpec, spec: BundleSpec) -> GraphSpec:
    """The same graph for requests beyond sampling parameters, with the counts of ids and with scores."""
    key, batch = graph.key._replace(asking=True), graph.inputs[0].shape[0]
    rows = 1 if key.is_prefill else graph.rows
    sizes = {"B": batch, "N": rows, "W": words_of(spec.target_config.vocab_size), "A": ASKED, "M": BIASES}
    if key.is_prefill:
        sizes["V"] = spec.target_config.vocab_size
    asked = {name: INPUTS[name] for name in ASKS}
    graph = replace(
        graph, key=key, inputs=graph.inputs + tensor_specs(asked, **sizes), state=(*graph.state, _counts(spec))
    )
    sharded = spec.parts[0].backing.sharded and spec.tp > 1
    if key.stage is Stage.DRAFT:
        # a draft of ids of its own needs the counts of ids that other ranks hold; it has no scores
        own_ids = getattr(spec.draft_config, spec.draft_config.ids) < spec.target_config.vocab_size
        return _gathering(graph, int(sharded and own_ids))
    scored = key.rows if key.is_prefill else rows
    outputs = graph.outputs + tensor_specs({"scores": OUTPUTS["scores"]}, B=batch, N=scored, C=COLUMNS)
    # ranks with logits of their own join their best ones, then their sums; ranks without gather the logits
    times = blocks(key.rows) if key.is_prefill else 0
    gathers = 2 * sharded * (1 + times) + times * (not sharded and spec.tp > 1)
    return _gathering(replace(graph, outputs=outputs), gathers)


def _gathering(graph: GraphSpec, more: int) -> GraphSpec:
    counts = graph.collectives | {"all-gather": graph.collectives["all-gather"] + more}
    return replace(graph, collectives=counts)


def _counts(spec: BundleSpec) -> TensorSpec:
    """The counts of the ids of one rank's logits."""
    vocabulary = spec.target_config.vocab_size
    width = vocabulary // spec.tp if spec.parts[0].backing.sharded else vocabulary
    # three axes, so that no output of ids has its shape
    return TensorSpec(COUNTS, (spec.batch, 1, width), "int32")


def _weights(part: Part, spec: BundleSpec) -> tuple[TensorSpec, ...]:
    names, shapes, dtype = part.bundle_names(not spec.has_draft), part.shapes, BY_FLAG[spec.dtype].name
    weights = (TensorSpec(names[f"{part.prefix}.{w.ours}"], shapes[w.ours], w.dtype or dtype) for w in part.weights)
    return (*weights, TensorSpec(names[f"{part.prefix}.{RANK}"], (1,), "int32"))


def _caches(part: Part, spec: BundleSpec) -> tuple[TensorSpec, ...]:
    shape = cache_shape(part.config, part.parallel, spec.pool, KEY_TILE)
    return tuple(
        TensorSpec(f"{part.prefix}.kv.{layer}.{which}", shape, BY_FLAG[spec.dtype].name)
        for layer in range(part.config.num_hidden_layers)
        for which in "kv"
    )


def _kept(spec: BundleSpec) -> tuple[TensorSpec, ...]:
    """The drafter's state beside caches."""
    if not spec.has_draft:
        return ()
    sizes = {"B": spec.batch, "K": spec.k, "H": spec.draft_config.hidden_size}
    return tuple(
        TensorSpec(
            KEPT + kept.name,
            tuple(sizes.get(axis) or int(axis) for axis in kept.axes.split()),
            kept.dtype or BY_FLAG[spec.dtype].name,
        )
        for kept in spec.kind.kept
    )


def _collectives(spec: BundleSpec, passes: tuple[DraftPass, ...] = (), filters: bool = True) -> Counts:
    """Collectives of one execution: a pass of the target over all ranks, the draft's inside of its groups, the draws'.

    Kernels that draw from shards search for the ids that a target's row keeps, and guess those of a draft's row.
    """
    of_target, of_draft = spec.parallel()
    total = decoder_collectives(spec.target_config, of_target, 1)
    drawn = sum(p.drawn > 0 for p in passes) if spec.kind.model else 0
    if spec.kind.model:
        draft = spec.kind.model.collectives(spec.draft_config, of_draft, passes)
        total = {op: total[op] + draft[op] for op in total}
    target_draws, draft_draws = of_target.tp > 1, drawn * (of_draft.tp > 1)
    total["all-gather"] += target_draws + draft_draws
    if filters and spec.parts[0].backing.sharded:
        guessed = draft_draws and spec.kind.model and spec.kind.model.guesses(spec.draft_config)
        total["all-gather"] += ALL_GATHERS * target_draws + GUESS_GATHERS * draft_draws * bool(guessed)
    return total
