"""Our step with NxDI's inputs and outputs, as one torch module that ModelBuilder traces.

Parameters have the names of the weight files; caches are parameters that are aliased to outputs. NxDI has no min-p, no
seeds, no k and no block table: min-p is off, every step accepts k drafts, slot s has the blocks 1 + s L and on, and
noise is keyed by the slot and by the number of prompts that it has had, which is state as the caches are.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from compile.graph.pair import drafts, grouped_state, make_pair
from model.cache import KEY_TILE
from model.context import Context
from model.dtypes import BY_NAME
from model.graph_io import StepInputs
from model.graph_key import GraphKey, Stage
from model.graph_spec import GraphSpec, TensorSpec
from model.ops import Ops, iota
from model.stages import run_stage
from trnspec.bundle.plan import COUNTS, BundlePlan
from trnspec.bundle.spec import BundleSpec

# NxDI's tags; it routes by the list of input shapes, so a pair has no step without drafts
PREFILL, FUSED, DECODE = "context_encoding_model", "fused_speculation_model", "token_generation_model"
# state: prompts that each slot has had
REQUEST_COUNTS = "request_counts"


def nxdi_graphs(plan: BundlePlan) -> dict[str, list[GraphSpec]]:
    """Tag -> a graph for each bucket: unchunked prompts, and steps of the bundle's k."""
    spec, prompt = plan.spec, next(g for g in plan.graphs if g.key.stage is Stage.PREFILL)
    # without counts a prompt has no logits processors
    state = tuple(t for t in prompt.state if t.name != COUNTS)
    prompts = [replace(prompt, key=prompt.key._replace(bucket=b, rows=b), state=state) for b in spec.buckets]
    steps = [plan.by_key[GraphKey(Stage.STEP, spec.k, b)] for b in spec.buckets]
    return {PREFILL: prompts, FUSED if spec.k else DECODE: steps}


def example_inputs(spec: BundleSpec, key: GraphKey) -> tuple[Tensor, ...]:
    """NxDI's input tuple of a graph: zeros, but for the positive parameters of sampling."""
    batch, rows = (1, key.rows) if key.is_prefill else (spec.batch, 1)
    shapes = ((batch, rows), (batch, key.bucket), (batch, rows), (batch,), (batch,), (batch,))
    ids, mask, positions, *slots = (torch.zeros(shape, dtype=torch.int32) for shape in shapes)
    return ids, mask, positions, slots[0], torch.ones(batch, 3), *slots[1:]


@dataclass
class StaticOps(Ops):
    """The operations with shapes that are known before any value is, which a lazy tracer can follow."""

    reduce: Callable[[Tensor], Tensor]
    ranks: int = 1

    def append(self, pool_PGKD: Tensor, new_BGND: Tensor, blocks_BN: Tensor, offsets_BN: Tensor) -> Tensor:
        # the indexed axes come first: (B, N, G, D)
        places = blocks_BN.long(), offsets_BN.long()
        return pool_PGKD.transpose(1, 2).index_put(places, new_BGND.transpose(1, 2)).transpose(1, 2)

    def all_reduce(self, x: Tensor) -> Tensor:
        return x if self.ranks == 1 else self.reduce(x)


class NxdiStep(nn.Module):
    """A graph of `nxdi_graphs` for one rank; parameters are zeros, whose values no graph holds."""

    def __init__(self, plan: BundlePlan, graph: GraphSpec, ops: Ops) -> None:
        super().__init__()
        self.spec, self.key, self.graph = plan.spec, graph.key, graph
        # in a list, so that its empty parameters are not this module's
        self._pair = [make_pair(plan.spec, drafts(graph), Context(plan.spec.tp, ops))]
        self.state = (*graph.state, TensorSpec(REQUEST_COUNTS, (plan.spec.batch,), "int32"))
        for tensor in (*graph.weights, *self.state):
            module: nn.Module = self
            *path, last = tensor.name.split(".")
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = getattr(module, part)
            value = torch.zeros(tensor.shape, dtype=BY_NAME[tensor.dtype].torch)
            module.register_parameter(last, nn.Parameter(value, requires_grad=False))

    def aliases(self) -> dict[Tensor, int]:
        """Parameter that is state -> the index of the output that replaces it."""
        first = 4 if self.spec.k else 1
        return {self.get_parameter(tensor.name): first + i for i, tensor in enumerate(self.state)}

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, seq_ids: Tensor,
        sampling_params: Tensor, hidden: Tensor, adapter_ids: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """NxDI's outputs, then the state: accepted ids, next ids, next mask, next positions; next ids (B,) for k 0."""
        # the two that our step does not read must stay inputs: routing goes by all shapes
        slots_B = seq_ids + 0 * (hidden.to(torch.int32) + adapter_ids)
        # the compiler takes no parameter as a result
        counts = self.get_parameter(REQUEST_COUNTS) + 0
        if self.key.is_prefill:
            counts = counts + (iota(len(counts), slots_B) == slots_B)
        seeds_B2 = torch.stack([slots_B, counts.index_select(0, slots_B)], -1)
        inputs = self._inputs(input_ids, attention_mask, position_ids[:, 0], slots_B, sampling_params, seeds_B2)
        state = grouped_state(self.graph, [self.get_parameter(tensor.name) for tensor in self.graph.state])
        weights: dict[str, Tensor] = {name: self.get_parameter(name) for name in self._pair[0].state_dict()}
        out = torch.func.functional_call(self._pair[0], weights, (run_stage, self.key, inputs, *state))
        draft, target = ([t for cache in c for t in cache] for c in (out.draft_state.caches, out.target_caches))
        after = (*draft, *out.draft_state.slots, *target, counts)
        if not self.spec.k:
            return (out.next_ids[:, 0], *after)
        next_B1 = out.next_positions[:, None]
        length = self.spec.max_len if self.key.is_prefill else self.key.bucket
        next_mask = (iota(length, slots_B) < next_B1).to(torch.int32)
        return (out.accepted_tokens, out.next_ids, next_mask, next_B1, *after)

    def _inputs(
        self, ids: Tensor, mask_BS: Tensor, first_B: Tensor, slots_B: Tensor, params_B3: Tensor, seeds_B2: Tensor
    ) -> StepInputs:
        blocks = self.spec.max_len // KEY_TILE
        table_BL = 1 + slots_B[:, None] * blocks + iota(self.key.bucket // KEY_TILE, slots_B)
        inputs = StepInputs(ids, first_B, params_B3, torch.zeros_like(params_B3[:, 0]), seeds_B2, table_BL)
        if self.key.is_prefill:
            count = mask_BS.sum(-1).to(torch.int32) - first_B
            return inputs._replace(num_tokens=count, slots=slots_B, next_prompt_id=torch.full_like(slots_B, -1))
        # the last position that an id may take is max_len - 1
        return inputs._replace(k_limits=(self.spec.max_len - 2 - first_B).clamp(0, self.key.k))
