"""The emitted tokens are the target's with each drafter, k and batch, greedy and sampled.

Home of the law: eager graphs on one rank in fp32. The slow second look is one compiled bundle per drafter, in bf16 or
on two ranks. test_invariance.py has limits, order and the end of the context.
"""

from __future__ import annotations

import dataclasses
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from compile.recipes import ROOT
from model.drafters.registry import DRAFTERS
from model.strict import ValidationError
from tests.model.family import eager_engine, family_spec, some_graphs
from trnspec.bundle.plan import make_plan
from trnspec.bundle.spec import spec_from_json
from trnspec.engine.adaptive_k import AdaptiveK
from trnspec.engine.config import engine_config
from trnspec.engine.engine import Engine
from trnspec.engine.request import Params, Request, Result

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
        # prompts of one id, and prompts that reach the end of the context
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
@pytest.mark.parametrize(("drafter", "changes"), COMPILED, ids=_name)
def test_a_compiled_bundle_emits_the_targets_tokens(family: Path, drafter: str, changes: dict[str, Any]) -> None:
    """Only every other case has filters: each variant of a step is another graph to compile."""
    requests = _requests(12, len(str(changes)), filters=COMPILED.index((drafter, changes)) % 2 == 0)
    runners = some_graphs(family, "none", dtype=changes.get("dtype", "fp32")), some_graphs(family, drafter, **changes)
    _check(*(Engine(runner, engine_config(runner.bundle)).run(requests) for runner in runners))


def test_a_manifest_names_the_drafter_its_config_and_its_state(family: Path) -> None:
    spec = family_spec(family, "parallel").bundle
    assert spec_from_json(spec.as_json()) == spec
    state = [t for t in make_plan(spec).state if ".slots." in t.name]
    assert [(t.name, t.shape, t.dtype) for t in state] == [("draft_model.slots.ids", (3, 3, 1), "int32")]
    draft = spec.as_json()["draft_config"]
    for changes, why in (
        ({"drafter": "chain"}, "draft_config.mask_id is not a field"),
        ({"drafter": "ngram"}, "drafter is ngram"),
        ({"drafter": "oracle"}, "drafter is oracle, expected one of"),
        ({"draft_config": draft | {"mask_id": -2}}, "mask_id is -2"),
        ({"draft_config": draft | {"head_dim": 31}}, "head_dim is 31, expected a multiple of 2"),
    ):
        with pytest.raises(ValidationError, match=why):
            spec_from_json(spec.as_json() | changes)


def test_nothing_but_the_registry_names_a_drafter() -> None:
    """Adding a drafter needs a file and a line in the registry; NxDI supports plain drafts only."""
    quoted = "|".join(name for name in DRAFTERS if name != "none")
    named = re.compile(rf'"({quoted})"|model\.drafters(\.(?!registry)| import)')
    files = [f for folder in ("model", "trnspec", "compile", "serve") for f in (ROOT / folder).rglob("*.py")]
    assert {f.parent.name for f in files if named.search(f.read_text(encoding="utf-8"))} == {"drafters", "nxd"}


class Cycle(AdaptiveK):
    """Another k in each step."""

    def choose(self) -> int:
        self.ks = (*self.ks[1:], self.ks[0])
        return self.ks[0]

    def ended(self, k: int, seconds: float | None, requests: Any) -> None:
        """Ignores measurements."""


@pytest.mark.parametrize(("drafter", "max_k"), [("eagle3", 6), ("dflash", 5)])
def test_tokens_are_the_targets_after_steps_of_k_0(family: Path, drafter: str, max_k: int) -> None:
    requests, engine = _requests(6, 5), eager_engine(family, drafter, k=f"2,{max_k}", batch=1)
    engine.step_k, keys = Cycle([max_k]), engine.runner.keys  # type: ignore[attr-defined]
    engine.step_k.ks, first = (max_k, 0, 2, 0), len(keys)
    _check(eager_engine(family, "none", batch=8).run(requests), engine.run(requests))
    assert {key.k for key in keys[first:] if not key.is_prefill} == {0, 2, max_k}


@pytest.mark.parametrize("drafter", ["chain", "parallel", "eagle3", "dflash"])
def test_a_prompt_s_chunks_leave_what_one_chunk_does(family: Path, drafter: str) -> None:
    """Same ids, accepted drafts, and keys and values of the draft; the last chunk may be one id."""
    prompts = [tuple((n * n + 3 * n) % 64 for n in range(length)) for length in (400, 385, 386)]
    requests = [Request(p, Params(1.0, seed=n), 9) for n, p in enumerate(prompts)]
    results, caches, rows = [], [], []
    for chunks in ((128,), (128, 512)):
        engine = eager_engine(family, drafter, max_len=512, chunks=chunks)
        graphs: Any = engine.runner
        graphs.keys.clear()
        results.append([dataclasses.replace(r, scores=[]) for r in engine.run(requests)])
        rows.append({key.rows for key in graphs.keys if key.is_prefill})
        engine.run([Request(prompts[0], max_new_tokens=1)])
        # blocks of the prompt's 400 rows
        pools = (pool[1:5].transpose(1, 2).flatten(0, 1)[:400] for cache in graphs.state.caches for pool in cache)
        caches.append(torch.stack(list(pools)))
    assert rows == [{128}, {512}]
    assert results[0] == results[1]
    torch.testing.assert_close(*caches, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [name for name in DRAFTERS if DRAFTERS[name].config_type] + ["dspark"])
def test_simulated_kernels_serve_a_draft(family: Path, drafter: str) -> None:
    """Prompts of one id and of several, greedy and sampled, against the torch backend without drafts."""
    requests = [Request((3,), max_new_tokens=4), Request((*range(1, 12),), Params(0.8, top_p=0.9, seed=5), 4)]
    expected = eager_engine(family, "none", batch=8).run(requests)
    results = eager_engine(family, drafter, k=2, batch=2, kernels="nki").run(requests)
    assert [r.ids for r in results] == [r.ids for r in expected]
