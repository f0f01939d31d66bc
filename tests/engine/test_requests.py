"""Which requests a bundle can serve; their masks; the drafts that masks allow."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from model.errors import UserError
from model.logits_processors import MAX_BIASES
from tests.engine import machine
from tests.engine.machine import V
from trnspec.engine.masks import ConstrainedDraft, mask_fn, mask_of
from trnspec.engine.request import Params, Request, Result, check

# more ids than a request may bias
CONFIG = dataclasses.replace(machine.CONFIG, vocab_size=2 * MAX_BIASES)
GOOD = Request((1, 2), Params(0.8, 5, 0.9, 0.1, 7, 1.0, -1.0, 1.5, {4: -3.0}, (4, 5), ((4,), (5, 6)), 3), 9, (0,), 2)
# each passes at its limits
RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 1e30), "top_k": (0, 2**24 - 1), "top_p": (5e-324, 1.0), "min_p": (0.0, 1.0),
    "seed": (-(2**63), 2**64 - 1), "presence_penalty": (-2.0, 2.0), "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (1e-6, 1e6),
}  # fmt: skip
AT_THE_LIMITS: list[dict[str, Any]] = [
    {}, {"ids": (5,) * 511}, {"ids": (0, 2 * MAX_BIASES - 1)}, {"k_limit": 0}, {"k_limit": 3}, {"logprobs": 0},
    {"logprobs": 20}, {"prompt_logprobs": 20}, {"min_tokens": 9}, {"logit_bias": {4: -100, 5: 100.0}},
    {"logit_bias": dict.fromkeys(range(MAX_BIASES), 1.0)}, {"bad_words": ((4,), (5, 6), (6,))},
]  # fmt: skip
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no ids": ({"ids": ()}, "the prompt is empty"),
    "an id too large": ({"ids": (5, 1024)}, "the prompt holds the id 1024; this bundle's ids are 0 to 1023"),
    "an id of another type": ({"ids": (5, True)}, "the prompt holds the id True"),
    "a long prompt": ({"ids": (5,) * 512}, "the prompt has 512 tokens, the largest bucket is 512"),
    "no new tokens": ({"max_new_tokens": 0}, "max-new-tokens is 0; it must be a count"),
    "a limit": ({"k_limit": 4}, "k-limit is 4; this bundle drafts 0 to 3"),
    "log-probabilities": ({"logprobs": 21}, "logprobs is 21; it must be a count of at most 20"),
    "of a prompt": ({"prompt_logprobs": -1}, "prompt-logprobs is -1"),
    "a bias": ({"logit_bias": {4: 101.0}}, "logit-bias of 4 is 101.0"),
    "a bias of no id": ({"logit_bias": {1024: 1.0}}, "logit-bias holds the id 1024"),
    "many biases": (
        {"logit_bias": dict.fromkeys(range(MAX_BIASES + 1), 1.0)},
        f"logit-bias has {MAX_BIASES + 1} ids; it may have {MAX_BIASES}",
    ),
    "an allowed id": ({"allowed_token_ids": (4, -1)}, "allowed-token-ids holds the id -1"),
    "min_tokens": ({"min_tokens": 10}, "min-tokens is 10, above max-new-tokens 9"),
    "an empty word": ({"bad_words": ((),)}, "bad-words holds an empty one"),
    "a word's id": ({"bad_words": ((4, -1),)}, "bad-words holds the id -1"),
    "only ends": ({"allowed_token_ids": (0,)}, "min-tokens excludes every id of allowed"),
    "nothing left": ({"bad_words": ((4,), (5,))}, "bad-words or min-tokens excludes every id of allowed"),
}


def _changed(change: dict[str, Any]) -> Request:
    """GOOD with a field of its own, or one of its parameters', changed."""
    if all(hasattr(GOOD, name) for name in change):
        return dataclasses.replace(GOOD, **change)
    return dataclasses.replace(GOOD, params=dataclasses.replace(GOOD.params, **change))


@pytest.mark.parametrize("change", AT_THE_LIMITS, ids=lambda change: str(change)[:30])
def test_a_request_at_the_limits_passes(change: dict[str, Any]) -> None:
    check(CONFIG, _changed(change))


