"""The parallel drafter against transformers, what its masks leave in the cache, and what it remembers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from model.bundle.checkpoint import Checkpoint
from model.cache import Cache, empty_caches
from model.config import load_config
from model.drafters import DraftState
from model.drafters.parallel import Parallel
from model.graph_io import StepInputs, StepOutputs
from model.ops import EAGER, Ops
from model.packing import Packing
from model.parallel import ONE_RANK
from model.qwen3 import Qwen3
from model.sampling import Draws
from model.speculative import Pair
from tests.compile.tiny import shard_of, write_model

MASK, LENGTH = 63, 128
# one shorter than any k, one longer
PROMPTS = [[5], [9, 2, 7, 7, 1, 30, 4, 4, 8, 11, 2]]


class Drafted(NamedTuple):
    """What one step drafted for one sequence: the ids before it, the logits (k, V) and the drafts."""

    known: list[int]
    logits: Tensor
    drafts: list[int]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and a draft whose config.json has a `pard_token`."""
    folder = tmp_path_factory.mktemp("parallel")
    write_model(folder / "target", 1, scale=0.4)
    write_model(folder / "draft", 2, scale=0.4, num_hidden_layers=2, pard_token=MASK)
    return folder


def _model(folder: Path) -> Qwen3:
    model = Qwen3(load_config(str(folder)))
    model.load_state_dict(shard_of(Checkpoint(folder, model.config), 0, 1, torch.float32, Packing()))
    return model.eval()


def _inputs(ids: list[list[int]], positions: list[int], known: list[int], slot: int = 0) -> StepInputs:
    def column(value: float) -> Tensor:
        return torch.full((len(ids),), value)

    at = torch.tensor(positions, dtype=torch.int32)[:, None] + torch.arange(len(ids[0]), dtype=torch.int32)
    mask = torch.arange(LENGTH)[None] < torch.tensor(known)[:, None]
    seeds = torch.tensor([[3, i] for i in range(len(ids))], dtype=torch.int32)
    return StepInputs(
        torch.tensor(ids, dtype=torch.int32), mask.to(torch.int32), at,
        torch.arange(len(ids), dtype=torch.int32) + slot,
        torch.stack((column(0.0), column(1.0), column(0.0)), 1), column(0.0), seeds,
        torch.full((len(ids),), 16, dtype=torch.int32),
    )  # fmt: skip


Spoil = Callable[[list[Cache], Tensor], list[Cache]]


def _any_count(ops: Ops, drafts_BK: Tensor, draws: Draws, limit_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """An acceptance that keeps any number of drafts: what is kept is no matter to a drafter."""
    targets_BN, (batch, k) = draws.merged(), drafts_BK.shape
    count_B1 = torch.randint(1, k + 2, (batch, 1), dtype=torch.int32)
    index_N = torch.arange(k + 1)
    kept_BN = torch.where(index_N < count_B1 - 1, torch.nn.functional.pad(drafts_BK, (0, 1)), targets_BN)
    last_B1 = torch.where(index_N == count_B1 - 1, targets_BN, 0).sum(-1, keepdim=True).to(torch.int32)
    return torch.where(index_N < count_B1, kept_BN, -1), count_B1, last_B1


def _steps(folder: Path, k: int, most: int, count: int, spoil: Spoil = lambda c, p: c) -> Iterator[list[Drafted]]:
    """Steps of both prompts with the parallel draft."""
    target, draft = _model(folder / "target"), _model(folder / "draft")
    caches = [empty_caches(m.config, ONE_RANK, len(PROMPTS), LENGTH, torch.float32) for m in (draft, target)]
    state = DraftState(caches[0], (torch.zeros(len(PROMPTS), most, 1, dtype=torch.int32),))
    return steps_of(Pair(target, Parallel(draft, MASK), EAGER), state, caches[1], PROMPTS, k, count, spoil)


@torch.no_grad()
def steps_of(
    pair: Pair,
    state: DraftState,
    held: list[Cache],
    prompts: list[list[int]],
    k: int,
    count: int,
    spoil: Spoil = lambda c, p: c,
) -> Iterator[list[Drafted]]:
    """Steps of all prompts, of which each keeps any number of drafts."""
    torch.manual_seed(k)
    texts = []
    for slot, prompt in enumerate(prompts):
        padded = [prompt + [0] * (LENGTH - len(prompt))]
        out = pair.prefill(k, _inputs(padded, [0], [len(prompt)], slot), state, held)
        state, held = out.draft_state, out.target_caches
        texts.append([*prompt, int(out.next_ids)])
    for _ in range(count):
        positions = torch.tensor([len(t) - 1 for t in texts])
        state = state._replace(caches=spoil(state.caches, positions))
        inputs = _inputs([t[-1:] for t in texts], positions.tolist(), positions.tolist())
        out, logits, drafts = _recorded(pair, k, inputs, state, held)
        state, held = out.draft_state, out.target_caches
        yield [Drafted(list(t), logits[b], drafts[b].tolist()) for b, t in enumerate(texts)]
        for text, row in zip(texts, out.accepted.tolist(), strict=True):
            text += [i for i in row if i >= 0]


def _recorded(
    pair: Pair, k: int, inputs: StepInputs, state: DraftState, held: list[Cache]
) -> tuple[StepOutputs, Tensor, Tensor]:
    """A step, the logits (B, k, V) of its drafts and the drafts (B, k)."""
    logits, candidates = [], []
    drafter, real = pair.drafter, pair.drafter.propose
    real_logits = drafter.model.logits  # type: ignore[union-attr]

    def seen(*arguments: object) -> Tensor:
        logits.append(real_logits(*arguments))
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
        out = pair.step(k, inputs, state, held)
    return out, logits[0], candidates[0]


@pytest.mark.parametrize(("k", "most"), [(1, 1), (2, 2), (5, 5), (3, 7), (16, 16)])
def test_drafts_are_those_of_a_plain_forward_of_the_same_checkpoint(folder: Path, k: int, most: int) -> None:
    """As PARD's own inference: the kept ids and k - 1 masks in a causal forward, the last k rows."""
    theirs = AutoModelForCausalLM.from_pretrained(folder / "draft", dtype=torch.float32)
    for n, step in enumerate(_steps(folder, k, most, 6)):
        for drafted in step:
            with torch.no_grad():
                expected = theirs(torch.tensor([drafted.known + [MASK] * (k - 1)])).logits[0, -k:]
            assert torch.allclose(drafted.logits, expected, atol=1e-4, rtol=0), n
            assert drafted.drafts == expected.argmax(-1).tolist()


def _beyond(distance: int) -> Spoil:
    """Spoils every key and value from `distance` places after the input id on."""

    def spoil(caches: list[Cache], positions: Tensor) -> list[Cache]:
        bad = torch.arange(LENGTH)[None] >= (positions + distance)[:, None]
        return [Cache(*(torch.where(bad[:, None, :, None], 1e3, t) for t in cache)) for cache in caches]

    return spoil


def test_nothing_reads_what_masks_have_written(folder: Path) -> None:
    """From the first of the rows of a pass on, whatever was in the cache has no say; one place before it has."""
    k = most = 4
    clean = list(_steps(folder, k, most, 8))
    for distance, same in ((1, True), (-most, True), (-most - 1, False)):
        spoiled = list(_steps(folder, k, most, 8, _beyond(distance)))
        pairs = [(a, b) for x, y in zip(clean, spoiled, strict=True) for a, b in zip(x, y, strict=True)]
        assert all(torch.equal(a.logits, b.logits) and a.known == b.known for a, b in pairs) is same
