"""Compiled graphs that several tests use: the last few of each kind, for each graph holds hundreds of memory maps."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

T = TypeVar("T")
# the module of each function, and what it remembers
_CACHES: list[tuple[str, Any]] = []


def last_few(function: Callable[..., T]) -> Callable[..., T]:
    """Remember the last six results. A process may have 65,530 maps (vm.max_map_count), and XLA ends it at the next."""
    cached = lru_cache(maxsize=6)(function)
    _CACHES.append((function.__module__, cached))
    return cached


def forget(module: str = "") -> None:
    """Forget what the functions of a module remember, or of all."""
    for of, cached in _CACHES:
        if module in ("", of):
            cached.cache_clear()
