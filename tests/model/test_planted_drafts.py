"""Faults of a DFlash draft that no test of ids can see, each planted in the demo's: in acceptance, or in its logits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from bench.demo import prompts
from model.drafters.dflash import DFlash
from model.speculative import Pair
from model.window import Window
from tests.eager_graphs import Eager
from tests.model.drafted import steps
from tests.model.test_dflash import Plain, pair_of
from trnspec.engine.engine import Engine
from trnspec.engine.request import Params, Request, Shape

LENGTH, BATCH, TOKENS, K = 128, 8, 24, 7
DRAFTS = ("draft_dflash", "draft_dspark")


def _config(drafter: DFlash, **changes: Any) -> None:
    drafter.model.config = replace(drafter.model.config, **changes)


def _rows_off_by_one(pair: Pair, drafter: DFlash) -> None:
    _config(drafter, shifted=not drafter.model.config.shifted)


def _layers_off_by_one(pair: Pair, drafter: DFlash) -> None:
    pair.target_model.taps = tuple(tap - 1 for tap in drafter.taps)


def _causal(pair: Pair, drafter: DFlash) -> None:
    _config(drafter, causal=True)


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
# what cuts acceptance by a tenth and more on the demo pair
SEEN: list[Fault] = [_rows_off_by_one, _stale_context, _noise_of_the_next_position]
# what costs it 0 to 4 %, as states of neighbouring layers are much alike and masks tell a row little: seen in logits
NEARLY: list[Fault] = [_layers_off_by_one, _causal]


@functools.cache
def tokens_a_step(draft: str, fault: Fault | None) -> float:
    """Of the demo's prompts at temperature 0.6."""
    pair, pool = pair_of(Path("demo/target"), Path("demo") / draft, LENGTH), 1 + BATCH
    drafter = pair.drafter
    assert isinstance(drafter, DFlash)
    if fault:
        fault(pair, drafter)
    engine = Engine(Eager(pair, (), pool), Shape((K,), BATCH, LENGTH, (LENGTH,), 2048, pool))
    encode = Tokenizer.from_file("demo/target/tokenizer.json").encode
    asked = ((tuple(encode(p.text).ids), Params(0.6, top_p=0.95, seed=n)) for n, p in enumerate(prompts(2)))
    results = engine.run(Request(*one, TOKENS, pair.target_model.config.eos_token_ids) for one in asked)
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
def test_drafts_of_the_demo_are_those_of_the_formulas(name: str, k: int, fault: Fault | None) -> None:
    """Of trained weights and the demo's shapes."""
    folder, farthest = Path("demo"), 0.0
    theirs = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    plain, pair = Plain(folder, name), pair_of(folder / "target", folder / name)
    assert isinstance(pair.drafter, DFlash)
    if fault:
        fault(pair, pair.drafter)
    for step in steps(pair, (), k, 3):
        for drafted in step:
            states = theirs(torch.tensor([drafted.known[:-1]]), output_hidden_states=True).hidden_states
            logits = plain.logits(drafted.known, k, [state[0] for state in states])
            farthest = max(farthest, float((drafted.logits - logits).abs().max()))
            assert fault or drafted.drafts == plain.drafts(drafted.known[-1], drafted.logits)
    assert farthest > 0.1 if fault else farthest < 1e-3
