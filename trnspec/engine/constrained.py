"""An asking step: each row draws under the mask that follows the drafts before it.

Where a model drafts, such a step is two graphs: the first one drafts, the host follows the drafts as far as the masks
allow, and the second one verifies. A host that drafts follows its own drafts before the step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from model.graph_io import StepOutputs
from model.graph_key import Stage
from trnspec.engine.masks import Walk, masks_of_rows
from trnspec.engine.slots import Slot, SlotTable
from trnspec.engine.work import Runner, Work


def walks_of(slots: Iterable[Slot], limits: Iterable[int], words: int) -> dict[int, Walk]:
    """By slot, the walks of a step of those whose ids a mask restricts, each of at most its limit of drafts."""
    return {
        slot.index: Walk(slot.allowed, slot.result.ids, limit, words)
        for slot, limit in zip(slots, limits, strict=True)
        if slot.allowed
    }


def masks(work: Work, batch: int, words: int) -> np.ndarray | None:
    """The masks (B, N, W) of a step's rows; None where no request needs an asking graph."""
    return masks_of_rows(work.walks, batch, 1 + (work.k or 0), words) if work.asking else None


def followed(drafts: list[int], walk: Walk | None) -> list[int]:
    """The host's drafts as far as a walk allows them, and the ids that it forces after them."""
    if walk is None:
        return drafts
    walk.along(drafts)
    walk.force()
    return walk.drafts


def run_halves(runner: Runner, table: SlotTable, work: Work, bucket: int, words: int) -> tuple[Work, StepOutputs]:
    """Draft, follow the drafts as far as the masks allow, verify; the work with the limits that are left.

    Without masks the host does not wait for the drafts.
    """
    k = work.k or 0
    inputs = table.step_inputs(work.limits, bucket, masks(work, table.batch, words))
    drafted = runner.draft(inputs.graph(Stage.DRAFT, k, bucket), inputs)
    if not work.walks:
        inputs = table.step_inputs(work.limits, bucket, inputs.allowed, rows=k + 1)._replace(input_ids=drafted)
        return work, runner.run(inputs.graph(Stage.VERIFY, k, bucket), inputs)
    # a draft that is no id is never accepted
    candidates_BN = np.maximum(drafted, 0)
    for index, walk in work.walks.items():
        # an id that a mask forces may be outside of the draft's vocabulary
        candidates_BN[index, 1 : 1 + len(walk.drafts)] = walk.drafts
        walk.along(candidates_BN[index, 1:].tolist())
    limits = (
        min(limit, len(work.walks[slot.index].drafts)) if slot.index in work.walks else limit
        for slot, limit in zip(work.slots, work.limits, strict=True)
    )
    drafts = tuple(candidates_BN[slot.index, 1:].tolist() for slot in work.slots)
    work = replace(work, limits=tuple(limits), drafts=drafts)
    inputs = table.step_inputs(work.limits, bucket, masks(work, table.batch, words), drafts, k + 1)
    return work, runner.run(inputs.graph(Stage.VERIFY, k, bucket), inputs)
