"""Several k in one bundle: which graph a step runs, how much it drafts, and that no token hangs on it."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from model.bundle.schema import step_tag
from model.serving.switching import Belief, Curve, Decision, Pause, Table, decide_graph

from compile.graph import hlo
from model.bundle.manifest import (
    DECODE,
    FUSED,
    PREFILL,
    Bundle,
    canonical_hash,
    manifest_digest,
    parse_manifest,
    read_bundle,
)
from model.errors import UserError
from model.serving.engine import Engine, Event, SpecStep
from model.serving.ready import shape_of
from model.serving.request import Params, Request, Result, Shape
from model.serving.slots import Slot
from tests.model.demo_bundle import PROMPTS, graphs, request
from tests.model.synthetic_load import ALPHAS

KS = (1, 3)
SHAPE = Shape(7, 4, 256, (128, 256), fewer=(1, 3))
SET = {"k": 3, "fewer": (1,), "max_len": 128}


class _Random(Engine):
    """An engine that takes any graph of the bundle for a step, and any limits that fit."""

    def __init__(self, runner, seed: int = 0) -> None:
        super().__init__(runner, shape_of(runner.bundle))
        self.rng = random.Random(seed)

    def _decide(self, seated: list[Slot], most: int) -> Decision:
        k = self.rng.choice((0, *self.shape.ks))
        return Decision(tuple(self.rng.randint(0, k) for _ in seated), k=k)


def test_a_step_runs_the_smallest_graph_that_holds_its_drafts() -> None:
    assert SHAPE.ks == (1, 3, 7)
    assert [SHAPE.graph_k(n) for n in range(8)] == [0, 1, 3, 3, 7, 7, 7, 7]
    assert [step_tag(k, 7) for k in (0, 1, 3, 7)] == [DECODE, f"{FUSED}_k1", f"{FUSED}_k3", FUSED]
    assert Shape(0, 4, 256, (256,)).ks == ()


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_no_token_hangs_on_the_graph_of_a_step(base, temperature: float) -> None:
    """Whatever k and limits each step takes, the ids are those of each fixed k."""
    g = graphs(base, **SET)
    asked = [
        request(g, PROMPTS[i], Params(temperature, top_k=20 * (n % 2), seed=n), 30 + 3 * n)
        for n, i in enumerate((0, 2, 5, 13, 17, 20))
    ]
    shape = shape_of(g.bundle)
    expected = [r.ids for r in Engine(g, shape, False).run(asked)]
    for limit in KS:
        fixed = Engine(g, shape).run([Request(**{**vars(a), "k_limit": limit}) for a in asked])
        assert [r.ids for r in fixed] == expected
        assert all(set(r.steps_of_k) == {limit} for r in fixed)
    for seed in range(2):
        mixed = _Random(g, seed).run(asked)
        assert [r.ids for r in mixed] == expected
        assert set().union(*(r.steps_of_k for r in mixed)) == {0, *KS}


def test_the_caches_of_two_k_hold_the_same_bits(base) -> None:
    """Of the target after steps of every k, and of the draft too where no step was the target's alone."""
    g, asked = graphs(base, **SET), Params(0.8, seed=4)
    caches = []
    for limit in (*KS, 0):
        engine = Engine(g, shape_of(g.bundle))
        engine.add(request(g, PROMPTS[2], asked, 60, k_limit=limit))
        while not engine.slots.seated or engine.slots.seated[0].position < 40:
            engine.step()
        # the draft's row of an id that was kept last is written by the next step
        caches.append({n: np.array(a)[0, :, :39] for n, a in g._state.items() if ".kv." in n})
    for name in caches[0]:
        same = [(caches[0][name] == other[name]).all() for other in caches[1:]]
        assert same == [True, name.startswith("target_model")], name


def _calls(file: Path, name: str) -> int:
    """How often a graph's entry calls computations of a name."""
    module = hlo.parse(file.read_bytes())
    named = {c.id for c in module.computations if c.name.startswith(name)}
    entry = next(c for c in module.computations if c.id == module.entry_computation_id)
    return sum(len(named & {*i.called_computation_ids}) for i in entry.instructions)


def test_a_small_graph_drafts_less(base) -> None:
    """A step of k calls the draft k - 1 times, after its first pass, and the target once."""
    bundle = graphs(base, **SET).bundle
    calls = {g.tag: _calls(bundle.path / g.file, "Qwen3") for g in bundle.graphs if g.bucket == 128}
    assert (calls[FUSED], calls[f"{FUSED}_k1"]) == (3, 1)
    accepted = {g.tag: g.outputs[0].shape for g in bundle.graphs if g.bucket == 128}
    assert (accepted[f"{FUSED}_k1"], accepted[FUSED]) == ((4, 2), (4, 4))


