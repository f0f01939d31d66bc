"""Cases of the sampling kernels: the rows of a step on a shard of the vocabulary, and on the full vocabulary."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from bench.kernels.case import Case, normal
from nki_kernels import roofline
from nki_kernels.sampling.accept_drafts import accept_drafts_kernel
from nki_kernels.sampling.coupled_sample import coupled_sample_kernel
from nki_kernels.sampling.gumbel_noise import GUMBEL_DOMAIN, gumbel_noise_kernel
from nki_kernels.sampling.weights_above import weights_above_kernel

VOCABULARY = 151936
SHARD = VOCABULARY // 32
# thresholds of one pass of the search, which finds four bits
THRESHOLDS = 15
FP32 = 4


def _generator(rows: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return rng.integers(-(2**31), 2**31, (rows, 2)).astype(np.int32), np.arange(rows, dtype=np.int32)[:, None]


def _start() -> Any:
    return np.array([[SHARD]], np.int32)


def noise_arguments(rows: int, columns: int) -> tuple[Any, ...]:
    """Arguments of gumbel_noise_kernel."""
    return *_generator(rows), _start(), columns, GUMBEL_DOMAIN


def sample_arguments(rows: int, columns: int) -> tuple[Any, ...]:
    """Arguments of coupled_sample_kernel: no row is greedy or filtered."""
    logits, column = normal((rows, columns), FP32), np.ones((rows, 1), np.float32)
    return logits, logits.copy(), column, -1e38 * column, _start()


def above_arguments(rows: int, columns: int) -> tuple[Any, ...]:
    """Arguments of weights_above_kernel for one pass of the search."""
    column = np.ones((rows, 1), np.float32)
    return normal((rows, columns), FP32), column, -4 * column, -1e38 * column, normal((rows, THRESHOLDS), FP32)


def accept_arguments(shards: int, batch: int, rows: int) -> tuple[Any, ...]:
    """Arguments of accept_drafts_kernel."""
    ids = np.arange(shards * batch * rows, dtype=np.int32).reshape(shards, batch, rows)
    column = np.full((batch, 1), rows, np.int32)
    return normal(ids.shape, FP32), ids, np.zeros((batch, rows - 1), np.int32), column, column


def _rows(kernel: Any, arguments: Any, cost: Any, rows: int, columns: int, lnc: int = 1) -> Case:
    name = f"R{rows}-V{columns}-fp32"
    return Case(name, kernel, partial(arguments, rows, columns), partial(cost, rows, columns), lnc)


_noise = partial(_rows, gumbel_noise_kernel, noise_arguments, roofline.gumbel_noise)
_sample = partial(_rows, coupled_sample_kernel, sample_arguments, partial(roofline.coupled_sample, itemsize=FP32))
_above = partial(_rows, weights_above_kernel, above_arguments, partial(roofline.weights_above, itemsize=FP32))


def _accept(shards: int) -> Case:
    cost = partial(roofline.accept, shards, 4, 8, 2)
    return Case(f"M{shards}-B4-N8", accept_drafts_kernel, partial(accept_arguments, shards, 4, 8), cost)


# a step of B 4, N 8 on a shard at TP 32 on one core and on two, a draft pass, then the full vocabulary
SAMPLING = (
    *(_noise(32, SHARD, lnc) for lnc in (1, 2)), _noise(4, SHARD), _noise(8, VOCABULARY),
    *(_sample(32, SHARD, lnc) for lnc in (1, 2)), _sample(4, SHARD), _sample(8, VOCABULARY),
    *(_above(32, SHARD, lnc) for lnc in (1, 2)), _above(4, SHARD),
    _accept(32), _accept(64),
)  # fmt: skip
