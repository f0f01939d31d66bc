"""Drafts from a request's ids: the search against its definition."""

from __future__ import annotations

import random

from trnspec.engine.ngram import propose
from trnspec.engine.request import Request, Result
from trnspec.engine.slots import Slot


def _by_definition(ids: list[int], k: int, shortest: int, longest: int) -> list[int]:
    for count in range(min(longest, len(ids) - 1), shortest - 1, -1):
        for end in range(count, len(ids)):
            if ids[end - count : end] == ids[len(ids) - count :]:
                return ids[end : end + k]
    return []


def test_the_search_is_its_definition() -> None:
    rng = random.Random(3)
    proposed = 0
    for _ in range(2000):
        vocabulary, shortest = rng.choice([2, 3, 6]), rng.randrange(1, 4)
        ids = [rng.randrange(vocabulary) for _ in range(rng.randrange(14))]
        options = (rng.randrange(1, 6), shortest, shortest + rng.randrange(4))
        assert propose(ids, *options) == _by_definition(ids, *options), (ids, options)
        proposed += bool(propose(ids, *options))
    assert 500 < proposed < 1500


def test_drafts_come_from_the_prompt_and_the_new_tokens() -> None:
    slot = Slot(0, 0, Request((1, 2, 3, 9, 2)), result=Result(ids=[3]))
    assert [propose(slot.ids, limit) for limit in (0, 2, 7)] == [[], [9, 2], [9, 2, 3]]
