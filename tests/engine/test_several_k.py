"""Several k in one bundle: the graph of a step, how much it drafts, and that the choice never changes a token."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from model.graph_key import GraphKey, Stage
from tests.engine.ahead import Watched
from tests.model.family import caches
from tests.model.family import graphs as graphs_of
from tests.model.synthetic_load import BySeated
from trnspec.bundle import hlo
from trnspec.engine.config import engine_config
from trnspec.engine.engine import Engine
from trnspec.engine.request import Params, Request
from trnspec.engine.slots import Slot
from trnspec.runtime.xla import XlaRunner

pytestmark = pytest.mark.released_code
KS = (1, 3)


@pytest.fixture
def graphs(family: Path) -> XlaRunner:
    return graphs_of(family)


def _requests(temperature: float = 0.9) -> list[Request]:
    prompts = [(9, 2, 7), (4,), (1, 2, 3, 1, 2, 3), (60, 61), tuple(range(1, 40)), (8, 8)]
    return [
        Request(prompt, Params(temperature, top_k=20 * (n % 2), seed=n), 30 + 3 * n) for n, prompt in enumerate(prompts)
    ]


class _Random(Engine):
    """An engine with random limits of drafts, and so with any graph of the bundle for a step."""

    def __init__(self, graphs: XlaRunner, seed: int) -> None:
        super().__init__(graphs, engine_config(graphs.bundle))
        self.rng = random.Random(seed)

    def _limits(self, seated: tuple[Slot, ...]) -> tuple[int, ...]:
        most = self.rng.choice((0, *self.shape.ks))
        return tuple(self.rng.randint(0, most) for _ in seated)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_graph_of_a_step_never_changes_a_token(graphs: XlaRunner, temperature: float) -> None:
    """Whatever k and limits each step takes, the ids are those of each fixed k."""
    requests, shape = _requests(temperature), engine_config(graphs.bundle)
    expected = [r.ids for r in Engine(graphs, shape, False).run(requests)]
    for limit in KS:
        fixed = Engine(graphs, shape).run([Request(**{**vars(r), "k_limit": limit}) for r in requests])
        assert [r.ids for r in fixed] == expected
        assert all(set(r.steps_of_k) == {limit} for r in fixed)
    for seed in range(2):
        mixed = _Random(graphs, seed).run(requests)
        assert [r.ids for r in mixed] == expected
        assert set().union(*(r.steps_of_k for r in mixed)) == {0, *KS}
    by_batch = Engine(graphs, shape, step_k=BySeated(3, 1, 0)).run(requests)
    assert [r.ids for r in by_batch] == expected
    assert set().union(*(r.steps_of_k for r in by_batch)) == {0, *KS}


def test_the_caches_of_two_k_hold_the_same_bits(graphs: XlaRunner) -> None:
    """Of the target after steps of every k, and of the draft too: only a step of k 0 leaves a hole there."""
    held = []
    for limit in (0, *KS):
        engine = Engine(graphs, engine_config(graphs.bundle))
        engine.add(Request((9, 2, 7), Params(0.8, seed=4), 60, k_limit=limit))
        while not engine.slots.seated or engine.slots.seated[0].position < 40:
            engine.step()
        # the draft's row of an id that was kept last is written by the next step
        (block,) = engine.slots.seated[0].blocks
        held.append({name: pool[block, :, :39].copy() for name, pool in caches(graphs).items()})
    for name in held[0]:
        same = [(held[-1][name] == other[name]).all() for other in held[:-1]]
        assert same == [name.startswith("target"), True], name


def _calls(content: bytes, name: str) -> int:
    """How often a graph's entry calls computations of a name."""
    module = hlo.parse(content)
    named = {c.id for c in module.computations if c.name.startswith(name)}
    entry = next(c for c in module.computations if c.id == module.entry_computation_id)
    return sum(len(named & {*i.called_computation_ids}) for i in entry.instructions)


def test_a_small_graph_drafts_less(graphs: XlaRunner) -> None:
    """A step of k calls the draft k - 1 times after its first pass."""
    steps = [graphs.bundle.plan.by_key[GraphKey(Stage.STEP, k, 128)] for k in (3, 1)]
    assert [_calls(bytes(graphs.bundle.read(step.file)), "Qwen3") for step in steps] == [2, 0]
    assert [step.outputs[0].shape for step in steps] == [(3, 4), (3, 2)]


def test_requests_that_take_no_drafts_run_the_target_alone(graphs: XlaRunner) -> None:
    """The same ids as with drafts, before and after and together: speculation is off request by request."""
    requests = [Request((9, 2, 7), Params(0.7, seed=9), 25, k_limit=limit) for limit in (0, None)]
    none, drafts = (Engine(graphs, engine_config(graphs.bundle)).run([request])[0] for request in requests)
    assert none.ids == drafts.ids
    assert (set(none.steps_of_k), set(drafts.steps_of_k)) == ({0}, {3})
    together = Engine(graphs, engine_config(graphs.bundle)).run(requests)
    assert [r.ids for r in together] == [none.ids, none.ids]
    assert sum(together[0].drafted) == 0


@pytest.mark.parametrize("limit", [None, 1, 0])
def test_every_graph_that_a_request_runs_was_compiled_before(graphs: XlaRunner, limit: int | None) -> None:
    watched, prepared = Watched(graphs), set[GraphKey]()
    engine = Engine(watched, engine_config(graphs.bundle))
    request = Request((9, 2, 7), Params(0.8, seed=3), 20, k_limit=limit)

    class _Told:
        bundle = graphs.bundle

        @staticmethod
        def prepare(key: GraphKey) -> None:
            prepared.add(key)

    compile_graphs(_Told, request, engine)  # type: ignore[arg-type]
    engine.run([request])
    # a prompt that nobody shares has a draft's part only if a step drafts
    unused = {key for key in prepared if key.stage is Stage.PREFILL_DRAFT and limit == 0}
    assert {*watched.keys} == prepared - unused


def test_a_bundle_lists_its_k(graphs: XlaRunner) -> None:
    assert graphs.bundle.spec.ks == engine_config(graphs.bundle).ks == KS
    assert {key.k for key in graphs.bundle.plan.by_key} == {0, *KS}
