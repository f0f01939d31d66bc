"""Every drafter emits the target's tokens, whatever it proposes, at every k and batch, greedy and sampled.

The law's home: eager graphs on one rank in fp32. The second look, marked slow, is one compiled bundle for each drafter,
in bf16 or on two ranks. test_invariance.py has limits, order and the context's end.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from model.drafters.registry import DRAFTERS
from model.strict import Wrong
from tests.model.family import eager_engine, family_spec, some_graphs
from trnspec.bundle.plan import make_plan
from trnspec.bundle.spec import spec_from_json
from trnspec.engine.adaptive_k import AdaptiveK
from trnspec.engine.config import engine_config
from trnspec.engine.engine import Engine
from trnspec.engine.request import Params, Request, Result
from trnspec.engine.slots import Slot

# k and batch of each drafter; parallel drafts at most 16, a block has 6 rows
EAGER: list[tuple[str, dict[str, Any]]] = [
    ("chain", {"k": "1,3"}), ("chain", {"k": 15, "batch": 8}), ("parallel", {"k": "1,16", "batch": 1}),
    ("parallel", {"batch": 8}), ("eagle3", {"k": "2,6", "batch": 1}), ("eagle3", {"k": 1, "batch": 8}),
    ("dflash", {"k": "2,5", "batch": 1}), ("dflash", {"batch": 8}), ("dspark", {"k": "1,6", "batch": 8}),
    ("ngram", {"batch": 8}), ("itself", {"k": 7, "batch": 4}),
]  # fmt: skip
COMPILED: list[tuple[str, dict[str, Any]]] = [
    ("chain", {"k": 3, "tp": 2}), ("parallel", {"dtype": "bf16"}), ("eagle3", {"k": 2, "tp": 2}),
    ("dflash", {"dtype": "bf16"}), ("dspark", {"k": 2, "tp": 2}), ("ngram", {"k": 3}),
]  # fmt: skip


def _requests(count: int, seed: int, filters: bool = True) -> list[Request]:
    rng = random.Random(seed)
    requests = []
    for _ in range(count):
        by = (rng.choice([0, 9, 40]), rng.choice([1.0, 0.9]), rng.choice([0.0, 0.02])) if filters else (0, 1.0, 0.0)
        params = Params(rng.choice([0.0, 0.7, 1.2]), *by, rng.getrandbits(64))
        # some prompts are one id, and some meet the context's end
        length = rng.choice([1, 2, 5, 17, 60, 118])
        requests.append(Request(tuple(rng.randrange(64) for _ in range(length)), params, rng.choice([3, 12, 20])))
    return requests


def _check(expected: list[Result], results: list[Result]) -> None:
    assert [r.ids for r in results] == [r.ids for r in expected]
    assert 0 < sum(sum(r.accepted) for r in results) <= sum(sum(r.drafted) for r in results)


def _name(case: Any) -> str:
    return case if isinstance(case, str) else ",".join(f"{k}={v}" for k, v in case.items())


@pytest.mark.parametrize(("drafter", "changes"), EAGER, ids=_name)
def test_tokens_are_the_targets(family: Path, drafter: str, changes: dict[str, Any]) -> None:
    requests = _requests(12, len(str(changes)))
    expected = eager_engine(family, "none", batch=8).run(requests)
    _check(expected, eager_engine(family, drafter, **changes).run(requests))


@pytest.mark.slow
@pytest.mark.released_code
@pytest.mark.parametrize(("drafter", "changes"), COMPILED, ids=_name)
def test_a_compiled_bundle_emits_the_targets_tokens(family: Path, drafter: str, changes: dict[str, Any]) -> None:
    """The requests of every other case filter: XLA compiles one graph of a step for each, and that takes the time."""
    filters = COMPILED.index((drafter, changes)) % 2 == 0
    requests = _requests(12, len(str(changes)), filters)
    target, loaded = (
        some_graphs(family, "none", dtype=changes.get("dtype", "fp32")),
        some_graphs(family, drafter, **changes),
    )
    expected = Engine(target, engine_config(target.bundle)).run(requests)
    _check(expected, Engine(loaded, engine_config(loaded.bundle)).run(requests))


def test_a_manifest_names_the_drafter_its_config_and_its_state(family: Path) -> None:
    spec = family_spec(family, "parallel").bundle
    assert spec_from_json(spec.as_json()) == spec
    state = [t for t in make_plan(spec).state if ".slots." in t.name]
    assert [(t.name, t.shape, t.dtype) for t in state] == [("draft_model.slots.ids", (3, 3, 1), "int32")]
    for changes, why in (
        ({"drafter": "chain"}, "draft_config.mask_id is no field"),
        ({"drafter": "ngram"}, "drafter is ngram"),
        ({"drafter": "oracle"}, "drafter is oracle, expected one of"),
        ({"draft_config": spec.as_json()["draft_config"] | {"mask_id": -2}}, "mask_id is -2"),
        (
            {"draft_config": spec.as_json()["draft_config"] | {"head_dim": 31}},
            "head_dim is 31, expected a multiple of 2",
        ),
    ):
        with pytest.raises(Wrong, match=why):
            spec_from_json(spec.as_json() | changes)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [name for name in DRAFTERS if DRAFTERS[name].has_model] + ["dspark"])
def test_simulated_kernels_serve_a_draft(family: Path, drafter: str) -> None:
    """Prompts of one id and of several, greedy and sampled; the target's tokens of torch."""
    requests = [Request((3,), max_new_tokens=4), Request((*range(1, 12),), Params(0.8, top_p=0.9, seed=5), 4)]
    expected = eager_engine(family, "none", batch=8).run(requests)
    results = eager_engine(family, drafter, k=2, batch=2, kernels="nki").run(requests)
    assert [r.ids for r in results] == [r.ids for r in expected]


