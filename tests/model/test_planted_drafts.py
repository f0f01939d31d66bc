"""Faults of a DFlash draft that change the acceptance rate only, planted in the demo's drafts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from bench.demo import prompts
from model.drafters.dflash import DFlash
from tests.model.drafted import LENGTH, graphs_of
from trnspec.engine.config import EngineConfig
from trnspec.engine.engine import Engine
from trnspec.engine.request import Params, Request

BATCH, TOKENS, K = 8, 16, 7
DRAFTS = ("draft_dflash", "draft_dspark")


def _rows_off_by_one(drafter: DFlash) -> None:
    config = drafter.model.config
    drafter.model.config = replace(config, shifted=not config.shifted)


def _stale_context(drafter: DFlash) -> None:
    drafter.update = lambda result, state: state  # type: ignore[method-assign]


def _noise_of_the_next_position(drafter: DFlash) -> None:
    propose = drafter.propose

    def wrong(rows: Any, ids: Any, params: Any, noise_BNV: Any, state: Any) -> Any:
        noise_BNV = drafter.model.noise(params.seed_R2, rows.sample_positions_BN + 1)
        return propose(rows, ids, params, noise_BNV, state)

    drafter.propose = wrong  # type: ignore[method-assign]


Fault = Callable[[Any], None]
FAULTS: list[Fault] = [_rows_off_by_one, _stale_context, _noise_of_the_next_position]


@functools.cache
def tokens_per_step(draft: str, fault: Fault | None) -> float:
    """Mean tokens per step on the demo's prompts at temperature 0.6."""
    graphs = graphs_of(Path("demo/target"), Path("demo") / draft, (K,), BATCH)
    if fault:
        fault(graphs.pair.drafter)
    config = EngineConfig((K,), BATCH, LENGTH, (LENGTH,), 2048, 1 + BATCH, ((LENGTH, LENGTH),))
    texts = Tokenizer.from_file("demo/target/tokenizer.json").encode_batch([p.text for p in prompts(3)])
    requests = (Request(tuple(t.ids), Params(0.6, top_p=0.95, seed=n), TOKENS) for n, t in enumerate(texts))
    results = Engine(graphs, config).run(requests)
    return sum(len(r.ids) - 1 for r in results) / sum(r.steps for r in results)


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__[1:])
@torch.no_grad()
def test_a_planted_fault_is_seen_in_acceptance(draft: str, fault: Fault) -> None:
    assert tokens_per_step(draft, fault) < 0.9 * tokens_per_step(draft, None)
