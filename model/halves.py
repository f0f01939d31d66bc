"""A step in two graphs, for a host that looks at the drafts between them: it draws under a grammar's masks.

The first half drafts, the second verifies; each row's draw is one that its mask allows. Together they emit what the
fused step emits.
"""

from __future__ import annotations

from model.cache import Cache
from model.drafters import DraftState
from model.graph_io import DraftOutputs, StepInputs, StepOutputs
from model.rough_filters import roughly
from model.sampling import Sampling
from model.speculative import Pair
from model.window import Window


def draft(
    pair: Pair, k: int, inputs: StepInputs, sampling: Sampling, state: DraftState, caches: list[Cache]
) -> DraftOutputs:
    """The candidates of a step: the input ids and k drafts."""
    model = pair.draft_model
    assert model is not None, "a drafter without a model has no graph of its own"
    window = Window.of(k, inputs.positions, inputs.block_table)
    draw = model.kernels.prepare(pair.ops, sampling, window.drawn_BN, model.shard)
    return DraftOutputs(*pair.drafter.propose(window, inputs.input_ids, roughly(draw), state))


def verify(
    pair: Pair, k: int, inputs: StepInputs, sampling: Sampling, state: DraftState, caches: list[Cache]
) -> StepOutputs:
    """The target's draws after the input ids, which are a step's candidates, and the ids that it keeps."""
    target = pair.target_model
    window = Window.of(k, inputs.positions, inputs.block_table)
    draw = target.kernels.prepare(pair.ops, sampling, window.drawn_BN, target.shard).along(inputs.input_ids)
    return pair.verify(window, inputs.input_ids, draw, inputs.k_limits, state, caches)
