"""Structured output: limits of ids become masks, masks bound drafts, and no other row changes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from model.errors import UserError
from model.ops import EAGER
from model.sampling import sample
from tests.model.family import V, eager_engine
from tests.model.test_asks import PARAMS, some, words
from tests.model.test_sampling import _params, law_of_filter
from trnspec.engine.masks import ConstrainedDraft, allows, mask_fn, mask_of
from trnspec.engine.request import MaskFn, Params, Request, Score

MIXES = [(0.7, 0, 1.0, 0.0), (1.0, 3, 1.0, 0.0), (1.3, 0, 0.6, 0.0), (0.9, 0, 1.0, 0.2), (1.1, 4, 0.8, 0.05)]


@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_a_masked_sample_has_the_target_s_law_over_what_is_allowed(mix: tuple[float, int, float, float]) -> None:
    """Over a grid of noise, point by point: the argmax of the masked, then filtered law, as vLLM orders them.

    The control filters before it masks, which is a different law for every mix that filters.
    """
    count, points, size = 12, 400, 7
    different = 0
    for seed in range(count):
        rng = np.random.default_rng(seed)
        logits, allowed = rng.normal(0, 1.5, size), np.array(some(size, seed, 0.5))
        law, late = np.zeros(size), np.where(allowed, law_of_filter(logits, *mix), 0)
        law[allowed] = law_of_filter(logits[allowed], *mix)
        grid = torch.quasirandom.SobolEngine(size, scramble=True, seed=seed).draw(points, dtype=torch.float64)
        noise = -np.log(-np.log(grid.clamp(1e-9, 1 - 1e-9).numpy()))
        logits_RV = torch.from_numpy(np.where(allowed, logits, -np.inf)).float().expand(points, -1)
        sampled = sample(EAGER, logits_RV, _params(points, *mix), torch.from_numpy(noise).float()).numpy()
        with np.errstate(divide="ignore"):
            best, of_late = ((np.log(of) + noise) for of in (law, late))
        sure = np.diff(np.sort(best, 1)[:, -2:])[:, 0] > 1e-4
        assert sure.mean() > 0.99
        assert (sampled[sure] == best.argmax(1)[sure]).all()
        assert np.abs(np.bincount(sampled, minlength=size) / points - law).max() < 0.06
        different += bool((sampled != of_late.argmax(1)).any())
    assert (different > 0) == (mix[1:] != (0, 1.0, 0.0))


def _by(seed: int, told: list[tuple[int, ...]] | None = None) -> MaskFn:
    """Masks that depend on all ids so far, as a grammar's do."""

    def allowed(ids: Sequence[int]) -> np.ndarray:
        if told is not None:
            told.append(tuple(ids))
        return words(some(V, hash((seed, *ids)) & 0xFFFF))

    return allowed


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled", "filtered"])
def test_masked_rows_obey_and_their_neighbours_do_not_notice(family: Path, params: Params) -> None:
    free = [Request((9, 2, 7), params, 40), Request((1,), Params(0.8, seed=8), 25)]
    engine, target = eager_engine(family, k=3), eager_engine(family, "chain", False, k=3)
    told: list[tuple[int, ...]] = []
    masked = engine.run([free[0], Request((4, 4), params, 20, allowed=_by(1, told)), free[1]])
    ids = masked[1].ids
    assert [masked[0].ids, masked[2].ids] == [r.ids for r in target.run(free)]
    # the masks were called with all ids before each id, and with drafts that were rejected
    assert {tuple(ids[:n]) for n in range(20)} < {*told}
    assert all(some(V, hash((1, *ids[:n])) & 0xFFFF)[ids[n]] for n in range(20))
    assert sum(masked[0].accepted) > 0, "the neighbours go on speculating"
    # the control: without its mask it would have gone elsewhere
    unbound = engine.run([Request((4, 4), params, 20)])[0].ids
    assert not all(some(V, hash((1, *unbound[:n])) & 0xFFFF)[unbound[n]] for n in range(20))


def test_masks_of_all_ids_and_of_one(family: Path) -> None:
    engine, everything, forced = eager_engine(family, k=3), words([True] * V), words([i == 11 for i in range(V)])
    for params in PARAMS:
        plain, masked = engine.run([Request((9, 2, 7), params, 20, allowed=a) for a in (None, lambda ids: everything)])
        assert plain.ids == masked.ids
    (result,) = engine.run([Request((3,), PARAMS[1], 5, allowed=lambda _: forced, logprobs=0)])
    assert (result.ids, result.scores) == ([11] * 5, [Score(0.0, 1)] * 5), "log-probabilities are among the allowed ids"