@pytest.mark.parametrize(("change", "sentence"), REFUSED.values(), ids=REFUSED)
def test_a_request_that_cannot_be_served(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        check(CONFIG, _changed(change))


@pytest.mark.parametrize("more", [{"logprobs": 0}, {"prompt_logprobs": 0}, {"params": Params(0.8, top_k=5)}], ids=str)
def test_a_greedy_bundle_serves_no_filters_and_no_logits_processors(more: dict[str, Any]) -> None:
    config, plain = dataclasses.replace(CONFIG, greedy=True), Request((1, 2), Params(0.8, seed=3))
    check(config, plain)
    with pytest.raises(UserError, match="this bundle has greedy graphs: no top-k, top-p, min-p, penalties, masks"):
        check(config, dataclasses.replace(plain, **more))


def test_what_temperature_and_filters_cannot_say_needs_full_sampling() -> None:
    assert not Params(0.9, 5, 0.9, 0.1, 3).full_sampling
    for change in (
        {"logit_bias": {1: 1.0}}, {"min_tokens": 1}, {"bad_words": ((1,),)}, {"allowed_token_ids": (1,)},
        {"presence_penalty": 0.5}, {"frequency_penalty": 0.5}, {"repetition_penalty": 1.1},
    ):  # fmt: skip
        assert Params(**change).full_sampling, change


def test_a_seed_counts_modulo_its_64_bits() -> None:
    assert Params(seed=-3).seed_words == Params(seed=2**64 - 3).seed_words == (2**32 - 3, 2**32 - 1)


@pytest.mark.parametrize("name", RANGES)
def test_a_parameter_has_its_range(name: str) -> None:
    for value in RANGES[name]:
        check(CONFIG, _changed({name: value}))
    lowest, highest = RANGES[name]
    integer = isinstance(lowest, int)
    below, above = (lowest - 1, highest + 1) if integer else map(math.nextafter, RANGES[name], (-math.inf, math.inf))
    for value in (below, above, math.nan, True, "1", *((1.0,) if integer else ())):
        with pytest.raises(UserError, match=rf"^{name.replace('_', '-')} is .*; it must be "):
            check(CONFIG, _changed({name: value}))


def test_drafts_are_counted_by_their_place_in_a_step() -> None:
    result = Result()
    result.count(3, 1)
    result.count(2, 2)
    assert (result.drafted, result.accepted, result.steps) == ([2, 2, 1], [2, 1, 0], 2)


def test_a_mask_is_not_made_anew_where_nothing_changes() -> None:
    masks = mask_fn(Request((1,), Params(min_tokens=1, bad_words=((3, 4),))), V)
    assert masks is not None
    assert masks([5]) is masks([5, 6])
    assert masks([5]) is not masks([3])
    assert mask_fn(Request((1,), Params(min_tokens=1), allowed=lambda ids: None), V)([]) is None  # type: ignore[misc]


@pytest.mark.parametrize("mask", [np.ones(9, np.int32), np.ones(3, np.int64)])
def test_a_mask_of_another_form_is_refused(mask: np.ndarray) -> None:
    with pytest.raises(UserError, match="it must have 3 int32 words"):
        ConstrainedDraft(lambda ids: mask, (), 3, 3)


def test_drafts_are_followed_as_far_as_the_masks_allow_and_forced_where_one_id_is_left() -> None:
    allowed = {(): {1, 2}, (1,): {3, 40}, (1, 40): {5, 6}, (1, 40, 5): {8}, (2,): {9}, (2, 9): {63}, (2, 9, 63): set()}

    def strict(ids: Sequence[int]) -> np.ndarray | None:
        assert all(token in allowed[tuple(ids[:n])] for n, token in enumerate(ids)), "a matcher would have no state"
        return None if tuple(ids) == (1, 3) else mask_of(allowed[tuple(ids)], V)

    draft = ConstrainedDraft(strict, (), 3, 3)
    for drafts, followed in (
        ([1, 40, 7], [1, 40]), ([9, 40, 5], []), ([1, 3], [1]), ([1, 40, 5], [1, 40, 5]), ([-2, 1], []), ([63], []),
        ([1, 40, 5, 8], [1, 40, 5]), ([1, 40], [1, 40]),
    ):  # fmt: skip
        draft.propose(drafts)
        assert draft.drafts == followed
        assert len(draft.masks) == len(followed) + 1
    draft.propose([2])
    draft.force()
    assert draft.drafts == [2, 9, 63], "of a single id, and none is forced by a mask without any"
