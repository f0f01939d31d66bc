"""One run of the engine's graphs: the scheduled work, and its runner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from model.graph_io import StepInputs, StepOutputs
from model.graph_key import GraphKey
from trnspec.engine.masks import Walk
from trnspec.engine.request import Chunk
from trnspec.engine.slots import Slot


class Runner(Protocol):
    """Runs a graph: compiled graphs, or a function of the inputs in tests.

    Numpy arrays go in, and outputs that numpy can read come out: reading them waits for the graph. The next ids, mask
    and positions of the last run may go in unread. `clear` forgets what a request has left in its slot and its blocks.
    """

    def run(self, key: GraphKey, inputs: StepInputs) -> StepOutputs: ...

    def draft(self, key: GraphKey, inputs: StepInputs) -> Any: ...

    def clear(self, slot: int, blocks: Sequence[int]) -> None: ...


@dataclass(frozen=True)
class Work:
    """A chunk of one slot's prompt, or a step of k drafts of several slots; a prompt has no k.

    A step has for each slot the most drafts to accept and, where the host drafts, the drafts. `walks` are those of the
    slots whose ids a mask restricts, by the slot's index. A `delayed` step runs behind a draft's part of a prompt, and
    its time holds both.
    """

    slots: tuple[Slot, ...]
    k: int | None = None
    limits: tuple[int, ...] = ()
    drafts: tuple[list[int], ...] = ()
    walks: dict[int, Walk] = field(default_factory=dict)
    chunk: Chunk | None = None
    delayed: bool = False

    @property
    def asking(self) -> bool:
        """Whether it needs asking graphs."""
        return any(slot.request.asking for slot in self.slots)
