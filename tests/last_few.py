"""Compiled graphs that several tests use: the last few of each kind, for each graph holds hundreds of memory maps."""

from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")


def last_few(function: Callable[..., T]) -> Callable[..., T]:
    """Remember the last six results. A process may have 65,530 maps (vm.max_map_count), and XLA ends it at the next."""
    return lru_cache(maxsize=6)(function)
