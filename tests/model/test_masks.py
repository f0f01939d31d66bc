"""Structured output: no id is drawn that a mask forbids, the rest keep the law, and no neighbour notices."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from model.asks import BIASES, Asked, Asks, allowed_ids
from model.errors import UserError
from model.graph_io import words_of
from model.kernels import Kernels
from model.ops import EAGER, Ops
from model.parallel import Shard
from model.sampling import Draws, Sampling, coupled_sample
from model.scores import TOP
from tests.model.family import V
from tests.model.family import graphs as graphs_of
from tests.model.ranks import RankOps, on_ranks
from tests.model.test_sampling import _draw, law_of_filter
from tests.model.test_shards import SIMULATED, part, rows
from trnspec.engine.config import engine_config
from trnspec.engine.engine import Engine
from trnspec.engine.masks import Allowed
from trnspec.engine.request import Params, Request, Score
from trnspec.llm import LLM
from trnspec.runtime.xla import XlaRunner


def words(allowed: Sequence[bool]) -> np.ndarray:
    """The mask of these ids, in order, as vLLM writes it: id 32 w + b is bit b of word w; spare bits are set."""
    spare = [True] * (-len(allowed) % 32)
    bits = np.array([*allowed, *spare], np.uint64).reshape(-1, 32)
    return (bits << np.arange(32, dtype=np.uint64)).sum(1).astype(np.uint32).view(np.int32)


def some(count: int, seed: int, share: float = 0.3) -> list[bool]:
    rng = random.Random(seed)
    allowed = [rng.random() < share for _ in range(count)]
    allowed[rng.randrange(count)] = True
    return allowed


@pytest.mark.parametrize(("vocabulary", "ranks"), [(64, 1), (70, 1), (96, 4), (184, 8), (32, 2)])
def test_a_shard_reads_its_own_bits(vocabulary: int, ranks: int) -> None:
    masks = [some(vocabulary, seed) for seed in range(3)]
    words_BW = torch.from_numpy(np.stack([words(mask) for mask in masks]))
    assert words_BW.shape[1] == words_of(vocabulary)
    width = vocabulary // ranks
    shards = [Shard(torch.tensor([[r * width]], dtype=torch.int32), width) for r in range(ranks)]
    parts = [allowed_ids(words_BW.unsqueeze(1), shard, 3) for shard in shards]
    assert torch.cat(parts, 1).tolist() == masks


def only(allowed_RV: Tensor) -> Asked:
    """Rows that ask for nothing but a mask."""
    rows, count = allowed_RV.shape
    asked_R4, counts_RV = torch.tensor([[0.0, 0.0, 1.0, 1.0]]).repeat(rows, 1), torch.zeros(rows, count)
    return Asked(allowed_RV, asked_R4, counts_RV, counts_RV.to(torch.int32), torch.arange(count))


MIXES = [(0.7, 0, 1.0, 0.0), (1.0, 3, 1.0, 0.0), (1.3, 0, 0.6, 0.0), (0.9, 0, 1.0, 0.2), (1.1, 4, 0.8, 0.05)]


@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_a_masked_draw_has_the_target_s_law_over_what_is_allowed(mix: tuple[float, int, float, float]) -> None:
    """Over a grid of noise, point by point: the argmax of the masked, then filtered law, as vLLM orders them.

    The control filters before it masks, which is a different law for every mix that filters.
    """
    count, points, size = 12, 400, 7
    different = 0
    for seed in range(count):
        rng = np.random.default_rng(seed)
        logits, allowed = rng.normal(0, 1.5, size), np.array(some(size, seed, 0.5))
        kept = law_of_filter(logits[allowed], *mix)
        law, late = np.zeros(size), np.where(allowed, law_of_filter(logits, *mix), 0)
        law[allowed] = kept
        grid = torch.quasirandom.SobolEngine(size, scramble=True, seed=seed).draw(points, dtype=torch.float64)
        noise = -np.log(-np.log(grid.clamp(1e-9, 1 - 1e-9).numpy()))
        draw = _draw(points, *mix)._replace(
            noise_RV=torch.from_numpy(noise).float(), asked=only(torch.from_numpy(allowed).expand(points, -1))
        )
        logits_RV = torch.from_numpy(logits).float().expand(points, -1)
        drawn = coupled_sample(EAGER, logits_RV, draw).numpy()
        with np.errstate(divide="ignore"):
            best, of_late = ((np.log(of) + noise) for of in (law, late))
        margin = np.diff(np.sort(best, 1)[:, -2:])[:, 0]
        sure = margin > 1e-4
        assert sure.mean() > 0.99
        assert (drawn[sure] == best.argmax(1)[sure]).all()
        frequency = np.bincount(drawn, minlength=size) / points
        assert np.abs(frequency - law).max() < 0.06
        different += bool((drawn != of_late.argmax(1)).any())
    assert (different > 0) == (mix[1:] != (0, 1.0, 0.0))


def test_a_greedy_masked_draw_is_the_best_allowed_id() -> None:
    logits, allowed = torch.randn(20, V, generator=torch.Generator().manual_seed(1)), torch.tensor([some(V, 5)])
    drawn = coupled_sample(EAGER, logits, _draw(20, t=0.0)._replace(asked=only(allowed.expand(20, -1))))
    assert torch.equal(drawn.long(), torch.where(allowed, logits, float("-inf")).argmax(-1))
    assert not torch.equal(drawn.long(), logits.argmax(-1))


def _scored(
    kernels: Kernels, ops: Ops, logits: Tensor, params: Sampling, at: Tensor, masks: Tensor, held: Shard
) -> tuple[Draws, Tensor | None]:
    rows, none = len(logits), torch.full((len(logits), BIASES), -1, dtype=torch.int32)
    # log-probabilities among the allowed ids
    asked_R4, counts = torch.tensor([[0.0, 0.0, 1.0, 1.0]]).repeat(rows, 1), torch.zeros((rows, 1, held.width))
    asks = Asks(masks.unsqueeze(1), asked_R4, none, none.float(), counts.to(torch.int32))
    return kernels.scored_sample(ops, logits, kernels.prepare(ops, params._replace(asks=asks), at[:, None], held))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_shards_draw_and_score_as_the_whole_vocabulary_does(ranks: int) -> None:
    """The NKI kernels in the simulator against the reference: greedy, drawn and filtered rows, each with its mask."""
    logits_RV, params, positions_R = rows(12, 8 * 23)
    count = logits_RV.shape[1]
    allowed = [some(count, seed, 0.2) for seed in range(11)] + [[i == 150 for i in range(count)]]
    masks = torch.from_numpy(np.stack([words(a) for a in allowed]))
    whole = Shard(torch.zeros(1, 1, dtype=torch.int32), count)
    expected, _ = _scored(Kernels(), EAGER, logits_RV, params, positions_R, masks, whole)

    def work(ops: RankOps) -> tuple[Draws, Tensor | None]:
        held = Shard(torch.tensor([[ops.rank * count // ranks]], dtype=torch.int32), count // ranks)
        return _scored(SIMULATED, ops, part(logits_RV, ops, ranks), params, positions_R, masks, held)

    logprobs = torch.where(torch.tensor(allowed), logits_RV, float("-inf")).log_softmax(-1)
    for draws, scores in on_ranks(ranks, work):
        ids = draws.merged()
        assert torch.equal(ids, expected.merged())
        assert all(a[i] for a, i in zip(allowed, ids.tolist(), strict=True))
        assert scores is not None
        own = logprobs.gather(1, ids.long()[:, None])
        torch.testing.assert_close(scores[:, 0], own[:, 0], atol=2e-6, rtol=0)
        assert scores[:, 1].tolist() == (logprobs >= own).sum(-1).tolist()
        best = logprobs.sort(dim=-1, descending=True, stable=True)
        some_allowed = best.values[:, :TOP].isfinite()
        assert torch.equal(scores[:, 2 + TOP :][some_allowed].long(), best.indices[:, :TOP][some_allowed])
        found = scores[:, 2 : 2 + TOP]
        torch.testing.assert_close(found[some_allowed], best.values[:, :TOP][some_allowed], atol=2e-6, rtol=0)
        assert (found[~some_allowed] < -1e20).all()


@pytest.fixture
def graphs(family: Path) -> XlaRunner:
    """Of a chain that often guesses right, with two k."""
    return graphs_of(family)


def _by(seed: int, told: list[tuple[int, ...]] | None = None) -> Allowed:
    """Masks that depend on all ids so far, as a grammar's do."""

    def allowed(ids: Sequence[int]) -> np.ndarray:
        if told is not None:
            told.append(tuple(ids))
        return words(some(V, hash((seed, *ids)) & 0xFFFF))

    return allowed


