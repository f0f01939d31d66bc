"""The module of model.pt run eagerly on the CPU, every rank a thread: a device must give the same results.

It needs torch alone, so that a machine with the SDK can compare with it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from compile.neuron.module import Collective, StaticOps, StepModule
from compile.neuron.sdk import nxdi_graphs
from model.backing import REFERENCE, Backing
from trnspec.bundle.plan import BundlePlan


class EagerRanks:
    """The graphs of some tags with the weights of every rank; caches and counts follow the alias map."""

    def __init__(
        self, plan: BundlePlan, tags: Sequence[str], shards: list[dict[str, Tensor]], backing: Backing = REFERENCE
    ) -> None:
        tp = plan.spec.tp
        self._barrier, self._parts = threading.Barrier(tp), [torch.empty(0)] * tp
        self._local = threading.local()
        ops = StaticOps(self._within, tp)
        graphs = {tag: nxdi_graphs(plan, tag)[0] for tag in tags}
        self.modules = [{t: StepModule(plan, g, ops, backing) for t, g in graphs.items()} for _ in range(tp)]
        self.state: list[dict[str, Tensor]] = [{} for _ in range(tp)]
        for of_rank, shard in zip(self.modules, shards, strict=True):
            for module in of_rank.values():
                lacks = dict(module.named_parameters()).keys() - shard.keys() - set(module.state_names)
                assert not lacks, f"the shard lacks {sorted(lacks)[:3]}"
                module.take(shard)

    def __call__(self, tag: str, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run a graph on NxDI's seven inputs; the results before the caches, the first rank's."""
        results: list[tuple[Tensor, ...]] = [()] * len(self.modules)

        def work(rank: int) -> None:
            self._local.rank = rank
            module = self.modules[rank][tag]
            with torch.no_grad():
                module.take(self.state[rank])
                results[rank] = module(*inputs)
            names = {id(p): n for n, p in module.named_parameters()}
            self.state[rank] = {names[id(p)]: results[rank][i].clone() for p, i in module.aliases().items()}

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(self.modules))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        visible = len(results[0]) - len(self.state[0])
        return list(results[0][:visible])

    def _within(self, ranks: int) -> tuple[Collective, Collective]:
        def group(x: Tensor) -> list[Tensor]:
            first = self._local.rank // ranks * ranks
            self._parts[self._local.rank] = x
            self._barrier.wait()
            parts = self._parts[first : first + ranks]
            self._barrier.wait()
            return parts

        return lambda x: sum(group(x), torch.zeros_like(x)), lambda x: torch.cat(group(x), -1)
