"""Steps of a pair whose drafts are kept by chance: what a drafter proposed in each, and from which logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor

from model.cache import Cache
from model.config import load_config
from model.drafters import DraftState
from model.graph_io import StepInputs, StepOutputs
from model.ops import Ops
from model.packing import Packing
from model.qwen3 import Qwen3
from model.sampling import Draws
from model.speculative import Pair
from tests.compile.tiny import shard_of
from tests.model.paged import block_table, empty
from trnspec.bundle.checkpoint import Checkpoint

LENGTH = 128


def loaded(folder: Path) -> Qwen3:
    """A checkpoint folder's model on one rank, in fp32."""
    model = Qwen3(load_config(str(folder)))
    model.load_state_dict(shard_of(Checkpoint(folder, model.config), 0, 1, torch.float32, Packing()))
    return model.eval()


# one shorter than any k, one longer
PROMPTS = [[5], [9, 2, 7, 7, 1, 30, 4, 4, 8, 11, 2]]
# caches and the positions of the input ids -> caches
Spoil = Callable[[list[Cache], Tensor], list[Cache]]


class Drafted(NamedTuple):
    """What one step drafted for one sequence: the ids before it, the logits (k, V) and the drafts."""

    known: list[int]
    logits: Tensor
    drafts: list[int]


def _inputs(ids: list[list[int]], positions: list[int], slot: int | None = None, count: int = 0) -> StepInputs:
    def column(value: float) -> Tensor:
        return torch.full((len(ids),), value)

    seeds = torch.tensor([[3, i] for i in range(len(ids))], dtype=torch.int32)
    return StepInputs(
        torch.tensor(ids, dtype=torch.int32), torch.tensor(positions, dtype=torch.int32),
        torch.stack((column(0.0), column(1.0), column(0.0)), 1), column(0.0), seeds,
        block_table(len(PROMPTS), LENGTH) if slot is None else block_table(len(PROMPTS), LENGTH)[slot : slot + 1],
        torch.full((len(ids),), 16, dtype=torch.int32), *(torch.tensor([n]) for n in (count, slot or 0, -1)),
    )  # fmt: skip


def _any_count(ops: Ops, drafts_BK: Tensor, draws: Draws, limit_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """An acceptance that keeps any number of drafts: a drafter must take any of them."""
    targets_BN, (batch, k) = draws.merged(), drafts_BK.shape
    count_B1 = torch.randint(1, k + 2, (batch, 1), dtype=torch.int32)
    index_N = torch.arange(k + 1)
    kept_BN = torch.where(index_N < count_B1 - 1, torch.nn.functional.pad(drafts_BK, (0, 1)), targets_BN)
    last_B1 = torch.where(index_N == count_B1 - 1, targets_BN, 0).sum(-1, keepdim=True).to(torch.int32)
    return torch.where(index_N < count_B1, kept_BN, -1), count_B1, last_B1


@torch.no_grad()
def steps(
    pair: Pair, kept: tuple[Tensor, ...], k: int, count: int, spoil: Spoil = lambda c, p: c, alone: bool = False
) -> Iterator[list[Drafted]]:
    """Steps of both prompts, of which each keeps any number of drafts; `kept` is an empty state's.

    With `alone` the target makes a step of its own behind each.
    """
    torch.manual_seed(k)
    assert pair.draft_model is not None
    configs, batch = (pair.draft_model.config, pair.target_model.config), len(PROMPTS)
    caches = [empty(config, batch, LENGTH) for config in configs]
    state, held, texts = DraftState(caches[0], kept), caches[1], []
    for slot, prompt in enumerate(PROMPTS):
        padded = [prompt + [0] * (LENGTH - len(prompt))]
        inputs = _inputs(padded, [0], slot, len(prompt))
        out = pair.prefill(k, inputs, inputs.sampling(), state, held)
        state, held = out.draft_state, list(out.target_caches)
        texts.append([*prompt, int(out.next_ids)])
    for _ in range(count):
        positions = torch.tensor([len(t) - 1 for t in texts])
        state = state._replace(caches=spoil(state.caches, positions))
        inputs = _inputs([t[-1:] for t in texts], positions.tolist())
        out, logits, drafts = _recorded(pair, k, inputs, state, held)
        state, held = out.draft_state, list(out.target_caches)
        yield [Drafted(list(t), logits[b], drafts[b].tolist()) for b, t in enumerate(texts)]
        for text, row in zip(texts, out.accepted_tokens.tolist(), strict=True):
            text += [i for i in row if i >= 0]
        if alone:
            inputs = _inputs([t[-1:] for t in texts], [len(t) - 1 for t in texts])
            out = pair.step(0, inputs, inputs.sampling(), state, held)
            state, held = out.draft_state, list(out.target_caches)
            for text, (token,) in zip(texts, out.accepted_tokens.tolist(), strict=True):
                text.append(token)


def _recorded(
    pair: Pair, k: int, inputs: StepInputs, state: DraftState, held: list[Cache]
) -> tuple[StepOutputs, Tensor, Tensor]:
    """A step, the logits (B, k, V) of its drafts and the drafts (B, k)."""
    logits, candidates = [], []
    drafter, real = pair.drafter, pair.drafter.propose
    real_logits = drafter.model.logits  # type: ignore[union-attr, operator]

    def seen(*arguments: object) -> Tensor:
        logits.append(real_logits(*arguments))  # type: ignore[operator]
        return logits[-1]

    def proposed(*arguments: object) -> object:
        out = real(*arguments)  # type: ignore[arg-type]
        candidates.append(out[0][:, 1:])
        return out

    with (
        mock.patch.object(drafter.model, "logits", seen),
        mock.patch.object(drafter, "propose", proposed),
        mock.patch.object(pair.target_model.kernels, "accept", _any_count),
    ):
        out = pair.step(k, inputs, inputs.sampling(), state, held)
    return out, torch.cat(logits, 1), candidates[0]


def beyond(distance: int) -> Spoil:
    """Spoils every key and value from `distance` places after the input id on."""

    def spoil(caches: list[Cache], positions: Tensor) -> list[Cache]:
        bad = torch.arange(LENGTH)[None] >= (positions + distance)[:, None]
        # block 0 is none, the others are the sequences'
        bad = torch.cat((torch.zeros_like(bad[:1]), bad))
        return [Cache(*(torch.where(bad[:, None, :, None], 1e3, t) for t in cache)) for cache in caches]

    return spoil
