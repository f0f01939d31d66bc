"""When to speculate: decisions as a table, costs on synthetic acceptance, and the demo pair's tokens untouched."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from model.bundle.manifest import DECODE, FUSED, PREFILL
from model.errors import UserError
from model.serving.engine import Engine, SpecStep
from model.serving.record import recorder
from model.serving.request import Params, Request, Shape
from model.serving.switching import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    TRIAL,
    Belief,
    Curve,
    Decision,
    Pause,
    Table,
    decide,
    expected_tokens,
    find_table,
    first_pause,
    parse_table,
)
from tests.model.demo_bundle import PROMPTS, graphs, request, shape_of
from tests.model.synthetic_load import ALPHAS, Alpha, Synthetic, fused_cost, serve, table

K = 7
TABLE = table(K)
GOOD, BAD, NEW = Belief(K, 60, 3, 20), Belief(K, 1, 10, 20), Belief(K)
BAD_STALE, GOOD_STALE = replace(BAD, stale=True), replace(GOOD, stale=True)
ON, OFF = (K,), ()
FIRST = first_pause(TABLE, (BAD,))


@pytest.mark.parametrize(
    ("beliefs", "pause", "limits", "refresh", "after"),
    [
        pytest.param((GOOD,), Pause(), ON, (False,), Pause(), id="gains"),
        pytest.param((NEW,), Pause(), ON, (False,), Pause(), id="a new request is expected to gain"),
        pytest.param((BAD,), Pause(), OFF, (), Pause(FIRST, FIRST), id="loses: a pause begins"),
        pytest.param((BAD_STALE,), Pause(34, 34), OFF, (), Pause(33, 34), id="the pause runs"),
        pytest.param((BAD_STALE,), Pause(1, 34), ON, (True,), Pause(0, 34, TRIAL - 1), id="the pause ends: a probe"),
        pytest.param((BAD,), Pause(0, 34, 2), ON, (False,), Pause(0, 34, 1), id="the probe runs"),
        pytest.param((BAD,), Pause(0, 34), OFF, (), Pause(68, 68), id="the probe failed: twice the pause"),
        pytest.param((BAD,), Pause(0, 1000), OFF, (), Pause(LONGEST_PAUSE, LONGEST_PAUSE), id="no longer than"),
        pytest.param((GOOD_STALE,), Pause(0, 34), ON, (True,), Pause(), id="the probe won: on, drafts refreshed"),
        pytest.param((GOOD, BAD), Pause(), ON * 2, (False,) * 2, Pause(), id="one gains more than the other loses"),
        pytest.param((BAD, BAD, BAD, GOOD), Pause(), ON * 4, (False,) * 4, Pause(), id="even for three"),
        pytest.param((BAD, BAD), Pause(3, 34), OFF, (), Pause(2, 34), id="all lose"),
        pytest.param((BAD_STALE, GOOD), Pause(3, 34), ON * 2, (True, False), Pause(), id="who joins ends the pause"),
    ],
)
def test_a_decision(beliefs, pause: Pause, limits, refresh, after: Pause) -> None:
    assert decide(TABLE, beliefs, pause) == Decision(limits, refresh, after)


def test_a_new_request_among_losers_gets_its_trial_and_no_more() -> None:
    expensive = table(40)
    losers = tuple(replace(b, most=40) for b in (BAD_STALE, BAD_STALE, BAD_STALE))
    trial = decide(expensive, (*losers, Belief(40)), Pause(5, 34))
    assert (trial.limits, trial.refresh, trial.pause) == ((40,) * 4, (False,) * 4, Pause(5, 34))
    assert decide(expensive, (*losers, Belief(40, 1, 4, TRIAL)), Pause(5, 34)).limits == ()


def test_without_the_cost_of_a_refresh_none_is_asked_for() -> None:
    assert decide(replace(TABLE, refresh=None), (GOOD_STALE,), Pause()).refresh == (False,)


def test_a_table_may_say_that_a_smaller_k_gains_more() -> None:
    small = Curve(1, 2, (0.0, 1.0), (1.0, 2.0))
    lowering = Table((small, Curve(1, K, (0.0, 1.0), (0.4, 3.0))), "stated")
    assert decide(lowering, (Belief(K, 1, 5, 9),), Pause()).limits == (2,)
    assert decide(lowering, (GOOD,), Pause()).limits == (K,)
    # one fused graph of k 7 costs the same under any limit, so the claim above cannot hold for it
    assert decide(lowering.on_graph(K), (Belief(K, 1, 5, 9),), Pause()).limits == (K,)


def test_a_request_that_allows_fewer_drafts_gains_less() -> None:
    assert TABLE.best(1, 0.9, 2) == (2, pytest.approx(expected_tokens(0.9, 2) / fused_cost(K)))
    assert TABLE.best(1, 0.9, 0) == (0, pytest.approx(1 / fused_cost(K)))
    assert decide(TABLE, (replace(GOOD, most=0, tried=0),), Pause()).limits == ()


def test_gains_lie_on_straight_lines_and_stay_flat_outside() -> None:
    curve = Curve(1, K, (0.2, 0.6), (1.0, 2.0))
    assert [curve.gain(a) for a in (0.0, 0.2, 0.3, 0.6, 1.0)] == [1.0, 1.0, pytest.approx(1.25), 2.0, 2.0]


def test_between_batch_sizes_the_larger_counts() -> None:
    two = Table((Curve(2, K, (0.5,), (3.0,)), Curve(4, K, (0.5,), (1.0,))), "stated")
    assert [two.best(n, 0.5, K)[1] for n in (1, 2, 3, 4, 9)] == [3.0, 3.0, 1.0, 1.0, 1.0]


def test_beliefs_follow_the_steps_forget_and_ignore_stale_drafts() -> None:
    belief = Belief(K)
    for _ in range(40):
        belief = belief.after(K, K)
    assert belief.alpha > 0.95
    for _ in range(120):
        belief = belief.after(K, 0)
    assert belief.alpha < 0.2
    assert replace(belief, stale=True).after(K, K).alpha == belief.alpha
    assert belief.after(K, K).alpha > belief.alpha
    assert belief.after(0, 0).alpha == belief.alpha


def test_the_first_pause_pays_for_its_probe() -> None:
    assert first_pause(replace(TABLE, refresh=0.0), (BAD,)) == max(FIRST_PAUSE, -(-4 * (fused_cost(K) - 1) // 0.125))
    assert first_pause(TABLE, (BAD,) * 4) > 3 * first_pause(replace(TABLE, refresh=0.0), (BAD,) * 4)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[]", "is not a tuning table"),
        ("{", "is not a tuning table"),
        ('{"format": 2, "rows": [], "source": "x"}', "format 2, this version reads 1"),
        ('{"format": 1, "rows": [], "source": "x"}', "has no rows"),
        ('{"format": 1, "rows": [{"batch": 1, "alpha": 2, "k": 7, "gain": 1}], "source": "x"}', "row"),
        ('{"format": 1, "rows": [{"batch": 1, "alpha": 0.5, "k": 7, "gain": NaN}], "source": "x"}', "row"),
        ('{"format": 1, "rows": [{"batch": 1, "alpha": 0.5, "k": 7}], "source": "x"}', "is not a tuning table"),
    ],
)
def test_bad_tables_are_refused(content: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        parse_table(content.encode(), "tuning.json")


def test_a_table_is_found_in_the_bundle_or_named(tmp_path: Path) -> None:
    assert find_table(tmp_path, None) is None
    with pytest.raises(UserError, match=r"is a folder, and the table is a file; make it with .* --out FILE"):
        find_table(tmp_path, tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        find_table(tmp_path, tmp_path / "other.json")
    rows = [{"batch": 1, "alpha": a, "k": 3, "gain": 1 + a} for a in (0.0, 1.0)]
    text = json.dumps({"format": 1, "rows": rows, "source": "simulated"})
    (tmp_path / "tuning.json").write_text(text)
    found = find_table(tmp_path, None)
    assert found == Table((Curve(1, 3, (0.0, 1.0), (1.0, 2.0)),), "simulated")
    with pytest.raises(UserError, match="no rows of k 7"):
        found.on_graph(7)


def _constant(alpha: float) -> Alpha:
    return lambda position: alpha


def _changing(position: int) -> float:
    return 0.95 if position // 500 % 2 == 0 else 0.1


@pytest.mark.parametrize("batch", [1, 4])
def test_on_one_kind_of_load_the_policy_costs_little_more_than_the_better_of_on_and_off(batch: int) -> None:
    excess = {}
    for alpha in (0.0, 0.2, 0.4, 0.5, 0.55, 0.6, 0.7, 0.8, 0.9, 1.0):
        load = [_constant(alpha)] * batch
        fixed = [serve(load, K, batch, 1000, None, on)[0].cost for on in (True, False)]
        excess[alpha] = serve(load, K, batch, 1000, TABLE)[0].cost / min(fixed) - 1
    assert sum(excess.values()) / len(excess) < 0.04, excess
    # near 0.55 both ways cost the same, and some steps of one evidence or the other decide
    assert max(excess.values()) < 0.12, excess
    assert max(e for alpha, e in excess.items() if not 0.45 < alpha < 0.65) < 0.06, excess


@pytest.mark.parametrize(
    ("load", "batch"),
    [
        pytest.param([_constant(0.97), _constant(0.1)] * 3, 1, id="requests-one-by-one"),
        pytest.param([_constant(0.97)] * 4 + [_constant(0.1)] * 4, 4, id="batches-of-a-kind"),
        pytest.param([_changing], 1, id="a-request-that-changes"),
    ],
)
def test_on_a_mixed_load_the_policy_beats_every_fixed_k(load: list[Alpha], batch: int) -> None:
    policy, found = serve(load, K, batch, 2000, TABLE)
    assert {DECODE, FUSED, PREFILL} == set(policy.runs)
    # each fixed k may have a graph of its own, which is more than this bundle has
    fixed = {k: serve(load, k, batch, 2000, None, k > 0)[0].cost for k in (0, 1, 2, 3, 5, K)}
    assert policy.cost < 0.98 * min(fixed.values()), fixed
    assert [r.ids for r in found] == [r.ids for r in serve(load, K, batch, 2000, None, False)[1]]


def test_a_table_of_other_costs_makes_the_policy_lose() -> None:
    load = [_constant(0.1)] * 2
    wrong = Table((Curve(1, K, ALPHAS, tuple(9.0 for _ in ALPHAS)),), "wrong")
    assert serve(load, K, 2, 500, wrong)[0].cost > 1.5 * serve(load, K, 2, 500, TABLE)[0].cost


def test_probes_grow_rarer() -> None:
    runs = serve([_constant(0.0)], K, 1, 3000, TABLE)[0].runs
    starts = [i for i in range(1, len(runs)) if (runs[i - 1], runs[i]) == (PREFILL, FUSED)]
    gaps = [b - a for a, b in itertools.pairwise(starts)]
    assert len(gaps) >= 3
    assert all(b > 1.8 * a for a, b in itertools.pairwise(gaps))


def test_speculation_returns_when_a_request_turns_predictable() -> None:
    def late(position: int) -> float:
        return 0.05 if position < 400 else 0.98

    runs = serve([late], K, 1, 3000, TABLE)[0].runs
    assert runs[-50:] == [FUSED] * 50
    assert runs[40:140] == [DECODE] * 100 or DECODE in runs[40:140]


def _flipping(g, refresh: float | None) -> Table:
    """A table that makes the demo pair switch back and forth: what gains on one count of sequences loses on another."""
    curves = tuple(
        Curve(b, g.bundle["k"], (0.0, 1.0), (gain, gain)) for b, gain in ((1, 1.1), (2, 0.9), (3, 1.1), (4, 0.9))
    )
    return Table(curves, "made to flip", refresh)


@pytest.mark.parametrize("refresh", [None, 3.0], ids=["stale", "refreshed"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_switching_changes_no_token(base: Path, temperature: float, refresh: float | None) -> None:
    g = graphs(base, k=3, max_len=128)
    chosen = [PROMPTS[i] for i in (0, 2, 5, 13, 17, 20)]
    requests = [request(g, t, Params(temperature, seed=i), 30 + 3 * i) for i, t in enumerate(chosen)]
    expected = [r.ids for r in Engine(g, shape_of(g.bundle), False).run(requests)]
    watched = _Watched(g)
    found = Engine(watched, shape_of(g.bundle), True, _flipping(g, refresh)).run(requests)
    assert [r.ids for r in found] == expected
    steps = [t for t in watched.tags if t != PREFILL]
    assert sum(a != b for a, b in itertools.pairwise(steps)) >= 3, "the steps did not switch"
    assert any(r.refreshes for r in found) == (refresh is not None)
    assert all(r.refreshes == 0 for r in found) or watched.tags.count(PREFILL) > len(requests)


class _Watched:
    def __init__(self, inner) -> None:
        self.inner, self.tags = inner, list[str]()

    def run(self, tag, bucket, inputs):
        self.tags.append(tag)
        return self.inner.run(tag, bucket, inputs)


def test_a_record_holds_every_speculative_step_and_numbers_prompts_on(base: Path, tmp_path: Path) -> None:
    g, file = graphs(base, k=3, max_len=128), tmp_path / "steps.jsonl"
    made = request(g, PROMPTS[0], count=20)
    for _ in range(2):
        result = Engine(g, shape_of(g.bundle), record=recorder(file, "demo-draft")).run([made])[0]
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == 2 * result.steps
    assert [r["prompt"] for r in rows] == [0] * result.steps + [1] * result.steps
    own = rows[: result.steps]
    assert own[0] == {
        "prompt": 0,
        "draft": "demo-draft",
        "drafted": 3,
        "accepted": own[0]["accepted"],
        "position": len(made.ids),
    }
    assert sum(r["accepted"] for r in own) == sum(result.accepted)
    assert [b["position"] - a["position"] for a, b in itertools.pairwise(own)] == [r["accepted"] + 1 for r in own[:-1]]


def test_steps_of_the_target_alone_are_not_recorded(base: Path) -> None:
    g, steps = graphs(base, k=3, max_len=128), list[SpecStep]()
    Engine(g, shape_of(g.bundle), False, record=steps.append).run([request(g, PROMPTS[0], count=5)])
    assert steps == []
    Engine(g, shape_of(g.bundle), record=steps.append).run([Request((5, 6), max_new_tokens=4, k_limit=2)])
    assert {s.drafted for s in steps} == {2}


def test_a_record_is_not_added_to_another_file(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("hello\n")
    with pytest.raises(UserError, match="cannot take a record"):
        recorder(tmp_path / "notes", "d")


@pytest.mark.parametrize("changes", [{}, {"dtype": "bf16"}], ids=["fp32", "bf16"])
def test_a_refresh_writes_the_bits_that_the_target_s_steps_wrote(base: Path, changes: dict[str, str]) -> None:
    """Else a refreshed sequence could go on in another way than the target alone."""
    g = graphs(base, k=3, max_len=128, **changes)
    asked, engine = request(g, PROMPTS[13], Params(0.9, seed=3)), Engine(g, shape_of(g.bundle), False)
    engine.add(asked)
    for _ in range(25):
        engine.step()
    (slot,) = engine.slots.seated

    def written(name: str) -> list[np.ndarray]:
        caches = [np.array(array) for key, array in sorted(g._state.items()) if key.startswith(f"{name}.")]
        return [c[0, :, : slot.position].astype(np.float32) for c in caches]

    target, draft = written("target_model"), written("draft_model")
    assert engine._prompt(slot, slot.cached).accepted[0, 0] == slot.token
    assert all((a == b).all() for a, b in zip(target, written("target_model"), strict=True))
    assert not all((a == b).all() for a, b in zip(draft, written("draft_model"), strict=True))
    # an id less, and the next draw and the caches are others
    engine._prompt(slot, slot.cached[1:])
    assert not all((a == b).all() for a, b in zip(target, written("target_model"), strict=True))


def test_refreshes_end_when_the_prompt_s_graph_draws_another_id() -> None:
    """Other bits may lie in the target's cache then: the engine goes on without refreshing any more."""

    def late(position: int) -> float:
        return 0.05 if position < 300 else 0.98

    def run(differs: bool) -> tuple[Engine, int]:
        runner = Synthetic(K, {1: late}, other_prompt_graph=differs)
        engine = Engine(runner, Shape(K, 1, 1 << 14, (1 << 14,)), True, TABLE)
        return engine, engine.run([Request((1, 2, 3), Params(seed=1), 2000)])[0].refreshes

    same, refreshes = run(False)
    assert same.table is not None
    assert (same.table.refresh, refreshes > 1) == (TABLE.refresh, True)
    other, refreshes = run(True)
    assert other.table is not None
    assert (other.table.refresh, refreshes) == (None, 1)
