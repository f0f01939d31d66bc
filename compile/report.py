"""A plan for people and for machines, and what takes a rank's HBM: code, rings and scratch by published figures."""

import math
from typing import Any

from trnspec.bundle.part import checkpoint_shapes
from trnspec.bundle.plan import BundlePlan

# bytes on a logical core of two physical ones, which nobody has measured for these graphs:
# four logical cores share a trn2 chip's 96 GiB (the SDK's page of the Trainium2 architecture)
CAPACITY = 24 << 30
# 96 MB on each physical core (SDK 2.33, neuron-runtime/explore/device-memory.html)
_MICROCODE = 2 * 96_000_000
# of a graph: two decode graphs of a tp-32 rank have 0.22 GiB (foxl-ai/kiln fc21e10, docs/neuron-notes.md)
_CODE = 118_000_000
# DMA rings of a graph, 0.62 GiB of those two (Kiln); on trn1 up to 1.8 GB of an unsharded model's
_RINGS = 333_000_000
# one for all graphs, as large as the largest (device-memory.html), 0.31 GiB of those two (Kiln); and always 0.13 GiB
_SCRATCH, _FIXED = 333_000_000, 140_000_000


def rank_bytes(plan: BundlePlan) -> dict[str, int]:
    """What takes a rank's HBM, in bytes."""
    count = len(plan.graphs)
    target, draft = (sum(t.bytes for t in weights) for weights in (plan.target_weights, plan.draft_weights))
    return {
        "weights": target, "draft": draft, "caches": plan.cache_bytes, "code": _MICROCODE + count * _CODE,
        "rings": count * _RINGS, "scratch": _SCRATCH, "fixed": _FIXED,
    }  # fmt: skip


def hbm_text(plan: BundlePlan) -> str:
    """The parts of `rank_bytes` in GB, their sum, and the capacity of a rank."""
    sizes = rank_bytes(plan)
    parts = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in sizes.items())
    published = "code, rings, scratch, fixed: published figures"
    return f"{sum(sizes.values()) / 1e9:.1f} of {CAPACITY / 1e9:.1f} GB: {parts} ({published})"


def plan_as_json(plan: BundlePlan) -> dict[str, Any]:
    """A plan's spec, sizes and graphs."""
    spec = plan.spec
    return {
        "spec": spec.as_json(), "ks": [0, *spec.ks], "untrained_ks": spec.untrained_ks, "rows": spec.rows,
        "buckets": list(spec.buckets), "graphs": [graph.file for graph in plan.graphs],
        "bytes_per_rank": rank_bytes(plan),
    }  # fmt: skip


def plan_as_text(plan: BundlePlan) -> str:
    """A few lines: target and draft, the step, the graphs, bytes on a rank."""
    spec = plan.spec
    parameters = {part.role: sum(map(math.prod, checkpoint_shapes(part.config).values())) for part in spec.parts}
    fewer = f", or fewer by a graph of k {', '.join(map(str, (0, *spec.ks[:-1])))}" if spec.ks[:-1] else ""
    step = f"k = {spec.k} drafts by {spec.drafter}, {spec.rows} verified rows, 1 to {spec.rows} tokens{fewer}"
    return "\n".join([
        *(f"{p.role:<6} {p.name}: {parameters[p.role] / 1e9:.3g} B parameters" for p in spec.parts),
        f"step   {step if spec.k else 'k = 0: no speculation, 1 token'}; batch {spec.batch}, length {spec.max_len}, "
        f"tp {spec.tp}, {spec.dtype}, {'FP8 weights, ' * (spec.weights == 'fp8')}kernels {spec.kernels}",
        *(f"draft  trained for k {spec.draft_config.trained_k}: with k {k} it is a different drafter, whose acceptance "
          "has to be measured (docs/drafters.md)" for k in spec.untrained_ks),
        f"rank   {hbm_text(plan)}",
        f"graphs {len(plan.graphs)}, buckets {', '.join(map(str, spec.buckets))}",
    ])  # fmt: skip
