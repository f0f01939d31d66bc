"""The cases of the sampling kernels: the rows of a step on a shard of the vocabulary, and on all of it."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from bench.kernels.case import Case, normal
from nki_kernels import roofline
from nki_kernels.sampling.accept_drafts import accept_drafts_kernel
from nki_kernels.sampling.accept_rejection import accept_rejection_kernel
from nki_kernels.sampling.block_verification import accept_block_kernel, block_weights_kernel
from nki_kernels.sampling.coupled_sample import coupled_sample_kernel
from nki_kernels.sampling.gumbel_noise import ACCEPT_DOMAIN, GUMBEL_DOMAIN, gumbel_noise_kernel
from nki_kernels.sampling.rejection_sample import rejection_sample_kernel
from nki_kernels.sampling.uniform import uniform_kernel
from nki_kernels.sampling.weights_above import weights_above_kernel

VOCABULARY = 151936
SHARD = VOCABULARY // 32
# thresholds of one pass of the search: four bits of them
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


def draw_arguments(rows: int, columns: int) -> tuple[Any, ...]:
    """Arguments of coupled_sample_kernel: no row greedy, none filtered."""
    logits, column = normal((rows, columns), FP32), np.ones((rows, 1), np.float32)
    return logits, logits.copy(), column, -1e38 * column, _start()


def above_arguments(rows: int, columns: int) -> tuple[Any, ...]:
    """Arguments of weights_above_kernel for one pass of the search."""
    column = np.ones((rows, 1), np.float32)
    return normal((rows, columns), FP32), column, -4 * column, -1e38 * column, normal((rows, THRESHOLDS), FP32)


def rejection_arguments(rows: int, columns: int) -> tuple[Any, ...]:
    """Arguments of rejection_sample_kernel."""
    logits, column = normal((rows, columns), FP32), np.ones((rows, 1), np.float32)
    scales = np.tile(np.array([1, -9, -1e38] * 2, np.float32), (rows, 1))
    return logits, logits.copy(), scales, column, np.full((rows, 1), SHARD, np.int32), logits.copy(), _start()


def _draws(shards: int, batch: int, rows: int) -> tuple[Any, Any]:
    ids = np.arange(shards * batch * rows, dtype=np.int32).reshape(shards, batch, rows)
    return normal((shards, batch, rows), FP32), ids


def accept_arguments(shards: int, batch: int, rows: int) -> tuple[Any, ...]:
    """Arguments of accept_drafts_kernel."""
    column = np.full((batch, 1), rows, np.int32)
    return *_draws(shards, batch, rows), np.zeros((batch, rows - 1), np.int32), column, column


def accept_rejection_arguments(shards: int, batch: int, rows: int) -> tuple[Any, ...]:
    """Arguments of accept_rejection_kernel."""
    values, ids, drafts, positions, limits = accept_arguments(shards, batch, rows)
    sums = np.abs(normal((shards, 3, batch, rows), FP32))
    return sums, values, ids, np.full((batch, rows), 0.5, np.float32), drafts, positions, limits


def block_weights_arguments(shards: int, batch: int, rows: int) -> tuple[Any, ...]:
    """Arguments of block_weights_kernel."""
    return (accept_rejection_arguments(shards, batch, rows)[0],)


def accept_block_arguments(shards: int, batch: int, rows: int) -> tuple[Any, ...]:
    """Arguments of accept_block_kernel."""
    sums, values, ids, u, *step = accept_rejection_arguments(shards, batch, rows)
    return sums, values, ids, np.ones_like(u), u, *step


def _rows(kernel: Any, arguments: Any, cost: Any, rows: int, columns: int, lnc: int = 1) -> Case:
    name = f"R{rows}-V{columns}-fp32"
    return Case(name, kernel, partial(arguments, rows, columns), partial(cost, rows, columns), lnc)


def _noise(rows: int, columns: int, lnc: int = 1) -> Case:
    return _rows(gumbel_noise_kernel, noise_arguments, roofline.gumbel_noise, rows, columns, lnc)


def _draw(rows: int, columns: int, lnc: int = 1) -> Case:
    return _rows(
        coupled_sample_kernel, draw_arguments, partial(roofline.coupled_sample, itemsize=FP32), rows, columns, lnc
    )


def _above(rows: int, columns: int, lnc: int = 1) -> Case:
    return _rows(
        weights_above_kernel, above_arguments, partial(roofline.weights_above, itemsize=FP32), rows, columns, lnc
    )


def _rejection(rows: int, columns: int, lnc: int = 1) -> Case:
    cost = partial(roofline.rejection_sample, itemsize=FP32)
    return _rows(rejection_sample_kernel, rejection_arguments, cost, rows, columns, lnc)


def _accept(kernel: Any, arguments: Any, numbers: int, shards: int) -> Case:
    cost = partial(roofline.accept, shards, 4, 8, numbers)
    return Case(f"M{shards}-B4-N8", kernel, partial(arguments, shards, 4, 8), cost)


# a step of B=4, N=8 on a shard at TP 32 on one core and on two, a pass of the draft, then whole vocabularies
SAMPLING = (
    *(_noise(32, SHARD, lnc) for lnc in (1, 2)), _noise(4, SHARD), _noise(8, VOCABULARY),
    *(_draw(32, SHARD, lnc) for lnc in (1, 2)), _draw(4, SHARD), _draw(8, VOCABULARY),
    *(_above(32, SHARD, lnc) for lnc in (1, 2)), _above(4, SHARD),
    *(_rejection(32, SHARD, lnc) for lnc in (1, 2)), _rejection(8, VOCABULARY),
    _accept(accept_drafts_kernel, accept_arguments, 2, 32), _accept(accept_drafts_kernel, accept_arguments, 2, 64),
    _accept(accept_rejection_kernel, accept_rejection_arguments, 5, 64),
    _accept(block_weights_kernel, block_weights_arguments, 3, 64),
    _accept(accept_block_kernel, accept_block_arguments, 5, 64),
    Case("R32", uniform_kernel, lambda: (*_generator(32), ACCEPT_DOMAIN), partial(roofline.accept, 1, 1, 32, 1)),
)  # fmt: skip
