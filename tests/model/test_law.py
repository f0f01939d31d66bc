"""The distribution of the output by exact enumeration, across step boundaries.

Two tabular models, whose next-token logits depend on the full prefix, run through the real fused step. At each position
the noise matters only through the token that each context of either model samples, so the noise space divides into
cells; one point of each cell, weighted by the cell's probability, represents it. Each combination of cells over the
positions is one row of a batch, and the weighted counts of outputs must equal the target's distribution.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from model import sampling
from model.cache import AttentionMetadata, Cache
from model.context import ONE_RANK, Context
from model.drafter import Drafter, DraftState
from model.drafters.chain import Chain
from model.drafters.dflash import DFlash, DFlashModel
from model.drafters.eagle3 import Eagle3
from model.drafters.parallel import Parallel
from model.graph_io import StepInputs
from model.layers import LanguageModel
from model.ops import EAGER
from model.parallel import VocabShard
from model.qwen3 import Hidden
from model.sampling import SamplingParams
from model.speculative import Pair
from tests.model.test_sampling import law_of_filter


class Mix(NamedTuple):
    """Sampling parameters."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


class Size(NamedTuple):
    """Vocabulary, drafts a step, tokens of the law."""

    vocabulary: int
    k: int
    tokens: int


BOUND = 1e-3
POINTS = 1 << 17
# the prefix is one start token at position 0
START = 0
# the first input id's position: a prompt has an id before it
BEGIN = 1
# in a hidden state: a position after the row's
NOT_SEEN = -1
MIXES = [Mix(), Mix(0.6), Mix(1.4, top_k=2), Mix(1.0, top_p=0.8), Mix(0.9, min_p=0.25), Mix(1.2, 2, 0.9, 0.1)]
SIZES = [Size(2, 2, 4), Size(3, 1, 3), Size(3, 2, 3), Size(4, 3, 2)]


def _prefixes(size: Size, length: int) -> list[tuple[int, ...]]:
    return list(itertools.product(range(size.vocabulary), repeat=length))


class Table(LanguageModel):
    """Logits by prefix; the cache stores the ids of the prefix in place of keys."""

    def __init__(self, size: Size, seed: int) -> None:
        config: Any = SimpleNamespace(head_size="vocab_size", vocab_size=size.vocabulary, mask_id=0, seed=seed)
        super().__init__(config, ONE_RANK)
        self.size = size
        rng = np.random.default_rng(seed)
        self.of_length = [
            torch.from_numpy(rng.normal(0, 1.2, (size.vocabulary**n, size.vocabulary)).astype(np.float32))
            for n in range(size.tokens)
        ]

    def hidden(self, ids_BN: Tensor, caches: list[Cache], meta: AttentionMetadata) -> Hidden:
        """The logits of each row as hidden states; a mask token is id 0 and visible to the masks after it."""
        written = EAGER.append(
            caches[0].k, ids_BN[:, None, :, None].float(), torch.arange(len(ids_BN))[:, None], meta.positions_BN
        )
        text_BS = written[:, 0, :, 0].long()
        x_BNV = torch.stack([self._after(text_BS, p_B) for p_B in meta.positions_BN.T], 1)
        # the tapped state of a row: the prefix up to it, for DFlash; an EAGLE-3 head has the ids in its cache
        seen_BNS = torch.arange(text_BS.shape[1]) <= meta.positions_BN[..., None]
        states_BNS = torch.where(seen_BNS, text_BS.clamp(min=0)[:, None], NOT_SEEN)
        return Hidden(x_BNV, [Cache(written, caches[0].v)], states_BNS)

    def logits(self, x_BNV: Tensor) -> Tensor:
        return x_BNV

    def forward(
        self, ids_BN: Tensor, caches: list[Cache], meta: AttentionMetadata, params: SamplingParams, noise_BNV: Tensor
    ) -> tuple[Tensor, list[Cache]]:
        passed = self.hidden(ids_BN, caches, meta)
        return self.sample(passed.x_BNE, params, noise_BNV).token_ids(), passed.caches

    def _after(self, text_BS: Tensor, position_B: Tensor) -> Tensor:
        out = torch.zeros(len(text_BS), self.size.vocabulary)
        for length, table in enumerate(self.of_length):
            here = position_B == length + BEGIN
            number = torch.zeros(int(here.sum()), dtype=torch.long)
            for p in range(1, length + 1):
                number = number * self.size.vocabulary + text_BS[here, p + BEGIN]
            out[here] = table[number]
        return out


