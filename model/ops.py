"""Operations that differ between eager torch and a traced graph, and small tensor functions.

The model is written against `Ops`; `compile/graph/trace.py` implements it for graphs. There is no branch operation:
Trainium's compiler supports none, so a graph computes both sides and selects, or the host selects a graph.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

State = tuple[Tensor, ...]


class Ops:
    """Eager torch on one rank, the reference for the traced version."""

    # ranks in a collective
    ranks = 1
    # replica groups for kernels with an all-reduce inside; None for one rank
    groups: tuple[tuple[int, ...], ...] | None = None

    def call(self, module: nn.Module, *args: Any) -> Any:
        """Runs a module; a graph traces each type and config of a module once."""
        return module(*args)

    def fori_loop(self, count: int, body: Callable[[State], State], state: State) -> State:
        """Applies `body` `count` times to a tuple of tensors; a loop in a graph."""
        for _ in range(count):
            state = body(state)
        return state

    def jit(self, function: Callable[..., Any], *given: Any, **fixed: Any) -> Any:
        """Returns function(ops, *given, **fixed); a build traces it once for each shape of `given` and each `fixed`."""
        return function(self, *given, **fixed)

    def append(self, pool_PGKD: Tensor, new_BGND: Tensor, blocks_BN: Tensor, offsets_BN: Tensor) -> Tensor:
        """Writes row n of sequence b to pool[blocks[b, n], :, offsets[b, n]]; all indices are in range."""
        updated = pool_PGKD.clone()
        updated[blocks_BN.long(), :, offsets_BN.long()] = new_BGND.transpose(1, 2)
        return updated

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks."""
        return x

    def all_gather(self, x: Tensor, rank_11: Tensor) -> Tensor:
        """Concatenates the ranks' x along the last axis in rank order; `rank_11` is this rank.

        Implemented as an all-reduce of zero-padded parts, exact except that -0 becomes 0: NEFFs with XLA's all-gather
        are reported to fail when a later process loads them.
        """
        if self.ranks == 1:
            return x
        if not x.is_floating_point():
            # collectives sum floating-point numbers only: send two 16-bit halves
            halves = self.all_gather(torch.stack((shift_right(x, 16), x & 0xFFFF)).float(), rank_11).to(torch.int32)
            return shift_left(halves[0], 16) | halves[1]
        here_M1 = iota(self.ranks, rank_11)[:, None] == rank_11
        return self.all_reduce(torch.where(here_M1, x.unsqueeze(-2), 0)).flatten(-2)


EAGER = Ops()


def shift_left(x: Tensor, count: int) -> Tensor:
    """x << count, int32; torch_xla lowers Python's operator to a multiplication."""
    return torch.bitwise_left_shift(x, torch.full_like(x, count))


def shift_right(x: Tensor, count: int) -> Tensor:
    """x >> count, int32, arithmetic; torch_xla lowers Python's operator to a division that rounds toward 0."""
    return torch.bitwise_right_shift(x, torch.full_like(x, count))


def first_argmax(scores_RV: Tensor) -> Tensor:
    """(R,) int32 argmax of each row; ties go to the smallest index."""
    best = scores_RV.amax(-1, keepdim=True)
    count = scores_RV.shape[-1]
    return torch.where(scores_RV == best, iota(count, scores_RV), count).amin(-1).to(torch.int32)


def ordered_sum(x: Tensor) -> Tensor:
    """(...,) fp32 sum of x (..., V) along its last axis, in an order that does not depend on the number of rows.

    A compiler may order a reduction by the shape of its operand. Here x is zero-padded and reshaped to (V / 16, 16);
    the first axis is summed in ascending order, then the 16 partial sums by halves.
    """
    x = F.pad(x.float(), (0, -x.shape[-1] % 16)).unflatten(-1, (-1, 16)).sum(-2)
    return add_halves(x, -1).squeeze(-1)


def add_halves(x: Tensor, axis: int) -> Tensor:
    """Sums along an axis, whose size is a power of two, by halves: the same order on every rank. Keeps the axis."""
    while x.shape[axis] > 1:
        lower, upper = x.chunk(2, axis)
        x = lower + upper
    return x


def iota(count: int, like: Tensor) -> Tensor:
    """(count,) int32 0 .. count - 1, on the device of `like`."""
    return torch.arange(count, dtype=torch.int32, device=like.device)


def gather_rows(x_BRF: Tensor, index_BN: Tensor) -> Tensor:
    """(B, N, F): row `index_BN[b, n]` of each sequence b."""
    return x_BRF[iota(x_BRF.shape[0], index_BN)[:, None], index_BN]