PARAMS = [Params(), Params(0.9, seed=3), Params(1.1, top_k=5, top_p=0.9, seed=4)]


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "drawn", "filtered"])
def test_masked_rows_obey_and_their_neighbours_do_not_notice(graphs: XlaRunner, params: Params) -> None:
    shape = engine_config(graphs.bundle)
    free = [Request((9, 2, 7), params, 40), Request((1,), Params(0.8, seed=8), 25)]
    alone = Engine(graphs, shape, False).run(free)
    told: list[tuple[int, ...]] = []
    bound = Request((4, 4), params, 20, allowed=_by(1, told))
    masked = Engine(graphs, shape).run([free[0], bound, free[1]])
    assert [masked[0].ids, masked[2].ids] == [r.ids for r in alone]
    ids = masked[1].ids
    # the masks were called with all ids before each id, and with drafts that were rejected
    assert {tuple(ids[:n]) for n in range(20)} < {*told}
    assert all(some(V, hash((1, *ids[:n])) & 0xFFFF)[ids[n]] for n in range(20))
    assert ids == Engine(graphs, shape, False).run([bound])[0].ids
    assert masked[1].steps_of_k.get(3, 0) > 0
    assert sum(masked[0].accepted) > 0, "the neighbours go on speculating"
    # the control: without its mask it would have gone elsewhere
    unbound = Engine(graphs, shape).run([Request((4, 4), params, 20)])[0].ids
    assert not all(some(V, hash((1, *unbound[:n])) & 0xFFFF)[unbound[n]] for n in range(20))


