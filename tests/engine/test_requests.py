"""Which requests a bundle can serve; their masks; the drafts that masks allow."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from model.errors import UserError
from model.logits_processors import MAX_BIASES
from tests.engine.machine import CONFIG, V
from trnspec.engine.masks import ConstrainedDraft, allows, mask_fn, mask_of
from trnspec.engine.request import Params, Request, check

GOOD = Request((1, 2), Params(0.8, 5, 0.9, 0.1, 7, 1.0, -1.0, 1.5, {4: -3.0}, (4, 5), ((4,), (5, 6)), 3), 9, (0,), 2)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no ids": ({"ids": ()}, "the prompt is empty"),
    "an id too large": ({"ids": (5, V)}, f"the prompt holds the id {V}; this bundle's ids are 0 to {V - 1}"),
    "an id of another type": ({"ids": (5, True)}, "the prompt holds the id True"),
    "a long prompt": ({"ids": (5,) * 512}, "the prompt has 512 tokens, the largest bucket is 512"),
    "no new tokens": ({"max_new_tokens": 0}, "max-new-tokens is 0; it must be a count"),
    "a limit": ({"k_limit": 4}, "k-limit is 4; this bundle drafts 0 to 3"),
    "log-probabilities": ({"logprobs": 21}, "logprobs is 21; it must be a count of at most 20"),
    "of a prompt": ({"prompt_logprobs": -1}, "prompt-logprobs is -1"),
}
BAD_PARAMS: dict[str, tuple[dict[str, Any], str]] = {
    "temperature": ({"temperature": float("nan")}, "temperature is nan; it must be a number from 0"),
    "hot": ({"temperature": 1e31}, "temperature is 1e"),
    "infinite": ({"temperature": float("inf")}, "temperature is inf"),
    "cold": ({"temperature": -1e-9}, "temperature is -1e-09"),
    "top-k": ({"top_k": 1.0}, "top-k is 1.0; it must be 0"),
    "top-p": ({"top_p": 0}, r"top-p is 0; it must be a number in \(0, 1\]"),
    "min-p": ({"min_p": 1.1}, "min-p is 1.1"),
    "seed": ({"seed": 1 << 64}, "seed is 1844"),
    "negative seed": ({"seed": -1}, "seed is -1; it must be an integer of 64 bits"),
    "presence": ({"presence_penalty": 2.5}, "presence-penalty is 2.5"),
    "a penalty": ({"frequency_penalty": 2.5}, r"frequency-penalty is 2.5; it must be a number in \[-2, 2\]"),
    "repetition": ({"repetition_penalty": 0.0}, "repetition-penalty is 0.0"),
    "a bias": ({"logit_bias": {4: 101.0}}, "logit-bias of 4 is 101.0"),
    "many biases": ({"logit_bias": dict.fromkeys(range(MAX_BIASES + 1), 1.0)}, "logit-bias "),
    "min_tokens": ({"min_tokens": 10}, "min-tokens is 10, above max-new-tokens 9"),
    "an empty word": ({"bad_words": ((),)}, "bad-words holds an empty one"),
    "a word's id": ({"bad_words": ((4, -1),)}, "bad-words holds the id -1"),
    "an allowed id": ({"allowed_token_ids": (4, -1)}, "allowed-token-ids holds the id -1"),
    "a bias of no id": ({"logit_bias": {V: 1.0}}, f"logit-bias holds the id {V}; this bundle's ids are 0 to {V - 1}"),
    "nothing left": (
        {"allowed_token_ids": (4, 5), "bad_words": ((4,), (5,))},
        "bad-words excludes every id of allowed",
    ),
}


def test_a_request_that_uses_everything_passes() -> None:
    check(CONFIG, GOOD)


@pytest.mark.parametrize(("change", "sentence"), REFUSED.values(), ids=REFUSED)
def test_a_request_that_cannot_be_served(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        check(CONFIG, dataclasses.replace(GOOD, **change))


@pytest.mark.parametrize(("change", "sentence"), BAD_PARAMS.values(), ids=BAD_PARAMS)
def test_parameters_that_cannot_be_served(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        check(CONFIG, dataclasses.replace(GOOD, params=dataclasses.replace(GOOD.params, **change)))


def _law(params: Params, ids: Sequence[int], ends: tuple[int, ...], grammar: set[int] | None) -> set[int]:
    allowed = set(params.allowed_token_ids or range(V)) & (set(range(V)) if grammar is None else grammar)
    words = [tuple(word) for word in params.bad_words]
    allowed -= {word[-1] for word in words if len(word) == 1 or tuple(ids[-len(word) + 1 :]) == word[:-1]}
    return allowed - set(ends) if len(ids) < params.min_tokens else allowed


def _ids(mask: np.ndarray | None) -> set[int]:
    assert mask is not None
    return {token for token in range(V) if allows(mask, token)}


def test_masks_are_the_grammar_without_what_the_parameters_exclude() -> None:
    rng = random.Random(0)
    for case in range(60):
        params = Params(
            allowed_token_ids=tuple(rng.sample(range(V), 40)) if case % 2 else (),
            bad_words=tuple(tuple(rng.choices(range(6), k=rng.randint(1, 3))) for _ in range(case % 4)),
            min_tokens=case % 5,
        )
        of_grammar = set(rng.sample(range(V), 30)) if case % 3 == 0 else None
        grammar = None if of_grammar is None else lambda ids, found=of_grammar: mask_of(found, V)
        request = Request((1,), params, 9, (0, 7), allowed=grammar)
        masks = mask_fn(request, V)
        if masks is None:
            assert not params.masks
            continue
        for _ in range(20):
            ids = rng.choices(range(6), k=rng.randint(0, 7))
            assert _ids(masks(ids)) == _law(params, ids, (0, 7), of_grammar)


def test_a_mask_is_not_made_anew_where_nothing_changes() -> None:
    masks = mask_fn(Request((1,), Params(min_tokens=1, bad_words=((3, 4),))), V)
    assert masks is not None
    assert masks([5]) is masks([5, 6])
    assert masks([5]) is not masks([3])
    assert mask_fn(Request((1,), Params(min_tokens=1), allowed=lambda ids: None), V)([]) is None  # type: ignore[misc]


@pytest.mark.parametrize("mask", [None, np.ones(9, np.int32), np.ones(3, np.int64)], ids=str)
def test_a_mask_of_another_form_is_refused(mask: np.ndarray | None) -> None:
    with pytest.raises(UserError, match="it must have 3 int32 words"):
        ConstrainedDraft(lambda ids: mask, (), 3, 3)


def test_a_request_s_ends_are_what_min_tokens_excludes() -> None:
    request = Request((1,), Params(min_tokens=1), 9, (0, 7), ends=(6,))
    assert _ids(mask_fn(request, V)([])) == {*range(V)} - {6}  # type: ignore[misc]


def test_as_many_drafts_are_forced_as_the_limit_and_not_the_end_of_an_output() -> None:
    forced = {ids: mask_of(only, V) for ids, only in {(): {31}, (31,): {63}, (31, 63): {0}, (31, 63, 0): {5}}.items()}

    def walk(limit: int) -> list[int]:
        return ConstrainedDraft(lambda ids: forced.get(tuple(ids)), (), limit, 3).drafts

    assert [walk(limit) for limit in (0, 1, 3)] == [[], [31], [31, 63, 0]]
    assert walk(9) == [31, 63, 0], "the draft that ends an output is the target's to sample"


def test_drafts_are_followed_as_far_as_the_masks_allow_and_forced_where_one_id_is_left() -> None:
    allowed = {(): {1, 2}, (1,): {3, 40}, (1, 40): {5, 6}, (1, 40, 5): {8}, (2,): {9}, (2, 9): {10}, (2, 9, 10): set()}
    asked = list[tuple[int, ...]]()

    def strict(ids: Sequence[int]) -> np.ndarray | None:
        asked.append(tuple(ids))
        assert all(token in allowed[tuple(ids[:n])] for n, token in enumerate(ids)), "a matcher would have no state"
        return None if tuple(ids) == (1, 3) else mask_of(allowed[tuple(ids)], V)

    draft = ConstrainedDraft(strict, (), 3, 3)
    for drafts, followed in (
        ([1, 40, 7], [1, 40]), ([9, 40, 5], []), ([1, 3], [1]), ([1, 40, 5], [1, 40, 5]), ([-2, 1], []), ([63], []),
    ):  # fmt: skip
        draft.propose(drafts)
        assert draft.drafts == followed
        assert len(draft.masks) == len(followed) + 1
    draft.propose([2])
    draft.force()
    assert draft.drafts == [2, 9, 10], "of a single id, and none is forced by a mask without any"
    assert len(asked) == len({*asked}) or len(asked) < 30
