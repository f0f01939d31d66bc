"""The handle that every traced instruction returns."""

from __future__ import annotations

from typing import Any

from nkisim.errors import LoopMisuse
from nkisim.objects import NKIObject


class NkiInstruction(NKIObject):
    """An issued instruction, for explicit ordering."""

    __slots__ = ("depth", "handle")

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.depth = handle[0].loop_depth

    def depends_on(self, *producers: NkiInstruction) -> NkiInstruction:
        """Make this instruction start after the producers ended.

        Raises:
            LoopMisuse: the edge crosses the boundary of a dynamic loop.
        """
        core, index = self.handle
        for producer in producers:
            if producer.depth != self.depth:
                raise LoopMisuse(
                    "depends_on",
                    None,
                    "crosses the boundary of a dynamic loop",
                    "order instructions of the same loop level",
                )
            other, position = producer.handle
            core.edges.setdefault(index, []).append((other.number, position))
        return self
