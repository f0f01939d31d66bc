"""Faults of a DFlash draft that no test of ids can see, each planted in the demo's: fewer drafts are accepted."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.demo import prompts, request
from bench.eager import Eager
from demo.dflash import BLOCK
from demo.dflash import load_draft as trained_draft
from demo.drafter import target_pass
from demo.models import load
from model.drafters.dflash import DFlash
from model.scores import TOP
from model.serving.engine import Engine
from model.serving.request import Params, Shape
from model.speculative import Pair
from model.window import Window
from tests.model.drafted import steps
from tests.model.test_dflash import pair_of

LENGTH, BATCH, TOKENS, K = 128, 8, 24, 7
DRAFTS = ("draft_dflash", "draft_dspark")


def _config(drafter: DFlash, **changes: Any) -> None:
    drafter.model.config = replace(drafter.model.config, **changes)


def _rows_off_by_one(pair: Pair, drafter: DFlash) -> None:
    _config(drafter, shifted=not drafter.model.config.shifted)


def _layers_off_by_one(pair: Pair, drafter: DFlash) -> None:
    pair.target_model.taps = tuple(tap - 1 for tap in drafter.taps)


def _stale_context(pair: Pair, drafter: DFlash) -> None:
    drafter.keep = lambda verified, state: state  # type: ignore[method-assign]


def _noise_of_the_next_position(pair: Pair, drafter: DFlash) -> None:
    draw = drafter.draw

    def wrong(ops: Any, asked: Any, window: Window, of_target: Any, shard: Any) -> Any:
        placement = window.placement
        later = window._replace(placement=placement._replace(positions_BN=placement.positions_BN + 1))
        of_later = drafter.model.kernels.prepare(ops, asked, later.drawn_BN, shard)
        return draw(ops, asked, later, of_later, shard)

    drafter.draw = wrong  # type: ignore[method-assign]


Fault = Callable[[Pair, DFlash], None]
# a fault, and the share of tokens a step that it leaves at most; states of neighbouring layers are much alike
FAULTS: dict[Fault, float] = {
    _rows_off_by_one: 0.9, _layers_off_by_one: 0.97, _stale_context: 0.9, _noise_of_the_next_position: 0.9
}  # fmt: skip


@functools.cache
def tokens_a_step(draft: str, fault: Fault | None) -> float:
    """Of the demo's prompts at temperature 0.6."""
    pair = pair_of(Path("demo/target"), Path("demo") / draft)
    drafter = pair.drafter
    assert isinstance(drafter, DFlash)
    if fault:
        fault(pair, drafter)
    engine = Engine(Eager(pair, (), BATCH, LENGTH), Shape((K,), BATCH, LENGTH, (LENGTH,), 2048))
    results = engine.run(request(p, Params(0.6, top_p=0.95, seed=n), TOKENS) for n, p in enumerate(prompts(2)))
    return sum(len(r.ids) - 1 for r in results) / sum(r.steps for r in results)


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__.removeprefix("_"))
@torch.no_grad()
def test_a_planted_fault_is_seen_in_acceptance(draft: str, fault: Fault) -> None:
    assert tokens_a_step(draft, fault) < FAULTS[fault] * tokens_a_step(draft, None)


@pytest.mark.parametrize(("name", "k"), [("draft_dflash", 15), ("draft_dspark", 7)])
@torch.no_grad()
def test_drafts_of_the_demo_are_those_that_it_was_trained_for(name: str, k: int) -> None:
    """The blocks of a training pass are the blocks of inference, whose walk knows a row's best ids."""
    target, draft = Path("demo/target"), Path("demo") / name
    theirs, _ = load(target)
    trained = trained_draft(draft, theirs)
    for step in steps(pair_of(target, draft), (), k, 3):
        for drafted in step:
            ids = drafted.known + drafted.drafts + [0] * BLOCK
            seen, anchors = target_pass(theirs, torch.tensor([ids])), torch.tensor([len(drafted.known) - 1, 1])
            logits = trained.block_logits(seen, anchors, k + trained.idle)
            assert torch.allclose(drafted.logits, logits[0, 0], atol=1e-3, rtol=0)
            candidates_kC = drafted.logits.topk(TOP).indices
            biased_kC = trained.biased(logits, seen.ids_BS, anchors)[0, 0].gather(1, candidates_kC)
            assert drafted.drafts == candidates_kC.gather(1, biased_kC.argmax(-1, keepdim=True))[:, 0].tolist()
