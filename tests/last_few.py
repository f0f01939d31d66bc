"""A small cache of compiled graphs for tests: each graph has hundreds of memory maps."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

T = TypeVar("T")
# the module of each cached function, and its cache
_CACHES: list[tuple[str, Any]] = []


def last_few(function: Callable[..., T]) -> Callable[..., T]:
    """Cache the last six results: XLA aborts a process with more than 65,530 maps (vm.max_map_count)."""
    cached = lru_cache(maxsize=6)(function)
    _CACHES.append((function.__module__, cached))
    return cached


def forget(module: str = "") -> None:
    """Clear the caches of a module, or all."""
    for of, cached in _CACHES:
        if module in ("", of):
            cached.cache_clear()
