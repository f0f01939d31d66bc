"""Records the drafts of a drafter and their logits in steps that accept a random number of drafts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from model.config import load_config
from model.context import Context
from model.drafters.registry import infer_drafter, load_draft
from model.graph_io import StepInputs, StepOutputs
from model.graph_key import GraphKey, Stage
from model.ops import iota
from model.sampling import ShardArgmax
from tests.eager_graphs import EagerGraphs, eager_graphs
from tests.model.paged import block_table
from trnspec.bundle.spec import BundleSpec

LENGTH = 128
# one shorter than any k, one longer
PROMPTS = [[5], [9, 2, 7, 7, 1, 30, 4, 4, 8, 11, 2]]


class Drafted(NamedTuple):
    """The drafts of one step for one sequence: the ids before the step, the logits (k, V) and the drafts."""

    known: list[int]
    logits: Tensor
    drafts: list[int]


def graphs_of(target: Path, draft: Path, ks: tuple[int, ...], batch: int = len(PROMPTS)) -> EagerGraphs:
    """Eager graphs of a target and a draft (checkpoint folders), on one rank in fp32."""
    config, drafter = load_config(str(target)), infer_drafter(str(draft))
    facts: dict[str, Any] = {"drafter": drafter.name, "draft_config": load_draft(drafter, str(draft), config)}
    spec = BundleSpec("target", config, 1, ks, batch, LENGTH, "fp32", **facts)
    return eager_graphs(spec, {"target": target, "draft": draft})


def _inputs(ids: list[list[int]], positions: list[int], slot: int | None = None, count: int = 0) -> StepInputs:
    """Greedy inputs of a step of all sequences, or of a prefill of `count` rows in a slot."""
    batch, table = len(ids), block_table(len(PROMPTS), LENGTH)
    return StepInputs(
        input_ids=torch.tensor(ids, dtype=torch.int32),
        positions=torch.tensor(positions, dtype=torch.int32),
        sampling_params=torch.tensor([[0.0, 1.0, 0.0]]).repeat(batch, 1),
        min_p=torch.zeros(batch),
        seeds=torch.tensor([[3, i] for i in range(batch)], dtype=torch.int32),
        block_table=table if slot is None else table[slot : slot + 1],
        k_limits=torch.full((batch,), 16, dtype=torch.int32),
        num_tokens=torch.tensor([count]),
        slots=torch.tensor([slot or 0]),
        next_prompt_id=torch.tensor([-1]),
    )


def _any_count(
    self: Context, drafts_BK: Tensor, samples: ShardArgmax, max_accepted_B: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Accepts a random number of drafts, whatever the samples."""
    samples_BN, (batch, k) = samples.token_ids(), drafts_BK.shape
    count_B1, index_N = torch.randint(1, k + 2, (batch, 1), dtype=torch.int32), iota(k + 1, drafts_BK)
    ids_BN = torch.where(index_N < count_B1 - 1, torch.nn.functional.pad(drafts_BK, (0, 1)), samples_BN)
    last_B1 = torch.where(index_N == count_B1 - 1, samples_BN, 0).sum(-1, keepdim=True).to(torch.int32)
    return torch.where(index_N < count_B1, ids_BN, -1), count_B1, last_B1


def steps(
    graphs: EagerGraphs, k: int, count: int, spoiled: int | None = None, k_0: bool = False
) -> Iterator[list[Drafted]]:
    """Steps of both prompts; each step accepts a random number of drafts.

    `spoiled`: before each step the draft's keys and values are overwritten from this offset to the input id's position
    on. `k_0`: a step with k = 0 follows each step.
    """
    torch.manual_seed(k)
    sequences = list[list[int]]()
    for slot, prompt in enumerate(PROMPTS):
        inputs = _inputs([prompt + [0] * (LENGTH - len(prompt))], [0], slot, len(prompt))
        out = graphs.run(GraphKey(Stage.PREFILL, k, LENGTH, rows=LENGTH), inputs)
        sequences.append([*prompt, out.next_ids.item()])
    for _ in range(count):
        if spoiled is not None:
            _spoil(graphs, [len(t) - 1 + spoiled for t in sequences])
        out, logits, drafts = _recorded(graphs, k, sequences)
        yield [Drafted(list(t), logits[b], drafts[b].tolist()) for b, t in enumerate(sequences)]
        _extend(sequences, out)
        if k_0:
            _extend(sequences, graphs.run(GraphKey(Stage.STEP, 0, LENGTH), _step_inputs(sequences)))


def _step_inputs(sequences: list[list[int]]) -> StepInputs:
    return _inputs([t[-1:] for t in sequences], [len(t) - 1 for t in sequences])


def _extend(sequences: list[list[int]], out: StepOutputs) -> None:
    for sequence, row in zip(sequences, out.accepted_tokens.tolist(), strict=True):
        sequence += [i for i in row if i >= 0]


def _recorded(graphs: EagerGraphs, k: int, sequences: list[list[int]]) -> tuple[StepOutputs, Tensor, Tensor]:
    """A step, the logits (B, k, V) of its drafts and the drafts (B, k)."""
    logits, candidates, drafter, propose = [], [], graphs.pair.drafter, graphs.pair.drafter.propose

    def proposed(*arguments: Any) -> Any:
        out = propose(*arguments)
        candidates.append(out[0][:, 1:])
        return out

    handle = drafter.model.lm_head.register_forward_hook(lambda module, given, result: logits.append(result))
    with mock.patch.object(drafter, "propose", proposed), mock.patch.object(Context, "accept", _any_count):
        out = graphs.run(GraphKey(Stage.STEP, k, LENGTH), _step_inputs(sequences))
    handle.remove()
    return out, torch.cat(logits, 1), candidates[0]


def _spoil(graphs: EagerGraphs, first: list[int]) -> None:
    """Overwrites each sequence's keys and values from the given position on; sequence b has block b + 1."""
    for cache in graphs.state.caches:
        for block, position in enumerate(first, 1):
            for pool in cache:
                pool[block, :, max(position, 0) :] = 1e3