class _Watched:
    def __init__(self, inner) -> None:
        self.inner, self.tags = inner, list[str]()

    def run(self, tag, bucket, inputs):
        self.tags.append(tag)
        return self.inner.run(tag, bucket, inputs)


def test_whoever_steps_may_say_the_most_drafts(base) -> None:
    """As vLLM's schedule by batch size does; a request's own limit holds below it."""
    g, steps = graphs(base, **SET), list[SpecStep]()
    watched = _Watched(g)
    engine = Engine(watched, shape_of(g.bundle), record=steps.append)
    engine.add(request(g, PROMPTS[0], count=30))
    engine.add(request(g, PROMPTS[2], count=30, k_limit=1))
    events = list[Event]()
    for most in (None, None, 0, 1, 2, 3, None):
        events += engine.step(most)
    assert watched.tags == [PREFILL, PREFILL, DECODE, f"{FUSED}_k1", FUSED, FUSED, FUSED]
    assert [e.k for e in events] == [0] * 4 + [1] * 2 + [3] * 6
    assert [s.drafted for s in steps] == [1, 1, 2, 1, 3, 1, 3, 1]


def test_requests_that_take_no_drafts_run_the_target_alone(base) -> None:
    """The same bytes as with drafts, before and after, offline and together: speculation is off request by request."""
    g = graphs(base, **SET)
    asked = [request(g, PROMPTS[5], Params(0.7, seed=9), 25, k_limit=limit) for limit in (0, None)]
    none, drafts = (Engine(g, shape_of(g.bundle)).run([a])[0] for a in asked)
    assert none.ids == drafts.ids
    assert (set(none.steps_of_k), set(drafts.steps_of_k)) == ({0}, {3})
    together = Engine(g, shape_of(g.bundle)).run(asked)
    assert [r.ids for r in together] == [none.ids, none.ids]
    assert sum(together[0].drafted) == 0


def _table(gains: dict[int, tuple[float, float]]) -> Table:
    curves = (Curve(1, k, (0.0, 1.0), gain) for k, gain in gains.items())
    return Table(tuple(curves), "by hand", None)


def test_a_table_picks_the_graph_on_which_the_requests_gain_most() -> None:
    tables = _table({1: (0.5, 1.3), 3: (0.3, 2.5)}).on_graphs((1, 3))
    poor, good = Belief(3, 1, 9, 50), Belief(3, 90, 1, 50)
    assert decide_graph(tables, (good,), Pause()) == Decision((3,), (False,), Pause(), 3)
    assert decide_graph(tables, (Belief(3, 5, 4, 50),), Pause()).k == 3
    assert decide_graph(tables, (Belief(1, 90, 1, 50),), Pause()).k == 1
    paused = decide_graph(tables, (poor,), Pause())
    assert (paused.limits, paused.k) == ((), None)


def test_a_k_without_rows_is_never_chosen() -> None:
    table = Table((Curve(1, 3, ALPHAS, ALPHAS),), "by hand", None)
    assert list(table.on_graphs((1, 3))) == [3]


def test_a_bundle_of_one_k_lists_none_and_has_the_set_that_it_had(base) -> None:
    bundle = graphs(base, k=3, max_len=128).bundle
    old = Bundle(bundle.path, {n: v for n, v in bundle.manifest.items() if n != "ks"}, bundle.graphs)
    assert old.ks == bundle.ks == (0, 3)
    assert read_bundle(graphs(base, **SET).bundle.path).ks == (0, 1, 3)


def test_a_result_counts_its_steps_by_k() -> None:
    result = Result()
    for k, drafted, accepted in ((3, 3, 2), (1, 1, 0), (3, 2, 2)):
        result.count(k, drafted, accepted)
    assert (result.steps_of_k, result.drafted, result.accepted) == ({3: 2, 1: 1}, [3, 2, 1], [2, 2, 0])


@pytest.mark.parametrize(
    ("ks", "fewer"),
    [([0, 3], "1"), ([0, 1, 2, 3], "1"), ([0, 1, 3], ""), ([0, 1, 3], "2"), ([0, 3, 5], "5"), (None, "1")],
    ids=str,
)
def test_a_set_of_k_that_other_fields_deny_is_refused(base, ks: list[int] | None, fewer: str) -> None:
    bundle = graphs(base, **SET).bundle
    manifest = json.loads(json.dumps(bundle.manifest))
    manifest["spec"]["fewer"], manifest["ks"] = fewer, ks
    if ks is None:
        del manifest["ks"]
    manifest["config_hash"] = canonical_hash([manifest["spec"], manifest["models"]])
    manifest["manifest_sha256"] = manifest_digest(manifest)
    with pytest.raises(UserError, match="ks are"):
        parse_manifest(json.dumps(manifest).encode(), "m", bundle.path)