def test_no_step_accepts_what_its_mask_forbids(family: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a walk that follows every draft, and so knows wrong masks, changes what is emitted."""
    requests = [Request((9, 2, n), PARAMS[n % 3], 30, allowed=_by(n)) for n in range(6)]
    expected = [r.ids for r in eager_engine(family, "chain", False, k=3).run(requests)]

    def all_follow(self: ConstrainedDraft, drafts: Sequence[int]) -> None:
        self.drafts, self.masks = list(drafts), self.masks[:1] * (1 + len(drafts))

    monkeypatch.setattr(ConstrainedDraft, "propose", all_follow)
    assert [r.ids for r in eager_engine(family, k=3).run(requests)] != expected


def test_limits_of_ids_become_masks() -> None:
    def ids(ids: Sequence[int], params: Params, **more: object) -> set[int]:
        allowed = mask_fn(Request((1,), params, **more), 40)  # type: ignore[arg-type]
        assert allowed is not None
        mask = allowed(ids)
        assert mask is not None
        return {i for i in range(64) if mask[i // 32] >> i % 32 & 1}

    every = set(range(40))
    assert mask_fn(Request((1,), Params(presence_penalty=1.0)), 40) is None
    assert ids([], Params(allowed_token_ids=(3, 39))) == {3, 39}
    bad = Params(bad_words=((5,), (7, 8), (7, 8, 9)))
    assert [ids(before, bad) for before in ([], [7], [7, 8], [8])] == [
        every - {5},
        every - {5, 8},
        every - {5, 9},
        every - {5},
    ]
    late = Params(min_tokens=2)
    assert [ids([1] * n, late, stop_ids=(4,)) for n in range(3)] == [every - {4}, every - {4}, every]
    assert ids([], late, stop_ids=(4,), ends=(6,)) == every - {6}
    # a grammar that allows only an end leaves no id: the request ends with an error
    end = mask_of((4,), 40)
    assert ids([], late, stop_ids=(4,), allowed=lambda ids: end) == set()
    assert mask_fn(Request((1,), late, stop_ids=(4,), allowed=lambda ids: None), 40)([]) is None  # type: ignore[misc]


def _walk(masks: dict[tuple[int, ...], set[int]], most: int = 3) -> ConstrainedDraft:
    """A walk from no ids on, whose grammar ends where it has no set."""
    held = {ids: words([i in allowed for i in range(V)]) for ids, allowed in masks.items()}
    return ConstrainedDraft(lambda ids: held.get(tuple(ids)), (), most, 2)


def test_a_walk_follows_drafts_to_the_first_that_is_refused() -> None:
    walk = _walk({(): {1, 2}, (1,): {3, 40}, (1, 40): {5, 6}, (1, 40, 5): {8, 9}, (2,): {4, 5}})
    for drafts, followed in (([1, 40, 5, 8], 3), ([1, 40, 9], 2), ([9, 40, 5], 0), ([], 0), ([1, 3], 1)):
        walk.propose(drafts)
        assert (walk.drafts, len(walk.masks)) == (drafts[:followed], followed + 1)
    walk.propose([2, 4])
    assert walk.drafts == [2], "the text ends with 2 4"


def test_a_walk_knows_what_is_forced_before_any_draft() -> None:
    walk = _walk({(): {33}, (33,): {0}, (33, 0): {5, 6}, (33, 0, 5): {7}})
    assert walk.drafts == [33, 0]
    walk.propose([33, 0, 5])
    assert walk.drafts == [33, 0, 5]
    assert _walk({(): {33}, (33,): {63}}).drafts == [33], "the draft that ends a text is the target's to sample"
    assert _walk({(): {33}, (33,): {0}, (33, 0): {1}}, most=1).drafts == [33]


def test_bits_and_masks_that_are_none() -> None:
    mask = words([i in (0, 31, 32, 63) for i in range(V)])
    assert [i for i in range(V) if allows(mask, i)] == [0, 31, 32, 63]
    for wrong in (None, np.ones(3, np.int32), np.ones(2, np.int64)):
        with pytest.raises(UserError, match="it must have 2 int32 words"):
            ConstrainedDraft(lambda ids, wrong=wrong: wrong, (), 0, 2)
