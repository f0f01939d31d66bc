"""Identifies a compiled graph: one value; `name` exists for file names."""

from enum import Enum
from typing import NamedTuple


class Stage(str, Enum):
    """The work of a graph: a prompt's chunk, one with the prompt's log-probabilities, a fused step, or one half of a
    step (its drafts, their verification) with logits processors."""

    PREFILL = "prefill"
    PREFILL_LOGPROBS = "prefill_logprobs"
    STEP = "step"
    DRAFT = "draft"
    VERIFY = "verify"


class GraphKey(NamedTuple):
    """One graph of a bundle.

    `k` counts the drafts of a step; a step of 0 runs the target alone, and a prefill has the largest k of the bundle.
    `bucket` counts the key positions that it reads, `rows` the ids of a prompt that it takes at once. A step without
    `filters` serves sequences of which none uses top-k, top-p or min-p: no graph has a branch, so the host picks one.
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
        """Whether the graph takes a prompt."""
        return self.stage in (Stage.PREFILL, Stage.PREFILL_LOGPROBS)

    @property
    def full_sampling(self) -> bool:
        """Whether it has logits processors (`model/logits_processors.py`) and returns log-probabilities."""
        return self.stage is not Stage.STEP
