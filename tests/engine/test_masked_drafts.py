"""Drafts under masks: the ids of one token a step and of an oracle for every drafter; how a walk calls a grammar."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from model.errors import UserError
from model.filters import Filters
from model.graph_key import PROMPTS, GraphKey, Stage
from model.ops import EAGER
from model.sampling import Sampling, coupled_sample
from tests.engine.ahead import Watched
from tests.model.family import V, graphs
from tests.model.test_masks import PARAMS, only, some, words
from trnspec.engine.config import engine_config
from trnspec.engine.engine import Engine, Proposer
from trnspec.engine.masks import Walk, allows
from trnspec.engine.request import Params, Request, Result
from trnspec.engine.slots import Slot
from trnspec.runtime.xla import XlaRunner

DRAFTERS = ("chain", "parallel", "ngram", "eagle3")
END = 7


def _run(
    loaded: XlaRunner, requests: Sequence[Request], speculative: bool = True, propose: Proposer | None = None
) -> list[Result]:
    return Engine(loaded, engine_config(loaded.bundle), speculative, propose=propose).run(requests)


def _mostly(requests: Sequence[Request], results: Sequence[Result]) -> Proposer:
    """A host's drafts: a request's own text, of which every fifth id is a different one."""
    texts = {(r.ids, r.params): result.ids for r, result in zip(requests, results, strict=True)}

    def propose(slot: Slot, most: int) -> list[int]:
        text, at = texts.get((slot.request.ids, slot.request.params), []), len(slot.result.ids)
        return [(token + (n % 5 == 4)) % V for n, token in enumerate(text[at : at + most], at)]

    return propose


def _allowed(seed: int, ids: Sequence[int], share: float = 0.6) -> list[bool]:
    return some(V, hash((seed, *ids)) & 0xFFFF, share)


def _by(seed: int, share: float = 0.6) -> Callable[[Sequence[int]], np.ndarray | None]:
    """Masks that depend on all ids so far; the text ends with an END."""
    return lambda ids: None if ids and ids[-1] == END else words(_allowed(seed, ids, share))


def _oracle(theirs: Qwen3ForCausalLM, request: Request, seed: int) -> list[int]:
    """transformers' logits and the law of a masked draw, one id after the other."""
    p, ids = request.params, list[int]()
    filters = Filters(torch.tensor([float(p.top_k)]), torch.tensor([p.top_p]), torch.tensor([p.min_p]))
    sampling = Sampling(torch.tensor([p.temperature]), torch.tensor([p.seed_words], dtype=torch.int32), filters)
    while len(ids) < request.max_new_tokens and ids[-1:] != [END]:
        with torch.no_grad():
            logits_1V = theirs(torch.tensor([[*request.ids, *ids]])).logits[:, -1]
        draw = sampling.draw(torch.tensor([[len(request.ids) + len(ids)]], dtype=torch.int32))
        allowed_1V = torch.tensor([_allowed(seed, ids)])
        ids.append(int(coupled_sample(EAGER, logits_1V, draw._replace(asked=only(allowed_1V)))))
    return ids


REQUESTS = [
    Request(prompt, params, 24, (END,), allowed=_by(seed))
    for seed, (prompt, params) in enumerate(itertools.product([(9, 2, 7), (3, 1, 3, 1, 3, 1)], PARAMS))
]


@pytest.fixture(scope="module")
def oracle(family: Path) -> list[list[int]]:
    """The ids of REQUESTS."""
    theirs = Qwen3ForCausalLM.from_pretrained(family / "target", dtype=torch.float32)
    return [_oracle(theirs, request, seed) for seed, request in enumerate(REQUESTS)]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_ids_are_those_of_one_token_a_step_and_of_an_oracle(
    family: Path, oracle: list[list[int]], drafter: str
) -> None:
    """Greedy, drawn and filtered, alone and beside neighbours with and without masks, with every limit of drafts."""
    loaded, requests = graphs(family, drafter), REQUESTS
    alone = _run(loaded, requests, speculative=False)
    assert [r.ids for r in alone] == oracle
    assert {r.reason for r in alone} == {"eos", "length"}
    propose = _mostly(requests, alone) if drafter == "ngram" else None
    drafted = [_run(loaded, [request], propose=propose)[0] for request in requests]
    for results in (drafted, _run(loaded, requests, propose=propose)):
        assert [(r.ids, r.reason) for r in results] == [(r.ids, r.reason) for r in alone]
        assert 0 < sum(sum(r.accepted) for r in results) < sum(sum(r.drafted) for r in results)
    free = [Request((5, 6), Params(0.8, seed=n), 24, logprobs=n or None) for n in range(2)]
    limited = [Request(**{**vars(r), "k_limit": n % 4}) for n, r in enumerate(requests)]
    mixed = [r for pair in zip(limited, (free * len(limited))[: len(limited)], strict=True) for r in pair]
    results = _run(loaded, mixed, propose=propose)
    assert [r.ids for r in results[::2]] == [r.ids for r in alone]
    assert [r.ids for r in results[1:5:2]] == [r.ids for r in _run(loaded, free, speculative=False)]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_text_that_masks_force_takes_every_draft(family: Path, drafter: str) -> None:
    text = [(11 * n) % 50 + 8 for n in range(21)]

    def allowed(ids: Sequence[int]) -> np.ndarray:
        return words([i == text[len(ids) % 21] for i in range(V)])

    (result,) = _run(graphs(family, drafter), [Request((3, 4), PARAMS[1], 21, allowed=allowed)])
    # the prompt's graph draws the first, five steps four each
    assert (result.ids, result.steps, result.accepted) == (text, 5, [5, 5, 5])


