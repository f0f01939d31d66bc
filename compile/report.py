"""A plan for people and for machines."""

from __future__ import annotations

from typing import Any

from compile.plan import BuildPlan
from compile.spec import BuildSpec
from model.bundle.manifest import graph_as_json
from model.draft_config import DraftConfig, MedusaConfig
from model.parallel import HeadMap


def plan_as_json(plan: BuildPlan) -> dict[str, Any]:
    """Everything that the plan holds."""
    spec = plan.spec
    return {
        "spec": spec.what_is_built(),
        "k": spec.k,
        "ks": [0, *spec.ks],
        "rows": spec.rows,
        "buckets": list(spec.buckets),
        "graphs": [graph_as_json(g) for g in plan.graphs],
        "bytes_per_rank": {"weights": plan.weight_bytes, "caches": plan.cache_bytes},
    }


def plan_as_text(plan: BuildPlan) -> str:
    """A few lines: the pair, what a step is, the graphs, bytes on a rank."""
    spec = plan.spec
    lines = [
        *(
            f"{m.role:<6} {m.name}: {m.config.parameter_count / 1e9:.3g} B parameters, {_layers(m.config, m.ranks)}"
            for m in spec.models
        ),
        f"step   {_step(spec)}; batch {spec.batch}, length {spec.max_len}, tp {spec.tp}, {spec.dtype}",
        f"split  draft on {spec.draft_ranks} of {spec.tp} ranks, {_head(spec)}kv by {spec.kv_shard}",
        f"rank   {plan.weight_bytes / 1e9:.3f} GB of weights, {plan.cache_bytes / 1e9:.3f} GB of caches",
        f"graphs {len(plan.graphs)}, buckets {', '.join(map(str, spec.buckets))}",
    ]
    for graph in (g for g in plan.graphs if g.bucket == spec.max_len):
        counts = ", ".join(f"{n} {op}s" for op, n in graph.collectives.items())
        lines.append(f"       {graph.tag}: {len(graph.weights)} weights, {len(graph.state)} caches, {counts}")
    return "\n".join(lines)


def _head(spec: BuildSpec) -> str:
    return f"its head on {spec.draft_head_ranks}, " if spec.draft_head_ranks > spec.draft_ranks else ""


def _step(spec: BuildSpec) -> str:
    if not spec.k:
        return "k = 0: the target alone, 1 token"
    fewer = f", or fewer by a graph of k {', '.join(map(str, (0, *spec.fewer)))}" if spec.fewer else ""
    return f"k = {spec.k} drafts by {spec.drafting.kind}, {spec.rows} verified rows, 1 to {spec.rows} tokens{fewer}"


def _layers(config: DraftConfig, ranks: int) -> str:
    if isinstance(config, MedusaConfig):
        return f"{config.heads} heads, {config.layers} layers each"
    padded = HeadMap(config.num_attention_heads, config.num_key_value_heads, ranks).heads_per_rank * ranks
    more = "" if padded == config.num_attention_heads else f", {config.num_attention_heads} heads padded to {padded}"
    return f"{config.num_hidden_layers} layers{more}"
