"""The free blocks of a pool of caches, for an engine that owns them; behind `vllm serve` vLLM owns them."""

from __future__ import annotations


class Blocks:
    """The blocks of a pool that no sequence has; block 0 belongs to none."""

    def __init__(self, pool: int) -> None:
        self._free = list(range(1, pool))[::-1]

    def take(self, count: int) -> list[int] | None:
        """So many blocks; None if fewer are free."""
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def give(self, blocks: list[int]) -> None:
        """Free a sequence's blocks."""
        self._free += blocks[::-1]