class HeadRows(nn.Module):
    """A table as an EAGLE-3 head: the row at position p has the id of p + 1; its output is the logits of p + 2."""

    def __init__(self, table: Table) -> None:
        super().__init__()
        self.table, self.ctx, self.noise = table, table.ctx, table.noise
        self.config = SimpleNamespace(taps=(0,))

    @property
    def shard(self) -> VocabShard:
        return self.table.shard

    def feature(self, states_BNF: Tensor) -> Tensor:
        return states_BNF

    def hidden(
        self, next_BN: Tensor, x_BNV: Tensor, caches: list[Cache], meta: AttentionMetadata
    ) -> tuple[Tensor, list[Cache]]:
        passed = self.table.hidden(next_BN, caches, meta._replace(positions_BN=meta.positions_BN + 1))
        return passed.x_BNE, passed.caches

    def draft(self, x_B1V: Tensor, params: SamplingParams, noise_B1V: Tensor) -> Tensor:
        return self.table.sample(x_B1V, params, noise_B1V).token_ids()

    def forward(
        self, next_B1: Tensor, x_B1V: Tensor, caches: list[Cache], meta: AttentionMetadata,
        params: SamplingParams, noise_B1V: Tensor,
    ) -> tuple[Tensor, Tensor, list[Cache]]:  # fmt: skip
        x_B1V, caches = self.hidden(next_B1, x_B1V, caches, meta)
        return self.draft(x_B1V, params, noise_B1V), x_B1V, caches


class TableBlock(nn.Module):
    """A table as a shifted DFlash draft: the context is the ids of the prefix, a mask token is id 0.

    With a Markov head it decodes with the model's methods.
    """

    markov_decode, _candidates = DFlashModel.markov_decode, DFlashModel._candidates

    def __init__(self, table: Table, rank: int) -> None:
        super().__init__()
        self.table, self.ctx, self.noise, self.sample = table, table.ctx, table.noise, table.sample
        self.config = SimpleNamespace(taps=(0,), shifted=True, causal=False, mask_id=0, markov_rank=rank)
        generator = torch.Generator().manual_seed(rank)
        for name in ("markov_w1", "markov_w2"):
            setattr(self, name, torch.randn(table.size.vocabulary, max(rank, 1), generator=generator))
        self.hidden, self.logits = table.hidden, table.logits

    @property
    def shard(self) -> VocabShard:
        return self.table.shard

    def context(self, states_BNS: Tensor, caches: list[Cache], meta: AttentionMetadata) -> list[Cache]:
        ids_BN = states_BNS.gather(2, meta.positions_BN.long()[..., None])[..., 0]
        return self.table.hidden(ids_BN, caches, meta).caches


# name -> the drafter of a table
DRAFTERS: dict[str, Callable[[Table], Drafter]] = {
    "chain": Chain,
    "parallel": Parallel,
    "eagle3": lambda table: Eagle3(HeadRows(table)),
    "dflash": lambda table: DFlash(TableBlock(table, 0)),
    "dspark": lambda table: DFlash(TableBlock(table, 2)),
    "host": lambda _: Drafter(),
}


def _models(size: Size) -> list[Table]:
    """The target and the draft."""
    return [Table(size, 10), Table(size, 20)]


