"""The front door where a model has nothing to draw, and at the ends of the sampling parameters' ranges."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from model.errors import UserError
from model.graph_key import GraphKey, Stage
from tests import executables
from tests.model.family import graphs, write_family
from trnspec.engine.config import engine_config
from trnspec.engine.engine import Engine
from trnspec.engine.request import Params, Request, Result
from trnspec.llm import LLM
from trnspec.runtime import memory_maps, pjrt
from trnspec.runtime.xla import XlaRunner

pytestmark = pytest.mark.released_code
POISON = 9
PROMPT = (3, 5, 7)


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> XlaRunner:
    """A target whose rows overflow from the id POISON on: its embedding alone has a number that a norm scales up."""
    base = write_family(tmp_path_factory.mktemp("overflow") / "family")
    target = base / "target"
    weights = load_file(target / "model.safetensors")
    weights["model.embed_tokens.weight"][:, 0] = 0
    weights["model.embed_tokens.weight"][POISON, 0] = 5
    weights["model.layers.0.input_layernorm.weight"][0] = 3e38
    weights["lm_head.weight"][POISON] = 0
    save_file(weights, target / "model.safetensors")
    return graphs(base)


@contextmanager
def door(held: XlaRunner) -> Iterator[LLM]:
    """The front door to graphs that others use too."""
    llm = LLM(held.bundle.path, load=False)
    llm._graphs, llm._engine = held, Engine(held, llm.shape)
    yield llm


def _run(held: XlaRunner, *requests: Request) -> list[Result]:
    return Engine(held, engine_config(held.bundle)).run(requests)


def test_room_for_a_graph_is_more_than_a_graph_takes(family: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny pair's graph takes hundreds of maps, compiled and not loaded; the reserve is for larger ones."""
    monkeypatch.setattr(pjrt, "compile_hlo", executables.COMPILE)
    compiled, before = XlaRunner(graphs(family).bundle), memory_maps.used()
    compiled.prepare(GraphKey(Stage.STEP, 3, 128))
    assert 200 < 2 * (memory_maps.used() - before) < memory_maps._OF_A_GRAPH


@pytest.mark.parametrize("params", [Params(), Params(0.8, 20, 0.9, 0.01, seed=4)], ids=["greedy", "filtered"])
def test_logits_that_overflow_end_their_own_request(held: XlaRunner, params: Params) -> None:
    """Neighbours, and those who get the slot next, have the ids that they have alone."""
    with door(held) as llm:
        expected = llm.generate(PROMPT, params, max_new_tokens=9)
        stream = llm.stream(PROMPT, params, max_new_tokens=9)
        first = next(stream)
        for prompt in ((2, POISON), (POISON, *PROMPT)):
            with pytest.raises(UserError, match=r"logits hold NaN or infinity, .* after 0 new tokens; look for"):
                llm.generate(prompt, params, max_new_tokens=9)
        # all slots, one after the other
        outputs = llm.generate([PROMPT] * 4, params, max_new_tokens=9)
        assert [out.ids for out in outputs] == [expected.ids] * 4
        assert first + "".join(stream) == expected.text


def test_an_id_after_which_logits_overflow_is_the_last(held: XlaRunner) -> None:
    """The noise alone draws it. As a draft it overflows the step that verifies it, so that it need not be emitted."""
    counts = set()
    for seed in range(6):
        asked = Request(PROMPT, Params(1e30, seed=seed), 100)
        (alone,), (drafted,) = _run(held, replace(asked, k_limit=0)), _run(held, asked)
        assert POISON not in alone.ids[:-1]
        assert (alone.reason == "error") == (alone.ids[-1] == POISON)
        assert drafted.reason == alone.reason
        assert alone.ids[: len(drafted.ids)] == drafted.ids
        assert len(alone.ids) - len(drafted.ids) <= 3
        counts |= {len(alone.ids)} if alone.reason == "error" else set()
    assert len(counts) > 2


def test_a_slot_that_is_not_cleared_poisons_the_next_request(held: XlaRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the clearing: unseen rows are multiplied by 0, and 0 times NaN is NaN."""
    # behind the rows that the next prompt writes
    poison, after = Request((*PROMPT * 15, POISON), max_new_tokens=3), Request(PROMPT, max_new_tokens=9)
    slots = held.bundle.spec.batch
    asked = [poison] * slots + [after] * slots
    assert [r.reason for r in _run(held, *asked)] == ["error"] * slots + ["length"] * slots
    with monkeypatch.context() as left:
        left.setattr(XlaRunner, "clear", lambda self, slot, blocks: None)
        assert [r.reason for r in _run(held, *asked)] == ["error"] * 2 * slots
    for slot in range(slots):
        # each request had one block, from 1 on
        held.clear(slot, [1 + slot])
    assert [r.reason for r in _run(held, *[after] * slots)] == ["length"] * slots


# W1 of the review: these emitted id 0 where the filter should leave one id
ONE_ID = [
    Params(0.7, min_p=1.0, seed=1), Params(0.7, top_p=1e-38, seed=1), Params(0.3, min_p=0.9999999, seed=1),
    Params(1e-5, min_p=0.99, seed=2), Params(1e30, top_k=1, seed=3), Params(2.0, top_p=1e-300, seed=4),
]  # fmt: skip


def test_a_filter_that_leaves_one_id_emits_the_greedy_text(family: Path) -> None:
    with door(graphs(family)) as llm:
        ids = [llm.generate(PROMPT, p, max_new_tokens=40).ids for p in (Params(), *ONE_ID)]
        changed = {"presence_penalty": 0.3, "frequency_penalty": 0.7, "repetition_penalty": 1.17}
        asking = [replace(p, **changed) for p in (Params(), *ONE_ID)]
        penalised = [llm.generate(PROMPT, p, max_new_tokens=40).ids for p in asking]
    assert len({*ids[0]}) > 3
    assert ids[1:] == [ids[0]] * len(ONE_ID)
    # logits that were computed after the head: the best one's distance is 0 there too
    assert penalised == [penalised[0]] * len(asking)
    assert penalised[0] != ids[0]


def test_a_low_temperature_is_raised_as_vllm_raises_it(family: Path) -> None:
    assert [Params(t).draw_temperature for t in (0.0, 1e-300, 1e-6, 0.0099, 0.01, 0.5)] == [0, *[0.01] * 4, 0.5]
    requests = [Request(PROMPT, Params(t, seed=3), 12) for t in (1e-300, 1e-5, 0.01)]
    ids = [r.ids for r in _run(graphs(family), *requests)]
    assert ids == [ids[0]] * 3


@pytest.mark.parametrize("temperature", [1.1e30, 8e37, 1e39, 1e300, float("inf"), float("nan"), -1e-9])
def test_other_temperatures_are_refused(temperature: float) -> None:
    with pytest.raises(UserError, match=r"temperature is .*; it must be a number from 0 to 1e30"):
        Params(temperature).check()
    Params(1e30).check()
