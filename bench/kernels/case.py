"""A benchmark case and its random operands."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

import nkisim
from nki_kernels.attention.paged_kv import PAGE
from nki_kernels.limits import SPARE_PAGES
from nki_kernels.roofline import AttentionDims, Cost
from nkisim.errors import AmbiguousManual
from nkisim.event import Recording


@dataclass(frozen=True)
class Case:
    """One kernel at one size.

    `name` has the dims (B4-S8192-N8-bf16). `kernel` is jitted and runs on `arguments()` with `lnc` cores; `cost()` is
    its minimum of bytes and operations. `dims` are for the lower bound of prompt attention. `ranks` all-reduce; one of
    them is simulated.
    """

    name: str
    kernel: Any
    arguments: Callable[[], tuple[Any, ...]]
    cost: Callable[[], Cost]
    lnc: int = 1
    dims: AttentionDims | None = None
    ranks: int = 0

    @property
    def full_name(self) -> str:
        """Kernel and case, as in the table and for `--only`."""
        return f"{self.kernel.__name__}/{self.name}" + (f"-lnc{self.lnc}" if self.lnc > 1 else "")

    def recorded(self) -> Recording:
        """One run on nkisim, without numerics and without warnings of ambiguities: neither changes times."""
        policy = nkisim.Policy(recording=True, numerics=False, ranks=self.ranks)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AmbiguousManual)
            return nkisim.run(self.kernel[self.lnc], self.arguments(), policy=policy).recording


def normal(shape: tuple[int, ...], itemsize: int, scale: float = 1.0) -> Any:
    """Normal numbers of a shape, bf16 or fp32 by their size in bytes; they repeat after 65,536."""
    numbers = np.float32(scale) * np.random.default_rng(0).standard_normal(min(math.prod(shape), 1 << 16), np.float32)
    return np.resize(numbers.astype(ml_dtypes.bfloat16) if itemsize == 2 else numbers, shape)


def pool_of(d: AttentionDims) -> tuple[Any, Any]:
    """A pool (pages, G, 128, D) of random numbers and a block table (B, S / 128) in random order."""
    per = d.slots // PAGE
    table = 1 + np.random.default_rng(0).permutation(d.batch * per).astype(np.int32).reshape(d.batch, per)
    return normal((1 + d.batch * per + SPARE_PAGES, d.kv_heads, PAGE, d.dim), d.itemsize), table
