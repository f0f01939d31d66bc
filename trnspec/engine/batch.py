"""What one run of the engine computes: a chunk of a prompt, or a decode step of several slots."""

from __future__ import annotations

from dataclasses import dataclass, field

from trnspec.engine.config import Chunk
from trnspec.engine.masks import ConstrainedDraft
from trnspec.engine.slots import Slot


@dataclass(frozen=True)
class Batch:
    """A chunk of one slot's prompt, or a decode step of k drafts.

    For each slot, `limits` has the most drafts that a step may accept and, with host-side drafting, `drafts` has them.
    `constrained`: the masks of the slots that have masks, by the slot's index.
    """

    slots: tuple[Slot, ...]
    chunk: Chunk | None = None
    k: int = 0
    limits: tuple[int, ...] = ()
    drafts: tuple[list[int], ...] = ()
    constrained: dict[int, ConstrainedDraft] = field(default_factory=dict)

    @property
    def full_sampling(self) -> bool:
        """Whether it needs full-sampling graphs."""
        return any(slot.request.full_sampling for slot in self.slots)

    @property
    def end(self) -> int:
        """The end of the positions that a step may write."""
        return max(slot.position for slot in self.slots) + self.k + 1
