"""The free blocks of a KV block pool, for an engine without an outer scheduler; in a server vLLM allocates them."""

from __future__ import annotations


class BlockAllocator:
    """Blocks 1 to pool - 1; block 0 is the null block."""

    def __init__(self, pool: int) -> None:
        self._free = list(range(1, pool))[::-1]

    def allocate(self, count: int) -> list[int] | None:
        """This number of blocks; None if fewer are free."""
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def free(self, blocks: list[int]) -> None:
        """Free a sequence's blocks."""
        self._free += blocks[::-1]
