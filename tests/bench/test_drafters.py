"""What a drafter's step costs in the tuner, and the bench that holds every drafter's ids against the target's."""

from __future__ import annotations

from typing import Any

import pytest

from bench import drafters as bench
from bench.kernels.layer import Shard
from bench.tune import choose, passes
from bench.tune.drafters import KNOWN, Known, draft_us
from bench.tune.passes import Pass
from model.drafting import KINDS

SETUP = choose.Setup("", 32, 32, 4)


@pytest.fixture
def billed(monkeypatch: pytest.MonkeyPatch) -> list[Shard]:
    """The passes that are billed, each of 100 us of layers, 10 of a head and 1 of drawing."""
    shards: list[Shard] = []

    def simulated(shard: Shard, *_: Any) -> Pass:
        shards.append(shard)
        return Pass(60, 20, 20, 10, 1, 0)

    monkeypatch.setattr(passes, "simulated_pass", simulated)
    return shards


def _known(drafter: str, model: str, k: int) -> Known:
    return Known(drafter, model, k, 2.0, "", True, "")


def test_a_chain_is_billed_for_the_pass_that_completes_its_cache(billed: list[Shard]) -> None:
    assert draft_us(_known("chain", "1.7B", 3), SETUP, "nominal") == 3 * 111 + 100
    assert {s.candidates for s in billed} == {1}


def test_a_parallel_draft_is_billed_for_one_pass(billed: list[Shard]) -> None:
    assert draft_us(_known("parallel", "0.6B", 7), SETUP, "nominal") == 111
    assert [s.candidates for s in billed] == [14]


def test_look_up_costs_no_pass(billed: list[Shard]) -> None:
    assert draft_us(_known("ngram", "", 7), SETUP, "nominal") == 0
    assert not billed


def test_what_is_assumed_says_so() -> None:
    assert {k.drafter for k in KNOWN if not k.assumed} == {"chain"}
    assert all(k.source and 1 < k.tokens <= k.k + 1 and k.drafter in KINDS for k in KNOWN)


def test_the_bench_notices_a_different_id(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = bench.requests(4, 6)
    (alone, row) = bench.run({"ngram": ""}, 2, asked, 2)
    assert (alone["drafter"], alone["differences"], row["differences"]) == ("none", 0, 0)
    real = bench.Engine.run

    def forged(self: Any, requests: Any) -> Any:
        results = real(self, requests)
        if self.propose:
            results[1].ids[-1] ^= 1
        return results

    monkeypatch.setattr(bench.Engine, "run", forged)
    assert list(bench.run({"ngram": ""}, 2, asked, 2))[1]["different"] == [1]