@functools.cache
def _cells(size: Size, mix: Mix) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each position one noise vector (cells, V) per cell, and the cells' probabilities."""
    actual = []
    for table in zip(*(m.of_length for m in _models(size)), strict=True):
        laws = [law_of_filter(row.astype(np.float64), *mix) for t in table for row in t.numpy()]
        points = torch.quasirandom.SobolEngine(size.vocabulary, scramble=True, seed=1).draw(POINTS, dtype=torch.float64)
        noise = -np.log(-np.log(points.clamp(1e-12, 1 - 1e-12).numpy()))
        samples, margin = [], np.full(POINTS, np.inf)
        for law in laws:
            with np.errstate(divide="ignore"):
                scores = np.log(law) + noise
            samples.append(scores.argmax(1))
            best = np.sort(scores, 1)
            margin = np.minimum(margin, best[:, -1] - best[:, -2])
        _, cell = np.unique(np.stack(samples), axis=1, return_inverse=True)
        cell = cell.reshape(-1)
        # the point farthest from the boundaries represents its cell: rounding cannot move it to another cell
        order = np.argsort(margin)
        representative = np.zeros(cell.max() + 1, np.int64)
        representative[cell[order]] = order
        actual.append((noise[representative], np.bincount(cell) / POINTS))
    return actual


def _emitted_law(size: Size, mix: Mix, drafter: str) -> tuple[dict[tuple[int, ...], float], float]:
    """The distribution of the first tokens that the fused step emits, and the mean tokens per step."""
    cells, models = _cells(size, mix), _models(size)
    index = np.stack(np.meshgrid(*(np.arange(len(w)) for _, w in cells), indexing="ij"), -1).reshape(-1, size.tokens)
    weight = np.prod([w[index[:, p]] for p, (_, w) in enumerate(cells)], 0)
    batch, length = len(index), size.tokens + size.k + 3 + BEGIN
    noise_BSV = torch.zeros(batch, length, size.vocabulary)
    for p, (points, _) in enumerate(cells):
        noise_BSV[:, p + 1 + BEGIN] = torch.from_numpy(points[index[:, p]]).float()

    # seeds are the row's number, so that the injected noise is a function of (row, position)
    def noise(ops: Any, seed_R2: Tensor, positions_R: Tensor, ids_V: Tensor) -> Tensor:
        return noise_BSV[seed_R2[:, 0].long(), positions_R.long().clamp(max=length - 1)]

    pair = Pair(models[0], DRAFTERS[drafter](models[1]))  # type: ignore[arg-type]
    with mock.patch.object(sampling, "gumbel_noise", noise):
        text, accepted = _run(pair, size, mix, batch, length)
    counts: dict[tuple[int, ...], float] = dict.fromkeys(_prefixes(size, size.tokens), 0.0)
    for row, w in zip(map(tuple, text.tolist()), weight, strict=True):
        counts[row] += float(w)
    return counts, float((accepted * weight).sum() / weight.sum())


