"""The engine's law once more on compiled bundles of several drafters: with and without drafts, ahead, preempted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.outer import Outer, ids_ahead
from tests.model.family import V, some_graphs
from trnspec.engine.async_engine import AsyncEngine
from trnspec.engine.config import engine_config
from trnspec.engine.engine import Engine
from trnspec.engine.masks import mask_of
from trnspec.engine.request import Params, Request

LENGTH, END = 256, 7
pytestmark = pytest.mark.slow


def _grammar(ids: Sequence[int]) -> np.ndarray | None:
    return None if ids[-1:] == [END] else mask_of(random.Random(f"{list(ids)}").sample(range(V), 40), V)


def _forced(ids: Sequence[int]) -> np.ndarray:
    return mask_of([(11 * len(ids)) % 50 + 8], V)


def _requests() -> list[Request]:
    """Prompts that begin alike around the edge of a block, with every kind of request."""
    rng, texts = random.Random(3), [tuple(random.Random(n).choices(range(1, V), k=LENGTH)) for n in range(2)]
    kinds: list[dict[str, Any]] = [
        {}, {"params": Params(0.9, seed=1)}, {"params": Params(1.1, 9, 0.9, 0.05, seed=2)}, {"allowed": _grammar},
        {"params": Params(0.7, seed=3, frequency_penalty=1.0, repetition_penalty=1.3), "logprobs": 2},
        {"allowed": _forced, "logprobs": 0}, {"params": Params(0.8, seed=4, bad_words=((3,), (4, 5)), min_tokens=5)},
        {"prompt_logprobs": 1}, {"params": Params(0.8, seed=5), "k_limit": 1},
    ]  # fmt: skip
    prompts = [texts[n % 2][: rng.choice((3, 100, 127, 128, 129, 140))] for n in range(2 * len(kinds))]
    return [Request(ids, max_new_tokens=30, stop_ids=(END,), **kinds[n // 2]) for n, ids in enumerate(prompts)]


@pytest.mark.parametrize("drafter", ["chain", "eagle3", "dspark", "ngram"])
def test_tokens_and_scores_do_not_depend_on_drafts_or_on_scheduling(family: Path, drafter: str) -> None:
    runner, requests = some_graphs(family, drafter, max_len=LENGTH, chunks=(128,)), _requests()
    config = engine_config(runner.bundle)
    single = Engine(runner, config, speculative=False).run(requests)
    expected = [(result.ids, result.scores) for result in single]
    drafted = Engine(runner, config).run(requests)
    assert [(result.ids, result.scores) for result in drafted] == expected
    assert [result.prompt_scores for result in drafted] == [result.prompt_scores for result in single]
    assert sum(map(sum, (result.accepted for result in drafted))) > 0
    ids, ahead = ids_ahead(AsyncEngine(runner, config), requests)
    assert ids == [ids for ids, _ in expected]
    assert ahead > 0 or drafter == "ngram"
    pool = 1 + 2 * config.batch
    outer = Outer(AsyncEngine(runner, config, owns_blocks=False), requests, pool, random.Random(2), preemption=0.1)
    assert outer.run() == ids
    assert outer.scores == [scores for _, scores in expected]
    assert outer.prompt_scores == [result.prompt_scores for result in single]
    assert min(outer.hits, outer.preempted) > 0


def test_a_draft_that_is_the_target_has_every_draft_accepted_after_shared_blocks_and_preemption(family: Path) -> None:
    """A row of its cache that is wrong or missing would show."""
    runner = some_graphs(family, "itself", max_len=LENGTH, chunks=(128,))
    requests = [Request(r.ids, Params(0.8, seed=n), 30) for n, r in enumerate(_requests())]
    outer = Outer(AsyncEngine(runner, engine_config(runner.bundle), owns_blocks=False), requests, 7, random.Random(4))
    outer.run()
    assert min(outer.hits, outer.preempted) > 0
    assert outer.accepted == outer.drafted > 100
