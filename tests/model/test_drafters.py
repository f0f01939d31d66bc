"""Every drafter emits the target's tokens: whatever it proposes, at every k, batch and rank count, greedy and drawn.

Pairs of options, not all products: each drafter meets several k, both dtypes or a batch alone, and ranks that split its
target and its own layers. test_invariance.py has the chain on one rank, test_ngram.py the host.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compile.graph.trace import lower_graph
from model.errors import UserError
from model.graph_key import GraphKey, Stage
from model.graph_spec import GraphSpec
from tests.model.family import MASK, AsTheyRun, family_spec, graphs, some_graphs
from trnspec.bundle.contract import declared, violations
from trnspec.bundle.manifest import canonical_hash, parse_manifest
from trnspec.bundle.plan import make_plan, whole_prompts
from trnspec.engine.adaptive_k import FixedK
from trnspec.engine.config import engine_config
from trnspec.engine.engine import Engine
from trnspec.engine.request import Params, Request, Result
from trnspec.engine.slots import Slot
from trnspec.runtime.xla import XlaRunner

pytestmark = pytest.mark.released_code
# what else a bundle may differ in
CASES: list[tuple[str, dict[str, Any]]] = [
    ("chain", {"k": 3, "tp": 2, "draft_tp": 1}),
    ("parallel", {"k": "1,16", "batch": 1, "dtype": "bf16"}),
    ("parallel", {"tp": 2}),
    ("parallel", {"tp": 2, "draft_tp": 1}),
    ("eagle3", {"k": "2,6", "batch": 1, "dtype": "bf16"}),
    ("eagle3", {"k": 2, "tp": 2}),
    ("eagle3", {"tp": 2, "draft_tp": 1}),
    ("dflash", {"k": "2,5", "batch": 1, "dtype": "bf16"}),
    ("dflash", {"tp": 2}),
    ("dspark", {"k": "1,6", "dtype": "bf16"}),
    ("dspark", {"tp": 2, "draft_tp": 1}),
    ("ngram", {"tp": 2}),
]


def _requests(count: int, seed: int, filters: bool) -> list[Request]:
    rng = random.Random(seed)
    requests = []
    for _ in range(count):
        by = (rng.choice([9, 40]), rng.choice([1.0, 0.9]), rng.choice([0.0, 0.02])) if filters else (0, 1.0, 0.0)
        params = Params(rng.choice([0.7, 1.2] if filters else [0.0, 0.7, 1.2]), *by, rng.getrandbits(64))
        # now and then an id alone, and one that meets the context's end
        length = rng.choice([1, 2, 5, 17, 60, 118])
        requests.append(Request(tuple(rng.randrange(64) for _ in range(length)), params, rng.choice([3, 12, 20])))
    return requests


def _run(loaded: XlaRunner, requests: list[Request], speculative: bool = True) -> list[Result]:
    return Engine(loaded, engine_config(loaded.bundle), speculative).run(requests)


def _name(case: Any) -> str:
    return case if isinstance(case, str) else ",".join(f"{k}={v}" for k, v in case.items())


@pytest.mark.parametrize(("drafter", "changes"), CASES, ids=_name)
def test_tokens_are_the_targets(family: Path, drafter: str, changes: dict[str, Any]) -> None:
    """The requests of every other case filter: XLA compiles one graph of a step for each, and that takes the time.

    Ids that are drawn freely repeat too seldom for a look-up.
    """
    requests = _requests(12, len(str(changes)), drafter != "ngram" and CASES.index((drafter, changes)) % 2 == 0)
    same = {n: changes[n] for n in ("dtype",) if n in changes}
    expected = [r.ids for r in _run(some_graphs(family, "none", **same), requests)]
    results = _run(some_graphs(family, drafter, **changes), requests)
    assert [r.ids for r in results] == expected
    assert sum(map(sum, (r.accepted for r in results))) > 0, "a test of acceptance must accept"
    assert any(sum(r.accepted) < sum(r.drafted) for r in results), "and refuse"


class Joined(AsTheyRun):
    """XlaRunner whose prompts are one graph of both models, as NxDI's hosts take them."""

    def _graph(self, key: GraphKey) -> GraphSpec:
        graph = super()._graph(key)
        if key.stage is not Stage.PREFILL:
            return graph
        draft = super()._graph(key._replace(stage=Stage.PREFILL_DRAFT, asking=False))
        counts = {op: n + draft.collectives[op] for op, n in graph.collectives.items()}
        return dataclasses.replace(
            graph, weights=draft.weights + graph.weights, state=draft.state + graph.state, collectives=counts
        )


@pytest.mark.parametrize(
    ("drafter", "changes"),
    [("chain", {}), ("chain", {"k": 3, "tp": 2, "draft_tp": 1}), ("parallel", {"tp": 2, "draft_tp": 1})],
    ids=_name,
)
def test_two_graphs_of_a_prompt_leave_what_one_does(family: Path, drafter: str, changes: dict[str, Any]) -> None:
    """Every bit of the caches, so that the same drafts are accepted; prompts of several chunks, and one that asks."""
    bundle = some_graphs(family, drafter, **changes).bundle
    two, one, shape, plan = AsTheyRun(bundle), Joined(bundle), engine_config(bundle), bundle.plan
    key = next(key for key in plan.by_key if key.stage is Stage.PREFILL and not key.asking)
    (whole,) = whole_prompts(plan)
    for part in ("weights", "state", "outputs", "collectives"):
        assert getattr(one._graph(key), part) == getattr(whole, part)
    requests = _requests(9, 2, False)
    requests[4] = dataclasses.replace(requests[4], logprobs=0)
    assert max(len(request.ids) for request in requests) > shape.prompts[-1][0]
    apart = Engine(two, shape).run(requests)
    assert apart == Engine(one, dataclasses.replace(shape, apart=False)).run(requests)
    assert sum(map(sum, (r.accepted for r in apart))) > 0
    for name, state in two._state.items():
        assert np.array_equal(state, one._state[name]), name


