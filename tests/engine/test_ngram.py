"""Drafts from a request's own ids: the search against its definition, and the engine that brings them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from compile.doctor import main as doctor
from compile.spec import BuildSpec
from model.errors import UserError
from tests.model.family import graphs as graphs_of
from trnspec.engine.config import engine_config
from trnspec.engine.engine import Engine, Proposer, ngram_propose
from trnspec.engine.ngram import propose
from trnspec.engine.request import Params, Request, Result
from trnspec.runtime.xla import XlaRunner


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
        asked = (rng.randrange(1, 6), shortest, shortest + rng.randrange(4))
        assert propose(ids, *asked) == _by_definition(ids, *asked), (ids, asked)
        proposed += bool(propose(ids, *asked))
    assert 500 < proposed < 1500


def test_what_follows_the_longest_ending_is_proposed() -> None:
    assert propose([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], 2) == [9, 2], "the ending of three ids, not of two"
    assert propose([4, 5, 6, 4, 5], 7) == [6, 4, 5], "no further than the text goes"
    assert propose([1, 2, 3, 4], 2) == []


@pytest.fixture
def graphs(family: Path) -> XlaRunner:
    """A target's bundle for drafts of the host; two k."""
    return graphs_of(family, "ngram")


REQUESTS = [
    Request((5, 9, 2, 7), max_new_tokens=60),
    Request((8, 1), Params(0.9, seed=3), max_new_tokens=50),
    Request((3, 3, 4, 3, 3, 4, 3, 3), Params(1.2, top_k=9, top_p=0.8, seed=2**40), max_new_tokens=40),
]


def _run(graphs: XlaRunner, speculative: bool = True, by: Proposer = ngram_propose) -> list[Result]:
    return Engine(graphs, engine_config(graphs.bundle), speculative, propose=by).run(REQUESTS)


@pytest.mark.slow
def test_tokens_are_the_targets_whatever_the_host_proposes(graphs: XlaRunner) -> None:
    expected = _run(graphs, speculative=False)
    ids = [r.ids for r in expected]
    of = {request.ids: result.ids for request, result in zip(REQUESTS, expected, strict=True)}
    rng = random.Random(1)
    known = _run(graphs, by=lambda slot, most: of[slot.request.ids][len(slot.result.ids) :][:most])
    wild = _run(graphs, by=lambda slot, most: [rng.randrange(64) for _ in range(rng.randint(0, most))])
    looked_up = _run(graphs)
    assert [[r.ids for r in results] for results in (known, wild, looked_up)] == [ids] * 3
    assert all(r.steps == -(-(len(r.ids) - 1) // 4) for r in known), "a draft that knows the text is never refused"
    assert sum(r.steps for r in looked_up) < sum(r.steps for r in expected), "some lookups are accepted"
    assert {k for r in wild for k in r.steps_of_k} == {0, 1, 3}, "the smallest graph that holds the drafts"


def test_the_bundle_is_a_target_that_takes_drafts(graphs: XlaRunner, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = graphs.bundle
    assert (bundle.spec.drafter, bundle.spec.draft) == ("ngram", "none")
    assert not [t.name for g in bundle.graphs for t in (*g.weights, *g.state) if t.name.startswith("draft")]
    doctor([str(bundle.path)])
    assert "ngram" in capsys.readouterr().out


def test_what_does_not_go_together_is_refused(family: Path, tmp_path: Path) -> None:
    target = str(family / "target")
    for flags, why in (
        ({"drafter": "ngram", "draft": target}, "the drafter ngram has no model, and --draft was given"),
        ({"drafter": "ngram", "k": "0"}, "k is 0 and the drafter ngram"),
        ({"drafter": "none", "k": "3"}, "k is 3 and the drafter none"),
        ({"drafter": "tree"}, "drafter is 'tree'; it must be one of auto, chain"),
        ({"drafter": "parallel", "draft": target, "k": "3"}, "has None as pard_token"),
    ):
        spec = BuildSpec(**({"target": target, "tp": 1, "max_len": 128, "out": str(tmp_path / "x")} | flags))  # type: ignore[arg-type]
        with pytest.raises(UserError, match=why):
            spec.check()
