"""The step as one torch module in NxDI's terms, which ModelBuilder traces for model.pt.

Parameters carry the names of the weight files, caches are parameters that are aliased to outputs, and
the inputs are NxDI's tuple. It names no min-p, no seed, no limit and no blocks: there min-p is off, every step may
accept k drafts, each cache slot has blocks of its own, one after the other, and noise is keyed by the slot and by how
many prompts that slot has had, which is state of the graphs as the caches are. So two requests that follow each other
in one slot have different noise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

from compile.graph.pair import drafts, grouped_state, make_pair, stage_of
from model.cache import KEY_TILE
from model.backing import Backing
from model.dtypes import BY_NAME
from model.graph_io import StepInputs
from model.graph_spec import GraphSpec, TensorSpec
from model.ops import Ops, rows_inside
from trnspec.bundle.plan import BundlePlan

Collective = Callable[[Tensor], Tensor]
# prompts that each cache slot has had
REQUEST_COUNTS = "request_counts"


@dataclasses.dataclass
class StaticOps(Ops):
    """The operations with shapes that are known before any value is, which a lazy tracer can follow.

    `within(n)` gives the all-reduce and the all-gather that join each n consecutive ranks.
    """

    within: Callable[[int], tuple[Collective, Collective]]
    ranks: int = 1

    def grouped(self, ranks: int) -> Ops:
        return StaticOps(self.within, ranks)

    def append(self, cache_BGSD: Tensor, new_BGND: Tensor, slots_BN: Tensor, positions_BN: Tensor) -> Tensor:
        rows_BNGD, *places = rows_inside(cache_BGSD, new_BGND, slots_BN, positions_BN)
        # the indexed axes come first: (B, N, G, D)
        written = cache_BGSD.transpose(1, 2).index_put([p.long() for p in places], rows_BNGD)
        return written.transpose(1, 2)

    def all_reduce(self, x: Tensor) -> Tensor:
        return x if self.ranks == 1 else self.within(self.ranks)[0](x)

    def all_gather(self, x: Tensor) -> Tensor:
        return x if self.ranks == 1 else self.within(self.ranks)[1](x)


class StepModule(nn.Module):
    """A graph of the plan for one rank; parameters are zeros, whose values no graph holds."""

    def __init__(self, plan: BundlePlan, graph: GraphSpec, ops: Ops, backing: Backing) -> None:
        super().__init__()
        spec = plan.spec
        self.alone, self.run = not spec.k, stage_of(graph)
        self.blocks_of_slot = spec.max_len // KEY_TILE
        counts = TensorSpec(REQUEST_COUNTS, (spec.batch,), "int32")
        self.state_names = [t.name for t in (*graph.state, counts)]
        self.graph = graph
        pair, weight_names = make_pair(spec, drafts(graph), ops, backing), spec.weight_names()
        self.names = {ours: weight_names[ours] for ours in pair.state_dict()}
        # in a list, so that its empty parameters are not this module's
        self._pair = [pair]
        for tensor in (*graph.weights, *graph.state, counts):
            _place(self, tensor)

    def take(self, values: dict[str, Tensor]) -> None:
        """Copy weights or state in by name; tensors that this graph does not have are left out."""
        own = dict(self.named_parameters())
        for name in own.keys() & values.keys():
            own[name].data.copy_(values[name])

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        seq_ids: Tensor,
        sampling_params: Tensor,
        hidden: Tensor,
        adapter_ids: Tensor,
    ) -> tuple[Tensor, ...]:
        """NxDI's inputs; the graph's four outputs, then the caches in the plan's order, then the counts.

        For a target alone NxDI knows one output: the next ids (B,).
        """
        given: dict[str, Tensor] = dict(self.named_parameters())
        # the two that no graph of ours needs stay inputs: routing goes by the whole list of shapes
        unused = 0 * (hidden.to(torch.int32) + adapter_ids)
        slots = seq_ids + unused
        # the compiler takes no parameter as a result
        counts = given[REQUEST_COUNTS] + 0
        if self.graph.key.is_prefill:
            counts = counts + (torch.arange(counts.shape[0], dtype=torch.int32, device=slots.device) == slots)
        seeds = torch.stack([slots, counts.index_select(0, slots)], -1)
        inputs = StepInputs(
            input_ids,
            attention_mask,
            position_ids,
            seq_ids,
            sampling_params,
            torch.zeros_like(sampling_params[:, 0]),
            seeds,
            torch.full_like(seq_ids, self.graph.key.k),
            self._table(seq_ids, attention_mask.shape[1]),
        )
        state = grouped_state(self.graph, [given[name] for name in self.state_names[:-1]])
        named = {ours: given[name] for ours, name in self.names.items()}
        out = torch.func.functional_call(self._pair[0], named, (self.run, inputs, *state))
        visible = (out.next_ids[:, 0],) if self.alone else out.visible[:4]
        after = [t for cache in out.draft_state.caches for t in cache]
        after += [*out.draft_state.kept, *(t for cache in out.target_caches for t in cache)]
        return (*visible, *after, counts)

    def _table(self, slots_B: Tensor, bucket: int) -> Tensor:
        """(B, L) the blocks of these slots."""
        own_L = torch.arange(bucket // KEY_TILE, dtype=torch.int32, device=slots_B.device)
        return 1 + slots_B[:, None] * self.blocks_of_slot + own_L

    def aliases(self) -> dict[Tensor, int]:
        """Parameter that is state, the caches and the counts -> the index of the output that replaces it."""
        given: dict[str, Tensor] = dict(self.named_parameters())
        first = 1 if self.alone else 4
        return {given[name]: first + i for i, name in enumerate(self.state_names)}


def _place(module: nn.Module, tensor: TensorSpec) -> None:
    *path, last = tensor.name.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module._modules[part]  # type: ignore[assignment]
    value = torch.zeros(tensor.shape, dtype=BY_NAME[tensor.dtype].torch)
    module.register_parameter(last, nn.Parameter(value, requires_grad=False))


def example_inputs(graph: GraphSpec) -> tuple[Tensor, ...]:
    """NxDI's input tuple for a graph: zeros, but for the positive parameters of sampling."""
    ids, mask, positions, slots, params = (torch.zeros(t.shape, dtype=BY_NAME[t.dtype].torch) for t in graph.inputs[:5])
    # the last two are NxDI's own: hidden, adapter_ids
    return ids, mask, positions, slots, torch.ones_like(params), torch.zeros_like(slots), torch.zeros_like(slots)
