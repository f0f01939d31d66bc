"""The plan: every graph, shape, byte and collective of a build, by arithmetic alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from compile.graph.pair import KEPT
from compile.spec import BuildSpec, PartModel
from model.bundle.manifest import DECODE, PREFILL, GraphSpec, TensorSpec
from model.bundle.schema import DRAFT, FUSED, MASKED, UNFILTERED, VERIFY, kind_of, roles_in, step_tag
from model.bundle.weights import RANK, local_shapes, table
from model.cache import cache_shapes
from model.draft_config import DraftConfig, Eagle3Config, MedusaConfig
from model.drafting import DraftPass
from model.dtypes import BY_FLAG
from model.graph_io import ALLOWED_ROWS, DRAFTED, INPUTS, OUTPUTS, tensor_specs, words_of
from model.nki.backing import backing_of
from model.nki.filter_floor import ALL_GATHERS, GUESS_GATHERS
from model.parallel import Parallel

# a draft's pass over a prompt
_PROMPT = (DraftPass(0, 0),)


@dataclass(frozen=True)
class BuildPlan:
    """What a build makes, before anything is made."""

    spec: BuildSpec
    graphs: tuple[GraphSpec, ...]
    target_weights: tuple[TensorSpec, ...]
    draft_weights: tuple[TensorSpec, ...]
    state: tuple[TensorSpec, ...]

    @property
    def weight_bytes(self) -> int:
        """Weights of both models on one rank."""
        return sum(t.bytes for t in self.target_weights + self.draft_weights)

    @property
    def cache_bytes(self) -> int:
        """Caches of both models on one rank."""
        return sum(t.bytes for t in self.state)


def make_plan(spec: BuildSpec) -> BuildPlan:
    """The plan of a checked spec."""
    weights = {m.role: _weights(m, spec) for m in spec.models}
    parallel = dict(zip(("target", "draft"), spec.parallel(), strict=True))
    caches = {m.role: _caches(m, parallel[m.role], spec) for m in spec.models}
    target_weights, draft_weights = weights["target"], weights.get("draft", ())
    both, state = draft_weights + target_weights, caches.get("draft", ()) + _kept(spec) + caches["target"]
    batch = spec.batch
    graphs = []
    for bucket in spec.buckets:
        # a host that drafts brings the drafts with the input ids
        step = {k: tensor_specs(INPUTS, B=batch, T=1 if spec.has_draft else k + 1, S=bucket) for k in (0, *spec.ks)}
        emitted = {k: tensor_specs(OUTPUTS, B=batch, N=k + 1, S=bucket) for k in (0, *spec.ks)}
        graphs += [_prompt(spec, bucket, both, state)]
        halves: list[GraphSpec] = []
        for k in reversed(spec.ks):
            fused = GraphSpec(step_tag(k, spec.k), bucket, k, both, step[k], state, emitted[k], {})
            graphs += _steps(fused, spec)
            halves += _halves(fused, spec) if spec.has_draft else ()
        graphs += _steps(GraphSpec(DECODE, bucket, 0, target_weights, step[0], caches["target"], emitted[0], {}), spec)
        masked = [g for g in graphs if g.bucket == bucket and _takes_masks(g, spec)] + halves
        graphs += [g for g in halves if not g.tag.endswith(UNFILTERED)] if spec.separate else ()
        graphs += [_masked(g, spec) for g in masked] if spec.structured else ()
    short = [_prompt(spec, rows, both, state) for rows in spec.short_prompts]
    graphs += [*short, *([_masked(g, spec) for g in short] if spec.structured else ())]
    return BuildPlan(spec, tuple(graphs), target_weights, draft_weights, state)


def _prompt(spec: BuildSpec, rows: int, weights: tuple[TensorSpec, ...], state: tuple[TensorSpec, ...]) -> GraphSpec:
    """The graph of a prompt of so many ids."""
    inputs, outputs = tensor_specs(INPUTS, B=1, T=rows, S=rows), tensor_specs(OUTPUTS, B=1, N=spec.rows, S=spec.max_len)
    return GraphSpec(PREFILL, rows, spec.k, weights, inputs, state, outputs, _collectives(spec, passes=_PROMPT))


def _halves(fused: GraphSpec, spec: BuildSpec) -> Iterator[GraphSpec]:
    """A fused step as two graphs, the first of which drafts and the second verifies: each has what it reads alone."""
    kind, k = spec.drafting.of_kind, fused.k
    keeping = tuple(p._replace(drawn=0) for p in kind.passes(k, spec.k)[: kind.keeps])
    rows = tensor_specs(INPUTS, B=spec.batch, T=fused.rows, S=fused.bucket)
    draft = replace(fused, outputs=tensor_specs(DRAFTED, B=spec.batch, N=fused.rows))
    for part, graph in ((DRAFT, draft), (VERIFY, replace(fused, inputs=rows))):
        tag = step_tag(k, spec.k, part)
        prefixes = tuple(f"{role}_model." for role in roles_in(tag, kind))
        weights = tuple(t for t in fused.weights if t.name.startswith(prefixes))
        state = tuple(t for t in fused.state if t.name.startswith((*prefixes, KEPT)))
        for ending in ("", UNFILTERED):
            whole, second = (_collectives(spec, p, not ending) for p in (kind.passes(k, spec.k), keeping))
            counts = second if part == VERIFY else {op: count - second[op] for op, count in whole.items()}
            yield replace(graph, tag=tag + ending, weights=weights, state=state, collectives=counts)


def _takes_masks(graph: GraphSpec, spec: BuildSpec) -> bool:
    """Whether a graph has a twin that takes masks: where a step has halves, these have, for a mask is a row's."""
    return kind_of(graph.tag) != FUSED or not spec.has_draft