def test_a_mask_that_allows_everything_changes_nothing(graphs: XlaRunner) -> None:
    shape, everything = engine_config(graphs.bundle), words([True] * V)
    for params in PARAMS:
        plain, masked = (
            Engine(graphs, shape).run([Request((9, 2, 7), params, 30, allowed=allowed)])[0].ids
            for allowed in (None, lambda ids: everything)
        )
        assert plain == masked


@pytest.mark.parametrize("limit", [None, 1, 0])
def test_log_probabilities_are_the_model_s_and_change_no_id(family: Path, graphs: XlaRunner, limit: int | None) -> None:
    """Against transformers, before temperature and filters; speculation goes on."""
    theirs = AutoModelForCausalLM.from_pretrained(family / "target", dtype=torch.float32)
    for params in PARAMS:
        asked = [Request((9, 2, 7), params, 30, k_limit=limit, logprobs=on) for on in (3, None)]
        scored, plain = Engine(graphs, engine_config(graphs.bundle)).run(asked)
        assert scored.ids == plain.ids
        assert plain.scores == []
        logits = theirs(torch.tensor([[9, 2, 7, *scored.ids]])).logits[0, 2:-1]
        logprobs = logits.log_softmax(-1)
        own = logprobs.gather(1, torch.tensor(scored.ids)[:, None])
        found = torch.tensor([score.logprob for score in scored.scores])
        torch.testing.assert_close(found, own[:, 0].detach(), atol=2e-4, rtol=0)
        assert [score.rank for score in scored.scores] == (logprobs >= own).sum(-1).tolist()
        best = [[token for token, _ in score.best] for score in scored.scores]
        assert best == logprobs.topk(3, -1).indices.tolist()
        if limit is None:
            assert sum(scored.accepted) > 0


def test_a_masked_id_s_log_probability_is_among_what_is_allowed(graphs: XlaRunner) -> None:
    forced = words([i == 11 for i in range(V)])
    result = Engine(graphs, engine_config(graphs.bundle)).run(
        [Request((3,), PARAMS[1], 5, allowed=lambda _: forced, logprobs=0)]
    )
    assert result[0].ids == [11] * 5
    assert result[0].scores == [Score(0.0, 1)] * 5


def test_the_front_door_takes_masks_and_gives_log_probabilities(graphs: XlaRunner) -> None:
    with LLM(graphs.bundle.path) as llm:
        out = llm.generate([5, 6], Params(0.7, seed=1), max_new_tokens=12, allowed=_by(2), logprobs=1)
        assert len(out.scores) == len(out.ids) == 12
        assert max(score.logprob for score in out.scores) <= 0
        assert llm.generate([5, 6], Params(0.7, seed=1), max_new_tokens=12, allowed=_by(2)).ids == out.ids
        for mask in (np.zeros(2, np.int32), np.ones(3, np.int32), np.ones(2, np.int64)):
            with pytest.raises(UserError, match="it must allow an id and have 2 int32 words"):
                llm.generate([5, 6], allowed=lambda ids, mask=mask: mask)
        assert llm.generate([5, 6], max_new_tokens=3).ids


def test_every_bundle_has_asking_graphs(graphs: XlaRunner) -> None:
    # a prefill, the step of k 0 and two halves of the largest k
    assert sum(key.asking for key in graphs.bundle.plan.by_key) == 4
