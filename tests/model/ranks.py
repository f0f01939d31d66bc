"""Tensor-parallel ranks in eager torch, one thread per rank, with a barrier at each collective."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from model.ops import Ops

T = TypeVar("T")


class RankOps(Ops):
    """The operations of one rank; `meeting` has each rank's operand of the current collective."""

    def __init__(self, rank: int, barrier: threading.Barrier, meeting: list[Tensor]) -> None:
        self.rank, self.barrier, self.meeting, self.collectives = rank, barrier, meeting, 0
        self.ranks, self.rank_11 = len(meeting), torch.tensor([[rank]], dtype=torch.int32)

    def gather(self, x: Tensor) -> Tensor:
        return self.all_gather(x, self.rank_11)

    def all_reduce(self, x: Tensor) -> Tensor:
        assert x.is_floating_point(), "collectives sum floating-point numbers only"
        self.collectives += 1
        self.meeting[self.rank] = x
        self.barrier.wait(timeout=60)
        actual = torch.stack(self.meeting).sum(0)
        self.barrier.wait(timeout=60)
        return actual


def on_ranks(count: int, work: Callable[[RankOps], T]) -> list[T]:
    """Runs `work` on all ranks; returns the results in rank order."""
    barrier, meeting = threading.Barrier(count), [torch.empty(0)] * count

    def run(rank: int) -> T:
        try:
            return work(RankOps(rank, barrier, meeting))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(run, rank) for rank in range(count)]
    # a failing rank breaks the barrier of the others: raise its error first
    for future in sorted(futures, key=lambda f: isinstance(f.exception(), threading.BrokenBarrierError)):
        future.result()
    return [future.result() for future in futures]
