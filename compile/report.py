"""A plan for people and for machines."""

from typing import Any

from compile.hbm import hbm_text, rank_bytes
from trnspec.bundle.plan import BundlePlan
from trnspec.bundle.spec import BundleSpec


def plan_as_json(plan: BundlePlan) -> dict[str, Any]:
    """A plan's spec, sizes and graphs."""
    spec = plan.spec
    return {
        "spec": spec.as_json(), "ks": [0, *spec.ks], "untrained_ks": spec.untrained_ks, "rows": spec.rows,
        "buckets": list(spec.buckets), "graphs": [graph.file for graph in plan.graphs],
        "bytes_per_rank": rank_bytes(plan),
    }  # fmt: skip


def plan_as_text(plan: BundlePlan) -> str:
    """A few lines: the pair, the step, the graphs, bytes on a rank."""
    spec = plan.spec
    fewer = f", or fewer by a graph of k {', '.join(map(str, (0, *spec.ks[:-1])))}" if spec.ks[:-1] else ""
    step = f"k = {spec.k} drafts by {spec.drafter}, {spec.rows} verified rows, 1 to {spec.rows} tokens{fewer}"
    return "\n".join([
        *(f"{p.role:<6} {p.name}: {p.parameter_count / 1e9:.3g} B parameters" for p in spec.parts),
        f"step   {step if spec.k else 'k = 0: the target alone, 1 token'}; batch {spec.batch}, length {spec.max_len}, "
        f"tp {spec.tp}, {spec.dtype}",
        *(f"draft  {warning}" for warning in untrained_k_warnings(spec)),
        f"rank   {hbm_text(plan)}",
        f"graphs {len(plan.graphs)}, buckets {', '.join(map(str, spec.buckets))}",
    ])  # fmt: skip


def untrained_k_warnings(spec: BundleSpec) -> list[str]:
    """A sentence if the draft was trained for a block of a different k."""
    if not (ks := ", ".join(map(str, spec.untrained_ks))):
        return []
    return [f"trained for k {spec.draft_config.trained_k}: with k {ks} it is a different drafter, whose acceptance "
            "has to be measured (docs/drafters.md)"]  # fmt: skip
