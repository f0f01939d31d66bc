"""The few operations that a compiled graph does differently from eager torch on one rank.

`model/` is written against this interface; `compile/graph/trace.py` gives the graph's version of it. It has no branch:
Trainium's compiler takes none, so a graph computes both sides and selects, or the host picks the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

State = tuple[Tensor, ...]


class Ops:
    """Eager torch on one rank: the definition that the traced version must equal."""

    # consecutive ranks that a collective joins
    ranks = 1

    def grouped(self, ranks: int) -> Ops:
        """The same operations, with collectives inside of each `ranks` consecutive ranks."""
        return self

    def call(self, module: nn.Module, *args: Any) -> Any:
        """Run a module; a graph traces each kind of module once and calls it."""
        return module(*args)

    def repeat(self, count: int, body: Callable[[State], State], state: State) -> State:
        """body applied `count` times to a tuple of tensors; a graph holds the body once."""
        for _ in range(count):
            state = body(state)
        return state

    def append(
        self, cache_BGSD: Tensor, new_BGND: Tensor, slots_BN: Tensor, positions_BN: Tensor, axis: int = 2
    ) -> Tensor:
        """The cache with row n of sequence b written at [slots[b, n], :, positions[b, n]]; slots may be (B, 1).

        Positions outside [0, S) are dropped, so a row past the context's end overwrites nothing. They count along the
        cache's axis S, the last one in (B, G, D, S).
        """
        rows = slots_BN.long().expand_as(positions_BN)
        inside = (positions_BN >= 0) & (positions_BN < cache_BGSD.shape[axis])
        updated = cache_BGSD.clone()
        updated.movedim(axis, 2)[rows[inside], :, positions_BN[inside].long()] = new_BGND.transpose(1, 2)[inside]
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


def iota(count: int, like: Tensor) -> Tensor:
    """0 .. count - 1, int32, on a tensor's device."""
    return torch.arange(count, dtype=torch.int32, device=like.device)
