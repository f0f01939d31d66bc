"""The few operations that a compiled graph does differently from eager torch on one rank.

`model/` is written against this interface; `compile/graph/trace.py` gives the graph's version of it. It has no branch:
Trainium's compiler takes none, so a graph computes both sides and selects, or the host picks the graph.
"""

from __future__ import annotations

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
        """function(ops, *given, **fixed) of tensors, and of fixed values; a build traces it once for each shape.

        In a graph it is a function of that name.
        """
        return function(self, *given, **fixed)

    def append(self, cache_BGSD: Tensor, new_BGND: Tensor, slots_BN: Tensor, positions_BN: Tensor) -> Tensor:
        """The cache with row n of sequence b written at [slots[b, n], :, positions[b, n]]; slots may be (B, 1).

        Positions outside [0, S) are dropped, so a row past the context's end overwrites nothing.
        """
        rows = slots_BN.long().expand_as(positions_BN)
        inside = (positions_BN >= 0) & (positions_BN < cache_BGSD.shape[2])
        updated = cache_BGSD.clone()
        updated[rows[inside], :, positions_BN[inside].long()] = new_BGND.transpose(1, 2)[inside]
        return updated

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks of the group."""
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """The group's x, concatenated along the last axis in rank order."""
        return x


EAGER = Ops()


def shift_left(x: Tensor, count: int) -> Tensor:
    """x << count, int32: torch_xla lowers the operator to a product."""
    return torch.bitwise_left_shift(x, torch.full_like(x, count))


def shift_right(x: Tensor, count: int) -> Tensor:
    """x >> count, int32, sign kept: torch_xla lowers the operator to a division, which rounds toward 0."""
    return torch.bitwise_right_shift(x, torch.full_like(x, count))


def first_argmax(scores_RV: Tensor) -> Tensor:
    """(R,) int32: the smallest index that holds each row's largest value."""
    index = torch.arange(scores_RV.shape[-1], dtype=torch.int32, device=scores_RV.device)
    best = scores_RV.amax(-1, keepdim=True)
    return torch.where(scores_RV == best, index, scores_RV.shape[-1]).amin(-1).to(torch.int32)


def ordered_sum(x: Tensor) -> Tensor:
    """(...,) fp32: the sum of x (..., V) along its last axis, in one order for every number of rows.

    The order of a reduction may depend on the shape of its operand. Here x is zero-padded to columns of 16; a column is
    reduced from top to bottom, and the 16 sums are added by halves.
    """
    x = F.pad(x.float(), (0, -x.shape[-1] % 16)).unflatten(-1, (-1, 16)).sum(-2)
    for half in (8, 4, 2, 1):
        x = x[..., :half] + x[..., half:]
    return x.squeeze(-1)


def iota(count: int, like: Tensor) -> Tensor:
    """0 .. count - 1, int32, on a tensor's device."""
    return torch.arange(count, dtype=torch.int32, device=like.device)


def rows_of(x_BRF: Tensor, index_BN: Tensor) -> Tensor:
    """(B, N, ...): rows `index` of each sequence."""
    return x_BRF[iota(x_BRF.shape[0], index_BN)[:, None], index_BN]


def rows_inside(
    cache_BGSD: Tensor, new_BGND: Tensor, slots_BN: Tensor, positions_BN: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The rows (B, N, G, D) of an append, their slots and their positions (B, N), every one of them inside of [0, S).

    A row outside is its sequence's first row inside once more; where none is inside, all are what is at 0. So the same
    bits are written, twice or more, and nothing is outside: a device may end a run there instead of dropping the row.
    """
    count, slots_BN = positions_BN.shape[1], slots_BN.expand_as(positions_BN)
    sequence_B1, row_N = iota(len(positions_BN), positions_BN)[:, None], iota(count, positions_BN)
    inside_BN = (positions_BN >= 0) & (positions_BN < cache_BGSD.shape[2])
    first_B1 = torch.where(inside_BN, row_N, count).amin(1, keepdim=True).to(torch.int32)
    some_B1, first_B1 = first_B1 < count, first_B1.clamp(max=count - 1)
    first_slot_B1, first_place_B1 = (t[sequence_B1, first_B1] for t in (slots_BN, positions_BN))
    first_place_B1 = torch.where(some_B1, first_place_B1, 0)
    new_BNGD = new_BGND.transpose(1, 2)
    held_B1GD = cache_BGSD.transpose(1, 2)[first_slot_B1, first_place_B1]
    first_B1GD = torch.where(some_B1[..., None, None], new_BNGD[sequence_B1, first_B1], held_B1GD)
    return (
        torch.where(inside_BN[..., None, None], new_BNGD, first_B1GD),
        torch.where(inside_BN, slots_BN, first_slot_B1),
        torch.where(inside_BN, positions_BN, first_place_B1),
    )
