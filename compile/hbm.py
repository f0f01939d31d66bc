"""HBM of a rank with every graph loaded: tensors by the plan, code, rings and scratch by published figures."""

from dataclasses import dataclass

from model.errors import UserError
from trnspec.bundle.plan import BundlePlan


@dataclass(frozen=True)
class HbmFigures:
    """Bytes on a logical core of two physical ones. Nobody has measured them for these graphs."""

    # four logical cores share a trn2 chip's 96 GiB (the SDK's page of the Trainium2 architecture)
    capacity: int = 24 << 30
    # 96 MB on each physical core (SDK 2.33, neuron-runtime/explore/device-memory.html)
    microcode: int = 2 * 96_000_000
    # of a graph, where two decode graphs of a tp-32 rank have 0.22 GiB (foxl-ai/kiln fc21e10, docs/neuron-notes.md)
    code: int = 118_000_000
    # DMA rings of a graph, 0.62 GiB of those two (Kiln); on trn1 up to 1.8 GB of a whole model's
    rings: int = 333_000_000
    # one for all graphs, as large as the largest (device-memory.html): 0.31 GiB of those two (Kiln)
    scratch: int = 333_000_000
    # whatever is loaded, 0.13 GiB (Kiln)
    fixed: int = 140_000_000


FIGURES = HbmFigures()


def rank_bytes(plan: BundlePlan) -> dict[str, int]:
    """What takes a rank's HBM, in bytes."""
    count = len(plan.graphs)
    return {
        "weights": plan.weight_bytes, "caches": plan.cache_bytes, "code": FIGURES.microcode + count * FIGURES.code,
        "rings": count * FIGURES.rings, "scratch": FIGURES.scratch, "fixed": FIGURES.fixed,
    }  # fmt: skip


def hbm_text(plan: BundlePlan) -> str:
    """The same in GB, with the sum and what there is."""
    sizes = rank_bytes(plan)
    parts = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in sizes.items())
    return f"{sum(sizes.values()) / 1e9:.1f} of {FIGURES.capacity / 1e9:.1f} GB: {parts} (code and later: published)"


def check_fits(plan: BundlePlan) -> None:
    """Raise UserError if a rank needs more than there is."""
    if sum(rank_bytes(plan).values()) > FIGURES.capacity:
        raise UserError(f"a rank needs {hbm_text(plan)}; raise --tp, lower --batch or --max-len, or give fewer blocks")