def test_a_draft_that_the_host_runs_drafts_what_the_fused_chain_does(family: Path) -> None:
    """Vanilla speculation, draft and target as graphs of their own, is the reference: steps accept the same."""
    requests = [Request((5, 9, 2), Params(t, seed=n), 24) for n, t in enumerate((0.0, 0.8, 1.5))]
    draft = eager_engine(family, "none", False, target=str(family / "chain"))

    def propose(slot: Slot, count: int) -> list[int]:
        return draft.run([Request(slot.ids, slot.request.params, count)])[0].ids if count else []

    expected, host = eager_engine(family, k=3).run(requests), eager_engine(family, "ngram", k=3)
    host.propose = propose
    assert host.run(requests) == expected
    assert 0 < sum(sum(r.accepted) for r in expected) < sum(sum(r.drafted) for r in expected)


@pytest.mark.parametrize("drafter", ["eagle3", "dflash"])
def test_a_draft_that_steps_of_k_0_left_behind_changes_no_token(family: Path, drafter: str) -> None:
    """Steps of several k and of none in turn."""
    requests, most = _requests(6, 5), {"eagle3": 6, "dflash": 5}[drafter]
    expected = eager_engine(family, "none", batch=8).run(requests)
    engine, results, ks = eager_engine(family, drafter, k=f"2,{most}", batch=1), dict[int, Result](), set[int]()
    for request in requests:
        engine.add(request)
    for k in itertools.cycle((most, 0, 2, 0)):
        engine.step_k = AdaptiveK([k])
        events = engine.step()
        ks |= {e.k for e in events}
        results |= {e.number: e.result for e in events if e.result}
        if not engine.busy:
            break
    assert [results[n].ids for n in range(len(requests))] == [r.ids for r in expected]
    assert {0, 2, most} <= ks


def test_a_prompt_s_chunks_leave_what_one_chunk_does(family: Path) -> None:
    """The state of a drafter too, so that the same drafts are accepted: a last chunk of one id has those before it."""
    prompts = [tuple((n * n + 3 * n) % 64 for n in range(length)) for length in (129, 130, 200, 256)]
    requests = [Request(p, Params(1.0, seed=n), 9) for n, p in enumerate(prompts)]
    for drafter in ("chain", "parallel", "eagle3", "dflash"):
        found = []
        for chunks in ((128,), (128, 512)):
            engine = eager_engine(family, drafter, max_len=512, chunks=chunks)
            results = engine.run(requests)
            found.append([dataclasses.replace(r, scores=[]) for r in results])
        assert found[0] == found[1], drafter
