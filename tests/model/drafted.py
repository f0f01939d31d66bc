"""Steps of a pair whose drafts are accepted by chance: what a drafter proposed in each, and from which logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from model.cache import Cache
from model.config import load_config
from model.context import Context
from model.drafter import DraftState
from model.drafters.registry import infer_drafter, load_draft
from model.graph_io import StepInputs, StepOutputs
from model.ops import iota
from model.sampling import ShardArgmax
from model.speculative import Pair
from tests.eager_graphs import load_pair
from tests.model.paged import block_table, empty
from trnspec.bundle.spec import BundleSpec

LENGTH = 128
# one shorter than any k, one longer
PROMPTS = [[5], [9, 2, 7, 7, 1, 30, 4, 4, 8, 11, 2]]
# caches and the positions of the input ids -> caches
Spoil = Callable[[list[Cache], Tensor], list[Cache]]


class Drafted(NamedTuple):
    """What one step drafted for one sequence: the ids before it, the logits (k, V) and the drafts."""

    known: list[int]
    logits: Tensor
    drafts: list[int]


def pair_of(target: Path, draft: Path) -> Pair:
    """A checkpoint folder's model and the drafter of another, on one rank in fp32."""
    config, drafter = load_config(str(target)), infer_drafter(str(draft))
    facts: dict[str, Any] = {"drafter": drafter.name, "draft_config": load_draft(drafter, str(draft), config)}
    return load_pair(BundleSpec("target", config, 1, (1,), **facts), {"target": target, "draft": draft})


def _inputs(ids: list[list[int]], positions: list[int], slot: int | None = None, count: int = 0) -> StepInputs:
    """Greedy inputs of a step of all sequences, or of `count` rows of a slot's prompt."""
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
    """An acceptance of any number of drafts: a drafter must take any of them."""
    samples_BN, (batch, k) = samples.token_ids(), drafts_BK.shape
    count_B1, index_N = torch.randint(1, k + 2, (batch, 1), dtype=torch.int32), iota(k + 1, drafts_BK)
    ids_BN = torch.where(index_N < count_B1 - 1, torch.nn.functional.pad(drafts_BK, (0, 1)), samples_BN)
    last_B1 = torch.where(index_N == count_B1 - 1, samples_BN, 0).sum(-1, keepdim=True).to(torch.int32)
    return torch.where(index_N < count_B1, ids_BN, -1), count_B1, last_B1


@torch.no_grad()
def steps(
    pair: Pair, slots: tuple[Tensor, ...], k: int, count: int, spoil: Spoil = lambda c, p: c, k_0: bool = False
) -> Iterator[list[Drafted]]:
    """Steps of both prompts, of which each accepts any number of drafts; `slots` is a drafter's empty state.

    With `k_0` each is followed by a step of k 0.
    """
    torch.manual_seed(k)
    assert pair.draft_model is not None
    configs, batch = (pair.draft_model.config, pair.target_model.config), len(PROMPTS)
    draft_caches, caches = (empty(config, batch, LENGTH) for config in configs)
    state, texts = DraftState(draft_caches, slots), list[list[int]]()
    for slot, prompt in enumerate(PROMPTS):
        inputs = _inputs([prompt + [0] * (LENGTH - len(prompt))], [0], slot, len(prompt))
        out = pair.prefill(k, inputs, inputs.params(), state, caches)
        state, caches = out.draft_state, list(out.target_caches)
        texts.append([*prompt, int(out.next_ids)])
    for _ in range(count):
        positions = torch.tensor([len(t) - 1 for t in texts])
        state = state._replace(caches=spoil(state.caches, positions))
        inputs = _inputs([t[-1:] for t in texts], positions.tolist())
        out, logits, drafts = _recorded(pair, k, inputs, state, caches)
        state, caches = out.draft_state, list(out.target_caches)
        yield [Drafted(list(t), logits[b], drafts[b].tolist()) for b, t in enumerate(texts)]
        for text, row in zip(texts, out.accepted_tokens.tolist(), strict=True):
            text += [i for i in row if i >= 0]
        if k_0:
            inputs = _inputs([t[-1:] for t in texts], [len(t) - 1 for t in texts])
            out = pair.step(0, inputs, inputs.params(), state, caches)
            state, caches = out.draft_state, list(out.target_caches)
            for text, (token,) in zip(texts, out.accepted_tokens.tolist(), strict=True):
                text.append(token)


def _recorded(
    pair: Pair, k: int, inputs: StepInputs, state: DraftState, caches: list[Cache]
) -> tuple[StepOutputs, Tensor, Tensor]:
    """A step, the logits (B, k, V) of its drafts and the drafts (B, k)."""
    logits, candidates = list[Tensor](), list[Tensor]()
    drafter, propose = pair.drafter, pair.drafter.propose
    head: Any = pair.draft_model.lm_head  # type: ignore[union-attr]
    handle = head.register_forward_hook(lambda module, given, result: logits.append(result))

    def proposed(*arguments: Any) -> Any:
        out = propose(*arguments)
        candidates.append(out[0][:, 1:])
        return out

    with mock.patch.object(drafter, "propose", proposed), mock.patch.object(Context, "accept", _any_count):
        out = pair.step(k, inputs, inputs.params(), state, caches)
    handle.remove()
    return out, torch.cat(logits, 1), candidates[0]


def beyond(distance: int) -> Spoil:
    """Spoils every key and value from `distance` places after the input id on."""

    def spoil(caches: list[Cache], positions: Tensor) -> list[Cache]:
        bad = torch.arange(LENGTH)[None] >= (positions + distance)[:, None]
        # block 0 is none, the others are the sequences'
        bad = torch.cat((torch.zeros_like(bad[:1]), bad))
        return [Cache(*(torch.where(bad[:, None, :, None], 1e3, t) for t in cache)) for cache in caches]

    return spoil
