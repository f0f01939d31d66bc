"""Full-sampling steps with masks: each row samples under the mask after the drafts before it.

With a draft model such a step is two graphs: the first drafts, the host follows the drafts as far as the masks allow,
and the second verifies. Host-side drafts are followed before the step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from model.graph_io import StepOutputs
from model.graph_key import Stage
from trnspec.engine.masks import ConstrainedDraft, masks_of_rows
from trnspec.engine.slots import Batch, Slot, SlotTable
from trnspec.runtime.runner import Runner


def constrain(slots: Iterable[Slot], limits: Iterable[int], words: int) -> dict[int, ConstrainedDraft]:
    """The constrained drafts of a step, by the index of each slot that has masks."""
    return {
        slot.index: ConstrainedDraft(slot.allowed, slot.result.ids, limit, words)
        for slot, limit in zip(slots, limits, strict=True)
        if slot.allowed
    }


def step_masks(batch: Batch, slots: int, words: int) -> np.ndarray | None:
    """The masks (B, N, W) of a step's rows; None if no request needs full sampling."""
    return masks_of_rows(batch.constrained, slots, 1 + batch.k, words) if batch.full_sampling else None


def follow(drafts: list[int], constrained: ConstrainedDraft | None) -> list[int]:
    """Host-side drafts as far as the masks allow them, and the ids that are forced after them."""
    if constrained is None:
        return drafts
    constrained.propose(drafts)
    constrained.force()
    return constrained.drafts


def run_split_step(
    runner: Runner, table: SlotTable, batch: Batch, bucket: int, words: int
) -> tuple[Batch, StepOutputs]:
    """Draft, follow, verify; the batch with the limits that are left. Without masks the host reads no draft."""
    k, allowed = batch.k, step_masks(batch, table.batch, words)
    if not any(batch.limits):
        inputs = table.step_inputs(batch.limits, bucket, allowed, rows=k + 1)
        return batch, runner.run(inputs.graph(Stage.VERIFY, k, bucket), inputs)
    inputs = table.step_inputs(batch.limits, bucket, allowed)
    candidates = runner.draft(inputs.graph(Stage.DRAFT, k, bucket), inputs)
    if batch.constrained:
        # an id below 0 is no draft and never accepted
        candidates_BN = np.maximum(candidates, 0)
        for index, constrained in batch.constrained.items():
            # forced ids may be outside of the draft's vocabulary
            candidates_BN[index, 1 : 1 + len(constrained.drafts)] = constrained.drafts
            constrained.propose(candidates_BN[index, 1:].tolist())
        drafts = tuple(candidates_BN[slot.index, 1:].tolist() for slot in batch.slots)
        lengths = (len(batch.constrained[s.index].drafts) if s.index in batch.constrained else k for s in batch.slots)
        batch = replace(batch, limits=tuple(map(min, batch.limits, lengths)), drafts=drafts)
        inputs = table.step_inputs(batch.limits, bucket, step_masks(batch, table.batch, words), drafts, k + 1)
    else:
        inputs = table.step_inputs(batch.limits, bucket, allowed, rows=k + 1)._replace(input_ids=candidates)
    return batch, runner.run(inputs.graph(Stage.VERIFY, k, bucket), inputs)
