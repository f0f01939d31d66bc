"""Faults of a DFlash draft that no test of ids can see, each planted in the demo's: in acceptance, or in its logits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from demo.dflash import BLOCK
from demo.dflash import load_draft as trained_draft
from demo.drafter import target_pass
from demo.models import load

from bench.demo import prompts, request
from model.drafters.dflash import DFlash
from model.logprobs import TOP
from model.speculative import Pair
from tests.model.drafted import pair_of, steps
from trnspec.engine.eager_graphs import EagerGraphs
from trnspec.engine.engine import Engine
from trnspec.engine.request import Params, Shape

LENGTH, BATCH, TOKENS, K = 128, 8, 16, 7
DRAFTS = ("draft_dflash", "draft_dspark")


def _config(drafter: DFlash, **changes: Any) -> None:
    drafter.model.config = replace(drafter.model.config, **changes)


def _rows_off_by_one(pair: Pair, drafter: DFlash) -> None:
    _config(drafter, shifted=not drafter.model.config.shifted)


def _layers_off_by_one(pair: Pair, drafter: DFlash) -> None:
    pair.target_model.taps = drafter.taps = tuple(tap - 1 for tap in drafter.taps)


def _causal(pair: Pair, drafter: DFlash) -> None:
    _config(drafter, causal=True)


def _stale_context(pair: Pair, drafter: DFlash) -> None:
    drafter.update = lambda result, state: state  # type: ignore[method-assign]


def _noise_of_the_next_position(pair: Pair, drafter: DFlash) -> None:
    propose = drafter.propose

    def wrong(rows: Any, ids: Any, params: Any, noise_BNV: Any, state: Any) -> Any:
        noise_BNV = drafter.model.noise(params.seed_R2, rows.sample_positions_BN + 1)
        return propose(rows, ids, params, noise_BNV, state)

    drafter.propose = wrong  # type: ignore[method-assign]


Fault = Callable[[Pair, DFlash], None]
# what cuts acceptance by a tenth and more on the demo pair
SEEN: list[Fault] = [_rows_off_by_one, _stale_context, _noise_of_the_next_position]
# what costs it 0 to 4 %, as states of neighbouring layers are much alike and masks tell a row little: seen in logits
NEARLY: list[Fault] = [_layers_off_by_one, _causal]


@functools.cache
def tokens_a_step(draft: str, fault: Fault | None) -> float:
    """Of the demo's prompts at temperature 0.6."""
    pair, pool = pair_of(Path("demo/target"), Path("demo") / draft), 1 + BATCH
    drafter = pair.drafter
    assert isinstance(drafter, DFlash)
    if fault:
        fault(pair, drafter)
    engine = Engine(EagerGraphs(pair, (), pool, BATCH), Shape((K,), BATCH, LENGTH, (LENGTH,), 2048, pool))
    results = engine.run(request(p, Params(0.6, top_p=0.95, seed=n), TOKENS) for n, p in enumerate(prompts(3)))
    return sum(len(r.ids) - 1 for r in results) / sum(r.steps for r in results)


def _name(fault: Fault | None) -> str:
    return fault.__name__.removeprefix("_") if fault else "as trained"


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("fault", SEEN, ids=_name)
@torch.no_grad()
def test_a_planted_fault_is_seen_in_acceptance(draft: str, fault: Fault) -> None:
    assert tokens_a_step(draft, fault) < 0.9 * tokens_a_step(draft, None)


@pytest.mark.parametrize(("name", "k"), [("draft_dflash", 15), ("draft_dspark", 7)])
@pytest.mark.parametrize("fault", [None, *NEARLY], ids=_name)
@torch.no_grad()
def test_drafts_of_the_demo_are_those_that_it_was_trained_for(name: str, k: int, fault: Fault | None) -> None:
    """The blocks of a training pass are the blocks of inference, whose decoding knows a row's best ids."""
    target, draft = Path("demo/target"), Path("demo") / name
    theirs, _ = load(target)
    trained, pair, farthest = trained_draft(draft, theirs), pair_of(target, draft), 0.0
    assert isinstance(pair.drafter, DFlash)
    if fault:
        fault(pair, pair.drafter)
    for step in steps(pair, (), k, 2):
        for drafted in step:
            ids = drafted.known + drafted.drafts + [0] * BLOCK
            seen, anchors = target_pass(theirs, torch.tensor([ids])), torch.tensor([len(drafted.known) - 1, 1])
            logits = trained.block_logits(seen, anchors, k + trained.idle)
            farthest = max(farthest, float((drafted.logits - logits[0, 0]).abs().max()))
            biased_kV = trained.biased(logits, seen.ids_BS, anchors)[0, 0]
            # the first draft's best ids are known with the bias
            candidates_kC = torch.cat((biased_kV[:1], drafted.logits[1:])).topk(TOP).indices
            biased_kC = biased_kV.gather(1, candidates_kC)
            decoded = candidates_kC.gather(1, biased_kC.argmax(-1, keepdim=True))[:, 0].tolist()
            assert fault or drafted.drafts == decoded
    assert farthest > 0.1 if fault else farthest < 1e-3
