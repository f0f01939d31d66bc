"""Identifies a compiled graph; `GraphKey.name` is for file names only."""

from enum import Enum
from typing import NamedTuple


class Stage(str, Enum):
    """What a graph computes: prefill, prefill with prompt log-probabilities, a fused step, or one half of a split step
    (drafting, verification). All but the fused step have full sampling."""

    PREFILL = "prefill"
    PREFILL_LOGPROBS = "prefill_logprobs"
    STEP = "step"
    DRAFT = "draft"
    VERIFY = "verify"


class GraphKey(NamedTuple):
    """One graph of a bundle.

    `k`: drafts per step; 0 in steps without speculation, the largest k of the bundle in prefills. `bucket`: key
    positions that attention reads. `rows`: rows of a prefill chunk. `filters=False` is the variant without top-k, top-p
    and min-p; graphs cannot branch, so the host selects one.
    """

    stage: Stage
    k: int = 0
    bucket: int = 0
    filters: bool = True
    rows: int = 0

    @property
    def name(self) -> str:
        """The stem of the graph's file."""
        parts = [self.stage.value, f"k{self.k}"]
        parts += ["unfiltered"] * (not self.filters) + [f"r{self.rows}"] * (self.rows > 0)
        return "_".join([*parts, f"bk{self.bucket}"])

    @property
    def is_prefill(self) -> bool:
        """Whether the graph prefills."""
        return self.stage in (Stage.PREFILL, Stage.PREFILL_LOGPROBS)

    @property
    def full_sampling(self) -> bool:
        """Whether the graph has logits processors (`model/logits_processors.py`) and returns log-probabilities."""
        return self.stage is not Stage.STEP