def _run(pair: Pair, size: Size, mix: Mix, batch: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    def column(value: float) -> Tensor:
        return torch.full((batch,), float(value))

    def cache() -> list[Cache]:
        return [Cache(torch.full((batch, 1, length, 1), -1.0), torch.zeros(batch, 1, length, 1))]

    ids, position = torch.full((batch, 1), START, dtype=torch.int32), torch.full((batch,), BEGIN, dtype=torch.int32)
    slots = torch.zeros(batch, size.k if isinstance(pair.drafter, Parallel) else 1, 1, dtype=torch.int32)
    if isinstance(pair.draft_model, HeadRows):
        slots = pair.draft_model.table.of_length[0].expand(batch, 1, -1)
    drafts, targets = DraftState(cache(), (slots,)), cache()
    on_host, generator = pair.drafter.model is None, torch.Generator().manual_seed(size.k)
    text = np.full((batch, size.tokens), -1)
    steps = np.zeros(batch)
    rows = torch.arange(batch, dtype=torch.int32)
    for _ in range(size.tokens):
        if on_host:
            more = torch.randint(size.vocabulary, (batch, size.k), generator=generator, dtype=torch.int32)
            ids = torch.cat((ids, more), 1)
        inputs = StepInputs(
            ids,
            position,
            torch.stack((column(mix.top_k), column(mix.top_p), column(mix.temperature)), 1),
            column(mix.min_p),
            torch.stack((rows, rows), 1),
            torch.zeros(batch, 1, dtype=torch.int32),
            torch.full((batch,), size.k, dtype=torch.int32),
        )
        out = pair.step(size.k, inputs, inputs.params(), drafts, targets)
        for n in range(size.k + 1):
            place = position.numpy() - BEGIN + n
            keep = (out.accepted_tokens[:, n].numpy() >= 0) & (place < size.tokens)
            text[keep, place[keep]] = out.accepted_tokens[keep, n]
        steps += position.numpy() < size.tokens + BEGIN
        ids, position, drafts, targets = out.next_ids, out.next_positions, out.draft_state, out.target_caches
        # finished rows stay at the last position; their tokens are not counted
        position = position.clamp(max=size.tokens + BEGIN)
    return text, size.tokens / steps


def _target_law(size: Size, mix: Mix) -> dict[tuple[int, ...], float]:
    law, (target, _) = {}, _models(size)
    for text in _prefixes(size, size.tokens):
        probability, number = 1.0, 0
        for length, token in enumerate(text):
            row = law_of_filter(target.of_length[length][number].numpy().astype(np.float64), *mix)
            probability *= row[token]
            number = number * size.vocabulary + token
        law[text] = probability
    return law


def _distance(size: Size, mix: Mix, drafter: str = "chain") -> tuple[float, float]:
    actual, tokens_per_step = _emitted_law(size, mix, drafter)
    expected = _target_law(size, mix)
    return max(abs(actual[t] - expected[t]) for t in expected), tokens_per_step


# each mix with two sizes
CASES = [(mix, SIZES[place % len(SIZES)]) for n, mix in enumerate(MIXES) for place in (n, n + 1)]


@pytest.mark.parametrize(("mix", "size"), CASES, ids=str)
def test_the_emitted_text_has_the_targets_law(size: Size, mix: Mix) -> None:
    distance, tokens_per_step = _distance(size, mix)
    assert distance < BOUND
    assert 1 < tokens_per_step < size.k + 1, "some drafts must be accepted and some refused for this to mean anything"


@pytest.mark.parametrize("mix", [MIXES[0], MIXES[-1]], ids=str)
@pytest.mark.parametrize("drafter", ["parallel", "eagle3", "dflash", "dspark", "host"])
def test_the_law_does_not_depend_on_the_drafter(drafter: str, mix: Mix) -> None:
    for size in SIZES[:2]:
        distance, tokens_per_step = _distance(size, mix, drafter)
        assert distance < BOUND
        assert 1 < tokens_per_step < size.k + 1


_ACCEPT = sampling.accept


def _one_more(drafts_BK: Tensor, targets_BN: Tensor, limit_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A wrong acceptance: the first emitted id is the draft's sample."""
    forged = torch.cat((drafts_BK[:, :1], targets_BN[:, 1:]), 1)
    return _ACCEPT(drafts_BK, forged, limit_B)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_wrong_acceptance_is_caught(drafter: str) -> None:
    with mock.patch.object(sampling, "accept", _one_more):
        assert _distance(SIZES[0], Mix(), drafter)[0] > 10 * BOUND


def test_a_reused_noise_stream_is_caught() -> None:
    real = Context.gumbel_noise

    def reused(self: Context, seed_R2: Tensor, position_R: Tensor, shard: VocabShard) -> Tensor:
        return real(self, seed_R2, (position_R - 1) // 2 * 2 + 1, shard)

    with mock.patch.object(Context, "gumbel_noise", reused):
        assert _distance(SIZES[0], Mix())[0] > 10 * BOUND


def test_rejected_rows_left_in_the_cache_are_caught() -> None:
    def stuck(self: Any, cache: Tensor, new: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        fresh = torch.gather(cache[:, 0, :, 0], 1, positions.long()) < 0
        return (
            append(self, cache, torch.where(fresh[:, None, :, None], new, -1.0), slots, positions)
            if bool(fresh.all())
            else cache
        )

    append = type(EAGER).append
    with mock.patch.object(type(EAGER), "append", stuck):
        assert _distance(SIZES[0], Mix())[0] > 10 * BOUND
