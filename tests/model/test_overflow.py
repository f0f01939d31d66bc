"""Requests whose logits overflow, and very low temperatures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from safetensors.torch import load_file, save_file

from tests.eager_graphs import EagerGraphs
from tests.model.family import eager_engine, write_family
from trnspec.engine.request import Params, Request, Result

POISON = 9
PROMPT = (3, 5, 7)


@pytest.fixture(scope="module")
def overflow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose rows overflow from id POISON on: only its embedding is nonzero where a norm's weight is huge."""
    base = write_family(tmp_path_factory.mktemp("overflow") / "family")
    target = base / "target"
    weights = load_file(target / "model.safetensors")
    weights["model.embed_tokens.weight"][:, 0] = 0
    weights["model.embed_tokens.weight"][POISON, 0] = 5
    weights["model.layers.0.input_layernorm.weight"][0] = 3e38
    weights["lm_head.weight"][POISON] = 0
    save_file(weights, target / "model.safetensors")
    return base


def _run(folder: Path, *requests: Request) -> list[Result]:
    return eager_engine(folder).run(requests)


@pytest.mark.parametrize("params", [Params(), Params(0.8, 20, 0.9, 0.01, seed=4)], ids=["greedy", "filtered"])
def test_overflowing_logits_end_only_their_request(overflow: Path, params: Params) -> None:
    """Requests in the same batch, and the next ones in the slots, are unaffected."""
    request = Request(PROMPT, params, 5)
    (expected,) = _run(overflow, request)
    poisoned = [Request(p, params, 5) for p in ((2, POISON), (POISON, *PROMPT))]
    results = _run(overflow, request, *poisoned, *[request] * 2)
    assert [(r.ids, r.finish_reason) for r in results[1:3]] == [([], "error")] * 2
    assert all("logits hold NaN or infinity" in r.error and "after 0 new tokens" in r.error for r in results[1:3])
    assert [r.ids for r in (results[0], *results[3:])] == [expected.ids] * 3


def test_an_id_after_which_logits_overflow_is_the_last(overflow: Path) -> None:
    """Sampled by noise only. A draft of POISON overflows the step that verifies it, so it may not be emitted."""
    counts = set()
    for seed in range(6):
        request = Request(PROMPT, Params(1e30, seed=seed), 100)
        (target,), (drafted,) = _run(overflow, replace(request, k_limit=0)), _run(overflow, request)
        assert POISON not in target.ids[:-1]
        assert (target.finish_reason == "error") == (target.ids[-1] == POISON)
        assert drafted.finish_reason == target.finish_reason
        assert target.ids[: len(drafted.ids)] == drafted.ids
        assert len(target.ids) - len(drafted.ids) <= 3
        counts |= {len(target.ids)} if target.finish_reason == "error" else set()
    assert len(counts) > 2


def test_blocks_that_are_not_cleared_poison_the_next_request(overflow: Path) -> None:
    """Negative control of `clear`: attention multiplies invisible rows by 0, and 0 * NaN is NaN."""
    # the request uses all four blocks; the next prompt writes two of them, and reads a third
    poison = Request((POISON, *PROMPT * 160), max_new_tokens=3)
    after = Request(PROMPT * 44, max_new_tokens=200, stop_ids=tuple(range(64)))
    engine = eager_engine(overflow, max_len=512, chunks=(128,), blocks=7)
    assert [r.finish_reason for r in engine.run([poison, after])] == ["error", "eos"]
    with mock.patch.object(EagerGraphs, "clear"):
        assert [r.finish_reason for r in engine.run([poison, after])] == ["error", "error"]
    for slot in range(3):
        engine.runner.clear(slot, [1, 2, 3, 4])
    assert [r.finish_reason for r in engine.run([after])] == ["eos"]


def test_a_low_temperature_is_raised_as_vllm_raises_it(family: Path) -> None:
    assert [Params(t).sampling_temperature for t in (0.0, 1e-300, 1e-6, 0.0099, 0.01, 0.5)] == [0, *[0.01] * 4, 0.5]
    low, lowest = _run(family, *(Request(PROMPT, Params(t, seed=3), 12) for t in (1e-300, 0.01)))
    assert low.ids == lowest.ids
