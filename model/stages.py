"""Runs one stage of a graph: a prefill, a fused step, or one half of a split step (drafting, verification)."""

from typing import Any

from torch import Tensor

from model.approx_filters import approximate
from model.cache import Cache
from model.drafter import DraftState, StepRows, write_slot
from model.graph_io import DraftOutputs, Outputs, StepInputs, StepOutputs
from model.graph_key import GraphKey, Stage
from model.logits_processors import LogitsProcessors, updated_counts
from model.speculative import Pair


def run_stage(
    pair: Pair, key: GraphKey, inputs: StepInputs, state: DraftState, caches: list[Cache],
    counts_B1V: Tensor | None = None,
) -> Outputs:  # fmt: skip
    """Returns a graph's outputs. `counts_B1V`, in full-sampling graphs only, counts the ids that each slot emitted.

    `model/logits_processors.py` describes the counts.
    """
    model = pair.draft_model if key.stage is Stage.DRAFT else pair.target_model
    assert model is not None, "a drafter without a model has no graph"
    params, shard = inputs.params(key.filters), model.shard
    before_B1V: Any = counts_B1V
    if counts_B1V is not None:
        if key.is_prefill:
            before_B1V = inputs.prompt_token_counts.index_select(1, shard.ids_V)[:, None]
        elif shard.mapped_V is not None:
            before_B1V = model.ctx.all_gather_vocab(counts_B1V[:, 0], shard).index_select(1, shard.mapped_V)[:, None]
        bias = inputs.bias_ids, inputs.bias
        processors = LogitsProcessors.of(inputs.allowed, inputs.penalties, bias, before_B1V, shard)
        params = params._replace(processors=processors)
    if key.is_prefill:
        of_prompt = key.stage is Stage.PREFILL_LOGPROBS
        out: Outputs = pair.prefill(key.k, inputs, params, state, caches, of_prompt)
    elif key.stage is Stage.STEP:
        out = pair.step(key.k, inputs, params, state, caches)
    else:
        rows = StepRows.of(key.k, inputs.positions, inputs.block_table)
        noise_BNV = model.noise(params.seed_R2, rows.sample_positions_BN)
        if key.stage is Stage.DRAFT:
            out = DraftOutputs(*pair.drafter.propose(rows, inputs.input_ids, approximate(params), noise_BNV, state))
        else:
            out = pair.verify(rows, inputs.input_ids, inputs.k_limits, params, noise_BNV, state, caches)
    if isinstance(out, StepOutputs) and counts_B1V is not None:
        after_B1V = updated_counts(before_B1V, out.accepted_tokens, shard.ids_V)
        counts_B1V = write_slot(counts_B1V, after_B1V, inputs.slots) if key.is_prefill else after_B1V
    return out._replace(counts_B1V=counts_B1V)
