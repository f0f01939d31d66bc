"""Memory for what is read and cut, used again by the block of the same size that comes when nothing looks at it.

A page that is given back to the system and taken again is cleared each time, which costs more than to fill it.
"""

from __future__ import annotations

import weakref
from collections import defaultdict

import numpy as np
import torch
from torch import Tensor


class Blocks:
    """Blocks of bytes; it holds as many of each size as were in use at once."""

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
