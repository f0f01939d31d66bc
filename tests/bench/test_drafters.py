"""What a drafter's step costs in the tuner, and the bench that holds every drafter's ids against the target's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import drafters as bench
from bench.kernels.layer import Shard
from bench.tune import choose, heads, passes
from bench.tune import drafters as tuned
from bench.tune.drafters import KNOWN, Known, draft_us
from bench.tune.passes import Pass
from model.drafting import KINDS
from model.serving.engine import Engine
from nkisim.timeline.trn2 import TRN2

SETUP = choose.Setup("", 32, 32, 4)


@pytest.fixture
def billed(monkeypatch: pytest.MonkeyPatch) -> list[Shard]:
    """The passes that are billed, each of 100 us of layers, 10 of a head and 1 of drawing."""
    shards: list[Shard] = []

    def simulated(shard: Shard, *_: Any, **__: Any) -> Pass:
        shards.append(shard)
        return Pass(60, 20, 20, 10, 1, 0)

    monkeypatch.setattr(passes, "simulated_pass", simulated)
    return shards


def _known(drafter: str, model: str, k: int) -> Known:
    return Known(drafter, model, k, 2.0, "", True, "")


def test_a_chain_is_billed_for_two_rows_first(billed: list[Shard]) -> None:
    assert draft_us(_known("chain", "1.7B", 3), SETUP, TRN2) == 3 * 111
    assert [s.candidates for s in billed] == [2, 1, 1]


def test_a_parallel_draft_is_billed_for_one_pass(billed: list[Shard]) -> None:
    assert draft_us(_known("parallel", "0.6B", 7), SETUP, TRN2) == 111
    assert [s.candidates for s in billed] == [14]


def test_look_up_costs_no_pass(billed: list[Shard]) -> None:
    assert draft_us(_known("ngram", "", 7), SETUP, TRN2) == 0
    assert not billed


def test_a_head_is_billed_for_a_layer_and_its_own_matrices(billed: list[Shard]) -> None:
    """A 64th of the target's layers, its ids at HBM's rate, a draw; the first pass has more rows and `fc`."""
    one = heads.eagle3_us(SETUP, TRN2, 1, first=False)
    first = heads.eagle3_us(SETUP, TRN2, 4, first=True)
    assert {s.candidates for s in billed} == {1, 8}
    assert draft_us(_known("eagle3", "head", 3), SETUP, TRN2) == pytest.approx(first + 2 * one)
    fc = passes.read_us(TRN2, 2, 3 * 5120 * 5120 * 2 / 32)
    assert fc < first - one < fc + 40
    assert 100 / 64 + 1 < one < 60


def test_medusas_heads_are_billed_for_each_matrix_once(billed: list[Shard]) -> None:
    four, seven = (draft_us(_known("medusa", "heads", k), SETUP, TRN2) for k in (4, 7))
    blocks = passes.read_us(TRN2, 2, 5120 * 5120 * 2 / 32)
    assert 3 * blocks <= seven - four < 3 * blocks + 5
    assert {s.candidates for s in billed} == {4 * 2}


def test_the_answer_is_the_largest_gain_of_each_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    def gains(known: Known, setup: choose.Setup, chip: Any) -> tuple[float, float]:
        return 1.0, known.k + (0.5 if setup.draft_tp == 8 else 0) + (90 if known.drafter == "medusa" else 0)

    monkeypatch.setattr(tuned, "gain", gains)
    found = {(r["workload"], r["evidence"], r["regime"]): r for r in tuned.answers(SETUP, (8, 32))}
    assert len(found) == 3 * 3
    assert found["MT-Bench", "with assumptions", "measured"]["drafter"] == "medusa"
    published = found["MT-Bench", "published", "by hops"]
    assert (published["assumed"], published["k"], published["draft_tp"]) == (False, 6, 8)
    assert ("edits", "published", "by hops") not in found
    assert "| MT-Bench | published | by hops | chain 1.7B | 6 | 8 | 6.50 |" in tuned.answers_as_text(
        list(found.values())
    )


def test_what_is_assumed_says_so() -> None:
    assert {k.drafter for k in KNOWN if not k.assumed} == {"chain", "eagle3"}
    assert all(k.source and 1 < k.tokens <= k.k + 1 and k.drafter in KINDS for k in KNOWN)


def test_the_requests_are_of_every_kind() -> None:
    asked = bench.requests(200, 4)
    params = [request.params for _, request in asked]
    assert {kind for kind, _ in asked} == set(bench.KINDS)
    assert {request.k_limit for _, request in asked} == {None, 0, 1}
    for values in ({p.temperature for p in params}, {p.top_k for p in params}, {p.min_p for p in params}):
        assert len(values) > 1
    assert {p.filter for p in params} == {True, False}


def test_the_bench_finds_the_one_id_that_differs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A few of the thousand requests: a tree's ids in bf16 are the target's, but for one that is forged."""
    monkeypatch.setattr(bench, "cases", lambda drafter, dtype: [bench.Case(drafter, 2, 2, dtype, "0,0,1")])
    real = Engine.run

    def forged(self: Engine, requests: Any) -> Any:
        results = real(self, requests)
        if self.speculative:
            results[1].ids[-1] ^= 1
        return results

    monkeypatch.setattr(Engine, "run", forged)
    file, flags = tmp_path / "rows.json", ["--drafters", "medusa", "--dtypes", "bf16", "--tokens", "6"]
    with pytest.raises(SystemExit):
        bench.main([*flags, "--requests", "5", "--out", str(file)])
    (row,) = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert (row["tree"], row["dtype"], row["requests"], row["different"]) == ("0,0,1", "bf16", 5, [1])
    assert "medusa bf16: 5 requests, 1 different" in capsys.readouterr().out


def test_every_drafter_shares_its_requests_between_bundles() -> None:
    for drafter in bench.MODELS:
        cases = bench.cases(drafter, "bf16")
        assert {(c.k, c.batch) for c in cases if not c.tree} == set(bench.SHAPES)
        assert any(c.tree for c in cases) == bool(KINDS[drafter].tree)
        for case in cases:
            case.spec(Path("out")).check()
