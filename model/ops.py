"""The few operations that a compiled graph does differently from eager torch on one rank, and helpers.

The model is written against this interface; `compile/graph/trace.py` gives the graph's version of it. It has no branch:
Trainium's compiler takes none, so a graph computes both sides and selects, or the host picks the graph.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

State = tuple[Tensor, ...]


class Ops:
    """Eager torch on one rank: the definition that the traced version must equal."""

    # ranks that a collective joins
    ranks = 1
    # the groups of ranks that sum, for a kernel that sums inside; None for one rank
    groups: tuple[tuple[int, ...], ...] | None = None

    def call(self, module: nn.Module, *args: Any) -> Any:
        """Run a module; a graph traces each kind of module once and calls it."""
        return module(*args)

    def repeat(self, count: int, body: Callable[[State], State], state: State) -> State:
        """body applied `count` times to a tuple of tensors; a graph holds the body once."""
        for _ in range(count):
            state = body(state)
        return state

    def shared(self, function: Callable[..., Any], *given: Any, **fixed: Any) -> Any:
        """function(ops, *given, **fixed) of tensors, and of fixed values; a build traces it once for each shape."""
        return function(self, *given, **fixed)

    def append(self, pool_PGKD: Tensor, new_BGND: Tensor, blocks_BN: Tensor, offsets_BN: Tensor) -> Tensor:
        """The pool with row n of sequence b written at [blocks[b, n], :, offsets[b, n]], all of them inside."""
        updated = pool_PGKD.clone()
        updated[blocks_BN.long(), :, offsets_BN.long()] = new_BGND.transpose(1, 2)
        return updated

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks of the group."""
        return x

    def all_gather(self, x: Tensor, rank_11: Tensor) -> Tensor:
        """The group's x, concatenated along the last axis in rank order; this rank's number is `rank_11`.

        An all-reduce of zero-padded parts: every number is exact, but -0 becomes 0. A NEFF with XLA's all-gather is
        reported to fail when a later process loads it; one with all-reduces is not.
        """
        if self.ranks == 1:
            return x
        if not x.is_floating_point():
            # a device sums no integers
            halves = self.all_gather(torch.stack((shift_right(x, 16), x & 0xFFFF)).float(), rank_11).to(torch.int32)
            return shift_left(halves[0], 16) | halves[1]
        here_M1 = iota(self.ranks, rank_11)[:, None] == rank_11
        return self.all_reduce(torch.where(here_M1, x.unsqueeze(-2), 0)).flatten(-2)


EAGER = Ops()


def shift_left(x: Tensor, count: int) -> Tensor:
    """x << count, int32: torch_xla lowers the operator to a product."""
    return torch.bitwise_left_shift(x, torch.full_like(x, count))


def shift_right(x: Tensor, count: int) -> Tensor:
    """x >> count, int32, sign kept: torch_xla lowers the operator to a division, which rounds toward 0."""
    return torch.bitwise_right_shift(x, torch.full_like(x, count))


def first_argmax(scores_RV: Tensor) -> Tensor:
    """(R,) int32: the smallest index that holds each row's largest value."""
    best = scores_RV.amax(-1, keepdim=True)
    count = scores_RV.shape[-1]
    return torch.where(scores_RV == best, iota(count, scores_RV), count).amin(-1).to(torch.int32)


def ordered_sum(x: Tensor) -> Tensor:
    """(...,) fp32: the sum of x (..., V) along its last axis, in one order for every number of rows.

    The order of a reduction may depend on the shape of its operand. Here x is zero-padded to columns of 16; a column is
    reduced from top to bottom, and the 16 sums are added by halves.
    """
    x = F.pad(x.float(), (0, -x.shape[-1] % 16)).unflatten(-1, (-1, 16)).sum(-2)
    return add_halves(x, -1).squeeze(-1)


def add_halves(x: Tensor, axis: int) -> Tensor:
    """The sum along an axis whose size is a power of two, which stays with size 1, in one order on every rank."""
    while x.shape[axis] > 1:
        lower, upper = x.chunk(2, axis)
        x = lower + upper
    return x


def iota(count: int, like: Tensor) -> Tensor:
    """0 .. count - 1, int32, on a tensor's device."""
    return torch.arange(count, dtype=torch.int32, device=like.device)


def gather_rows(x_BRF: Tensor, index_BN: Tensor) -> Tensor:
    """(B, N, ...): rows `index` of each sequence."""
    return x_BRF[iota(x_BRF.shape[0], index_BN)[:, None], index_BN]