@pytest.mark.parametrize(
    ("drafter", "counts"),
    [
        # one pass whatever k, no completing one: two all-reduces for each of 2 + 1 layers; an embedding and a draw each
        ("parallel", {"all-reduce": 4 + 2, "all-gather": 4}),
        # the target's, then three passes of one layer; their embeddings, three draws, the projected states
        ("eagle3", {"all-reduce": 4 + 2 * 3, "all-gather": 2 + 3 + 3 + 1}),
        # one pass of two layers, the projected states
        ("dflash", {"all-reduce": 4 + 4, "all-gather": 4 + 1}),
        ("dspark", {"all-reduce": 4 + 4, "all-gather": 4 + 1}),
    ],
)
def test_a_step_runs_the_collectives_of_its_passes(family: Path, drafter: str, counts: dict[str, int]) -> None:
    """And the graphs that no request of this file runs, the asking ones, keep their contract on ranks too."""
    plan = make_plan(family_spec(family, drafter, tp=2).bundle)
    proto = lower_graph(plan.spec, plan.by_key[GraphKey(Stage.STEP, 3, 128)])
    assert {op: n for (op, _), n in declared(proto).collectives.items()} == counts
    asking = [graph for key, graph in plan.by_key.items() if key.asking and key.k]
    assert {graph.key.stage for graph in asking} == {Stage.PREFILL, Stage.DRAFT, Stage.VERIFY}
    for graph in asking:
        assert not violations(graph, lower_graph(plan.spec, graph), plan.spec)


def test_the_manifest_names_the_drafter_and_its_state(family: Path) -> None:
    bundle = graphs(family, "parallel").bundle
    assert (bundle.spec.drafter, bundle.spec.draft_config.mask_id) == ("parallel", MASK)
    kept = [t for t in bundle.plan.state if ".kept." in t.name]
    assert [(t.name, t.shape, t.dtype) for t in kept] == [("draft_model.kept.ids", (3, 3, 1), "int32")]


def test_a_manifest_with_another_drafter_is_refused(family: Path) -> None:
    content = json.loads(graphs(family, "parallel").bundle.content)
    for changes, why in (
        ({"drafter": "chain"}, "draft_config.mask_id is no field"),
        ({"drafter": "ngram"}, "the drafter|drafter is ngram"),
        ({"drafter": "oracle"}, "drafter is oracle"),
        ({"draft_config": content["spec"]["draft_config"] | {"mask_id": -2}}, "mask_id is -2"),
    ):
        manifest = {n: v for n, v in content.items() if n != "manifest_sha256"} | {"spec": content["spec"] | changes}
        manifest["manifest_sha256"] = canonical_hash(manifest)
        with pytest.raises(UserError, match=why):
            parse_manifest(json.dumps(manifest).encode(), "manifest.json")


# each behind an id where it is right once
@pytest.mark.parametrize(("drafter", "first"), [("parallel", 16), ("eagle3", 28), ("dflash", 3), ("dspark", 24)])
def test_kernels_serve_a_draft(family: Path, drafter: str, first: int) -> None:
    """On the simulator: rows of a pass begin at the text's begin, within a tile and behind several steps."""
    requests = [Request((first,), max_new_tokens=5), Request((*range(1, 12),), Params(0.8, seed=5), max_new_tokens=5)]
    expected = [r.ids for r in _run(graphs(family, "none"), requests)]
    results = _run(graphs(family, drafter, k=2, batch=2, kernels="nki"), requests)
    assert [r.ids for r in results] == expected
    assert sum(sum(r.accepted) for r in results) > 0


def test_a_draft_that_the_host_runs_drafts_what_the_fused_chain_does(family: Path) -> None:
    """Vanilla speculation, draft and target as graphs of their own, is the reference: steps accept the same."""
    requests = [Request((5, 9, 2), Params(t, seed=n), 24) for n, t in enumerate((0.0, 0.8, 1.5))]
    fused, target = graphs(family), graphs(family, "ngram")
    draft = some_graphs(family, "none", target=str(family / "chain"))

    def draws(slot: Slot, most: int) -> list[int]:
        asked = Request(slot.ids, slot.request.params, most)
        return Engine(draft, engine_config(draft.bundle), False).run([asked])[0].ids

    expected = _run(fused, requests)
    assert Engine(target, engine_config(target.bundle), propose=draws).run(requests) == expected
    assert all(0 < sum(r.accepted) < sum(r.drafted) for r in expected[1:])


def test_a_head_that_steps_of_the_target_left_behind_changes_no_token(family: Path) -> None:
    """Steps of six drafts, of two and of none in turn."""
    requests = _requests(6, 5, filters=False)
    expected = [r.ids for r in _run(some_graphs(family, "none", dtype="bf16"), requests)]
    loaded = some_graphs(family, "eagle3", k="2,6", batch=1, dtype="bf16")
    engine, results, ks = Engine(loaded, engine_config(loaded.bundle)), dict[int, Result](), set[int]()
    for request in requests:
        engine.add(request)
    for most in itertools.cycle((6, 0, 2, 0)):
        engine.step_k = FixedK(most)
        events = engine.step()
        ks |= {e.k for e in events}
        results |= {e.number: e.result for e in events if e.result}
        if not engine.busy:
            break
    assert [results[n].ids for n in range(len(requests))] == expected
    assert {0, 2, 6} <= ks
