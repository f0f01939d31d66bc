"""Memory in which weights are read and cut; a block that no tensor uses any more serves the next one of its size.

The system clears a page that is returned to it and taken again, which costs more than filling the page.
"""

from __future__ import annotations

import weakref
from collections import defaultdict

import numpy as np
import torch
from torch import Tensor


class Blocks:
    """Blocks of bytes; the pool holds as many of each size as were ever in use at once."""

    def __init__(self) -> None:
        self._free = defaultdict[int, list[np.ndarray]](list)

    def empty(self, size: int) -> Tensor:
        """A block of uint8; it is free when the last tensor that shares its memory is gone."""
        free = self._free[size]
        memory = free.pop() if free else np.empty(size, np.uint8)
        # the tensor holds the view, and nothing else does
        view = memory[:]
        weakref.finalize(view, free.append, memory).atexit = False
        return torch.from_numpy(view)