def test_no_step_accepts_what_its_mask_forbids(family: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a walk that follows every draft, and so knows wrong masks, changes what is emitted."""
    loaded = graphs(family, "chain")
    requests = [Request((9, 2, n), PARAMS[n % 3], 30, (END,), allowed=_by(n, 0.3)) for n in range(6)]
    expected = [r.ids for r in _run(loaded, requests, speculative=False)]

    def all_follow(self: Walk, drafts: Sequence[int]) -> None:
        self.drafts, self.masks = list(drafts), self.masks[:1] * (1 + len(drafts))

    monkeypatch.setattr(Walk, "along", all_follow)
    assert [r.ids for r in _run(loaded, requests)] != expected


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_halves_emit_and_accept_what_the_fused_step_does(family: Path, drafter: str) -> None:
    """With log-probabilities, which need asking graphs, and without: steps, drafts offered and kept, reasons."""
    loaded = graphs(family, drafter)
    prompts = [(9, 2, 7), (4,), (1, 2, 3, 1, 2, 3, 1, 2)]
    requests = [Request(prompt, params, 20) for prompt in prompts for params in PARAMS]
    # one that meets the context's end, and limits that make steps of the smaller k
    requests += [Request(tuple(range(1, 60)) * 2, PARAMS[1], 30), Request((8, 8), PARAMS[1], 20, k_limit=1)]
    found, stages = [], []
    for logprobs in (None, 0):
        watched = Watched(loaded)
        scored = [dataclasses.replace(request, logprobs=logprobs) for request in requests]
        results = Engine(watched, engine_config(loaded.bundle)).run(scored)
        # an asking step of fewer drafts than the bundle's largest k runs the graph of that k
        found.append([dataclasses.replace(result, scores=[], steps_of_k={}) for result in results])
        stages.append({key.stage for key in watched.keys} - {*PROMPTS})
    fused, halves = found
    assert halves == fused
    assert [r.ids for r in fused] == [r.ids for r in _run(loaded, requests, speculative=False)]
    assert 0 < sum(sum(r.accepted) for r in halves) < sum(sum(r.drafted) for r in halves)
    assert stages[0] == {Stage.STEP}
    assert drafter == "ngram" or {Stage.DRAFT, Stage.VERIFY} <= stages[1]


def test_each_half_holds_what_it_reads(family: Path) -> None:
    by_key = graphs(family, "parallel").bundle.plan.by_key
    draft, verify = (by_key[GraphKey(stage, 3, 128, True, True)] for stage in (Stage.DRAFT, Stage.VERIFY))
    assert {t.name.split(".")[0] for t in draft.weights} == {"draft_model"}
    assert {t.name.split(".")[0] for t in verify.weights} == {"target_model"}
    # the drafter's memory of a step is written where the step is verified
    assert [t.name for t in verify.state if t.name.startswith("draft_model")] == ["draft_model.kept.ids"]
    assert [t.name for t in draft.outputs] == ["candidates"]
    assert {t.name: t.shape for t in verify.inputs}["input_ids"] == (3, 4)


def _walk(masks: dict[tuple[int, ...], set[int]], most: int = 3) -> Walk:
    """A walk from no ids on, whose grammar ends where it has no set."""
    held = {ids: words([i in allowed for i in range(V)]) for ids, allowed in masks.items()}
    return Walk(lambda ids: held.get(tuple(ids)), (), most, 2)


def test_a_walk_follows_drafts_to_the_first_that_is_refused() -> None:
    walk = _walk({(): {1, 2}, (1,): {3, 40}, (1, 40): {5, 6}, (1, 40, 5): {8, 9}, (2,): {4, 5}})
    for drafts, followed in (([1, 40, 5, 8], 3), ([1, 40, 9], 2), ([9, 40, 5], 0), ([], 0), ([1, 3], 1)):
        walk.along(drafts)
        assert (walk.drafts, len(walk.masks)) == (drafts[:followed], followed + 1)
    walk.along([2, 4])
    assert walk.drafts == [2], "the text ends with 2 4"


def test_a_walk_knows_what_is_forced_before_any_draft() -> None:
    walk = _walk({(): {33}, (33,): {0}, (33, 0): {5, 6}, (33, 0, 5): {7}})
    assert walk.drafts == [33, 0]
    walk.along([33, 0, 5])
    assert walk.drafts == [33, 0, 5]
    assert _walk({(): {33}, (33,): {63}}).drafts == [33], "the draft that ends a text is the target's to draw"
    assert _walk({(): {33}, (33,): {0}, (33, 0): {1}}, most=1).drafts == [33]


def test_bits_and_masks_that_are_none() -> None:
    mask = words([i in (0, 31, 32, 63) for i in range(V)])
    assert [i for i in range(V) if allows(mask, i)] == [0, 31, 32, 63]
    with pytest.raises(UserError, match="a mask is object"):
        Walk(lambda ids: None, (), 0, 2)
