"""The few operations that a compiled graph does differently from eager torch on one rank.

`model/` is written against this interface; `compile/graph/trace.py` gives the graph's version of it.
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

    def cond(self, pred: Tensor, if_true: Callable[[], Tensor], if_false: Callable[[], Tensor]) -> Tensor:
        """The value of one branch, chosen at run time by a boolean scalar."""
        return if_true() if bool(pred) else if_false()

    def repeat(self, count: int, body: Callable[[State], State], state: State) -> State:
        """body applied `count` times to a tuple of tensors; a graph holds the body once."""
        for _ in range(count):
            state = body(state)
        return state

    def append(self, cache_BGSD: Tensor, new_BGND: Tensor, slots_B: Tensor, positions_BN: Tensor) -> Tensor:
        """The cache with row n of sequence b written at [slots[b], :, positions[b, n]].

        Positions outside [0, S) are dropped, so a row past the context's end overwrites nothing.
        """
        rows = slots_B.long()[:, None].expand_as(positions_BN)
        inside = (positions_BN >= 0) & (positions_BN < cache_BGSD.shape[2])
        updated = cache_BGSD.clone()
        updated[rows[inside], :, positions_BN[inside].long()] = new_BGND.transpose(1, 2)[inside]
        return updated

    def bits(self, x: Tensor) -> Tensor:
        """The bits of fp32 values as int32."""
        return x.view(torch.int32)

    def number(self, bits: Tensor) -> Tensor:
        """The fp32 values that int32 bits stand for."""
        return bits.view(torch.float32)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks of the group."""
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """The group's x, concatenated along the last axis in rank order."""
        return x


EAGER = Ops()


def first_argmax(scores_RV: Tensor) -> Tensor:
    """(R,) int32: the smallest index that holds each row's largest value."""
    index = torch.arange(scores_RV.shape[-1], dtype=torch.int32, device=scores_RV.device)
    best = scores_RV.amax(-1, keepdim=True)
    return torch.where(scores_RV == best, index, scores_RV.shape[-1]).amin(-1).to(torch.int32)