def _steps(graph: GraphSpec, spec: BuildSpec) -> Iterator[GraphSpec]:
    """A step's graph for any rows, and the one for rows that do not filter."""
    passes = spec.drafting.of_kind.passes(graph.k, spec.k) if graph.k else ()
    for ending in ("", UNFILTERED):
        counts = _collectives(spec, passes, not ending)
        counts["all-gather"] += _others(spec, graph.k, passes)
        yield replace(graph, tag=graph.tag + ending, collectives=counts)


def _others(spec: BuildSpec, k: int, passes: tuple[DraftPass, ...]) -> int:
    """Gathers of the candidates beside the best ones of a tree: of ranks that draw from shards, one a rank of them."""
    tree = spec.tree_of(k)
    if not tree or spec.parallel()[1].of_head.tp == 1 or not backing_of(spec.kernels).sharded:
        return 0
    return (tree.width - 1) * sum(p.drawn > 0 for p in passes)


def _masked(graph: GraphSpec, spec: BuildSpec) -> GraphSpec:
    """The graph's twin that takes masks, of each row where it has the drafts or makes them, and returns scores, which
    ranks with logits of their own gather twice for; a draft has no scores."""
    part, batch, words = kind_of(graph.tag), graph.inputs[0].shape[0], words_of(spec.target_config.vocab_size)
    allowed = ALLOWED_ROWS if part in (FUSED, DRAFT, VERIFY) else {"allowed": INPUTS["allowed"]}
    inputs = graph.inputs + tensor_specs(allowed, B=batch, N=graph.rows, W=words)
    if part == DRAFT:
        return replace(graph, tag=graph.tag + MASKED, inputs=inputs)
    gathers = 2 * (backing_of(spec.kernels).sharded and spec.tp > 1)
    return replace(
        graph,
        tag=graph.tag + MASKED,
        inputs=inputs,
        outputs=graph.outputs + tensor_specs({"scores": OUTPUTS["scores"]}, B=batch, N=graph.rows, C=2),
        collectives=graph.collectives | {"all-gather": graph.collectives["all-gather"] + gathers},
    )


def _weights(model: PartModel, spec: BuildSpec) -> tuple[TensorSpec, ...]:
    names, dtype, packing = spec.weight_names(), BY_FLAG[spec.dtype].name, spec.packing(model)
    shapes = local_shapes(model.config, model.ranks, packing, model.head_ranks)
    cut = (
        TensorSpec(names[f"{model.prefix}.{w.ours}"], shapes[w.ours], w.dtype or dtype)
        for w in table(model.config, packing)
    )
    return (*cut, TensorSpec(names[f"{model.prefix}.{RANK}"], (1,), "int32"))


def _caches(model: PartModel, parallel: Parallel, spec: BuildSpec) -> tuple[TensorSpec, ...]:
    caches = spec.batch * (spec.copies if model.role == "target" else 1)
    shapes = cache_shapes(model.config, parallel, caches, spec.max_len, backing_of(spec.kernels).layout)
    return tuple(
        TensorSpec(f"{model.prefix}.kv.{layer}.{which}", shape, BY_FLAG[spec.dtype].name)
        for layer in range(model.config.num_hidden_layers)
        for which, shape in zip("kv", shapes, strict=True)
    )


def _kept(spec: BuildSpec) -> tuple[TensorSpec, ...]:
    """What the drafter remembers beside caches."""
    if not spec.has_draft:
        return ()
    sizes = {"B": spec.batch, "K": spec.k, "H": spec.draft_config.hidden_size}
    return tuple(
        TensorSpec(
            KEPT + kept.name,
            tuple(sizes.get(axis) or int(axis) for axis in kept.axes.split()),
            kept.dtype or BY_FLAG[spec.dtype].name,
        )
        for kept in spec.drafting.of_kind.kept
    )


def _collectives(spec: BuildSpec, passes: tuple[DraftPass, ...] = (), filters: bool = True) -> dict[str, int]:
    """Collectives of one execution, the target's inside of all ranks and the draft's inside of its groups; its draws'
    join the ranks of its head.

    Kernels that draw from shards search for what a target's row keeps, and guess it for a draft's.
    """
    of_target, of_draft = spec.parallel()
    # a pass that draws nothing only writes the cache: no head
    drafted = sum(p.drawn > 0 for p in passes) if spec.has_draft else 0
    total = _collectives_of(spec.target_config, of_target, 1, 1)
    if spec.has_draft:
        draft = _collectives_of(spec.draft_config, of_draft, len(passes), drafted)
        total = {op: total[op] + draft[op] for op in total}
        # the target's states come into an EAGLE-3 head once a step, projected by all ranks
        total["all-gather"] += isinstance(spec.draft_config, Eagle3Config) and bool(passes) and of_draft.tp > 1
    if filters and backing_of(spec.kernels).sharded:
        total["all-gather"] += ALL_GATHERS * (of_target.tp > 1) + GUESS_GATHERS * drafted * (of_draft.of_head.tp > 1)
    return total


def _collectives_of(config: DraftConfig, parallel: Parallel, passes: int, heads: int) -> dict[str, int]:
    """Two all-reduces a layer, one gather an embedding and a draw; two more a layer where slices are merged."""
    draws = heads * (parallel.of_head.tp > 1)
    if parallel.tp == 1:
        return {"all-reduce": 0, "all-gather": draws}
    if isinstance(config, MedusaConfig):
        # the heads' outputs behind each of their layers, and a draw
        return {"all-reduce": 0, "all-gather": heads * config.layers + draws}
    merging = 2 if parallel.slices(config) > 1 else 0
    layers = passes * config.num_hidden_layers
    return {"all-reduce": 2 * layers, "all-gather": passes + draws + merging * layers}
