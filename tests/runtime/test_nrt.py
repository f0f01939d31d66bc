"""NrtRunner with a stand-in of nrtpy: one process per rank, in-place caches, failures of a rank."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from compile.build import build
from model.errors import UserError
from model.graph_key import GraphKey, Stage
from model.graph_spec import GraphSpec, TensorSpec
from tests.compile.test_ranks import REQUESTS
from tests.ended import check_end
from tests.engine.outer import ids_ahead
from tests.model.family import family_spec, graphs, untraced
from tests.runtime.neffs import find_stand_ins, with_neffs
from tests.stand_ins.packages import nrtpy
from trnspec.bundle.opening import Bundle, read_bundle
from trnspec.bundle.plan import is_cache
from trnspec.engine.async_engine import AsyncEngine
from trnspec.engine.config import engine_config
from trnspec.engine.engine import Engine
from trnspec.engine.request import Result
from trnspec.runtime import ranks
from trnspec.runtime.nrt import NrtRunner, _cores
from trnspec.runtime.nrt_rank import RUNS_AHEAD, SHARED, UNCHANGED, RankWorker, input_offsets
from trnspec.runtime.runner import Runner, platform_of


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    find_stand_ins(monkeypatch)


@pytest.fixture(scope="module")
def of_two_ranks(family: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A chain's bundle of two ranks."""
    bundle = read_bundle(build(family_spec(family, "chain", tp=2)))
    return with_neffs(bundle, tmp_path_factory.mktemp("two"))


def _served(runner: Runner, full_sampling: bool = False) -> list[Result]:
    requests = [replace(r, logprobs=2) if full_sampling else r for r in REQUESTS]
    return Engine(runner, engine_config(runner.bundle)).run(requests)


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "tp"), [("eagle3", 1), ("ngram", 1), ("chain", 2), ("chain", 4)])
def test_tokens_accepted_drafts_and_scores_are_those_of_the_cpu(
    drafter: str, tp: int, family: Path, tmp_path: Path
) -> None:
    """The results of one rank, also with steps launched ahead."""
    cpu = graphs(family, drafter)
    bundle = cpu.bundle if tp == 1 else read_bundle(build(family_spec(family, drafter, tp=tp)))
    expected = _served(cpu)
    with closing(NrtRunner(with_neffs(bundle, tmp_path))) as runner:
        actual = _served(runner)
        assert [r.ids for r in actual] == [r.ids for r in expected]
        ids, ahead = ids_ahead(AsyncEngine(runner, engine_config(bundle)), REQUESTS)
        assert ids == [r.ids for r in expected]
        assert ahead > 2 or drafter == "ngram"
        if tp == 1:
            assert [r.accepted for r in actual] == [r.accepted for r in expected]
            both = _served(runner, full_sampling=True), _served(cpu, full_sampling=True)
            assert [r.scores for r in both[0]] == [r.scores for r in both[1]]


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_all_and_is_named(of_two_ranks: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks have ended when the error is raised: its receiver may end this process."""
    errors, kill_all, tokens = list[object](), ranks.Ranks._kill, 0
    monkeypatch.setattr(ranks.Ranks, "_kill", lambda self: (errors.append(self._error), kill_all(self)))
    runner = NrtRunner(of_two_ranks)

    def kill(ids: Sequence[int]) -> None:
        nonlocal tokens
        tokens += 1
        if tokens == 4:
            os.kill(runner._ranks.processes[1].pid, signal.SIGKILL)

    with pytest.raises(UserError, match=r"^rank 1 of 2 was ended by signal 9; see the log above, and start again$"):
        Engine(runner, engine_config(of_two_ranks)).run([replace(r, max_new_tokens=100, cut=kill) for r in REQUESTS])
    assert errors[0] is None
    with pytest.raises(UserError, match="rank 1 of 2"):
        runner._ranks.broadcast("ready")
    assert all(process.poll() is not None for process in runner._ranks.processes)
    runner.close()


_FAILS = """
import sys, time
from multiprocessing.connection import Connection
from model.errors import UserError
pipe = Connection(int(sys.argv[1]))
number = pipe.recv()[0]
if sys.argv[2] == "0":
    pipe.send((number, UserError("failed")))
    pipe.recv()
time.sleep(0.2)
sys.exit(3)
"""


def test_a_rank_that_fails_because_of_one_that_ended_is_not_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 fails because of rank 1, which ends a little later."""
    (tmp_path / "fails.py").write_text(_FAILS, encoding="utf-8")
    find_stand_ins(monkeypatch, tmp_path)
    monkeypatch.setattr(ranks, "_FAILURE_GRACE_S", 3)
    sentence = r"^rank 1 of 2 ended with status 3; see the log above"
    with closing(ranks.Ranks("fails", [], [os.environ] * 2)) as two, pytest.raises(UserError, match=sentence):
        two.broadcast("ready")


_OWNER = """
import sys
from pathlib import Path
from trnspec.bundle.opening import read_bundle
from trnspec.runtime.nrt import NrtRunner
runner = NrtRunner(read_bundle(Path(sys.argv[1])))
print(*(process.pid for process in runner._ranks.processes), flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_ranks_end_with_the_process_that_started_them(of_two_ranks: Bundle) -> None:
    command = [sys.executable, "-c", _OWNER, str(of_two_ranks.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        ranks = list(map(int, owner.stdout.readline().split()))
        assert [b"nrt_rank" in Path(f"/proc/{rank}/cmdline").read_bytes() for rank in ranks] == [True, True]
        owner.kill()
    for rank in ranks:
        check_end(rank, 60)


@pytest.mark.slow
def test_what_a_request_leaves_is_cleared(family: Path, tmp_path: Path) -> None:
    """`clear` changes the request's blocks and slot only."""
    bundle = graphs(family, "chain").bundle
    np.zeros(RUNS_AHEAD, np.uint8).tofile(tmp_path / "inputs")
    rank = RankWorker(0, str(bundle.path), bundle.manifest.digest, str(tmp_path / "inputs"), nrtpy)
    cache = next(name for name in rank._state if is_cache(name))
    for name, array in ((name, tensor.numpy()) for name, tensor in rank._state.items()):
        array[...] = np.nan if name == cache else 7
        rank._state[name].write_from_numpy(array)
    rank.clear(1, [2, 3])
    finite = np.isfinite(rank._state[cache].numpy()).all((1, 2, 3))
    assert finite.nonzero()[0].tolist() == [2, 3]
    assert all((tensor.numpy() == 7).all() for name, tensor in rank._state.items() if name != cache)


def test_an_input_that_one_neff_does_not_read_is_there_for_the_next(family: Path, tmp_path: Path) -> None:
    """The runner does not send an unchanged input again. The model here records its inputs."""
    bundle, read = read_bundle(untraced(family_spec(family, "chain"))), dict[str, np.ndarray]()
    first, second = (bundle.plan.by_key[GraphKey(Stage.STEP, 3, 128, filters)] for filters in (False, True))

    class Model:
        def __init__(self, graph: GraphSpec) -> None:
            tensors = (*graph.weights, *graph.inputs, *graph.state)
            named = {t.name: t for t in tensors if graph is second or t.name != "min_p"}
            self.input_tensors_info = {name: nrtpy.TensorMetadata(t.shape, t.bytes) for name, t in named.items()}
            self.output_tensors_info = dict.fromkeys(t.name for t in (*graph.outputs, *graph.state))

        @classmethod
        def load_from_neff(cls, path: str, name: str, **_: Any) -> Any:
            return cls(next(g for g in (first, second) if g.key.name == name))

        def __call__(self, inputs: dict[str, Any], outputs: Any) -> None:
            read.clear()
            read.update({name: tensor.numpy() for name, tensor in inputs.items()})

    vendor = SimpleNamespace(NrtpyTensor=nrtpy.NrtpyTensor, NrtpyModel=Model)
    shared = np.memmap(tmp_path / "inputs", np.uint8, "w+", shape=(RUNS_AHEAD, input_offsets(first)[-1]))
    worker = RankWorker(0, str(bundle.path), bundle.manifest.digest, str(tmp_path / "inputs"), vendor)
    for graph in (first, second):
        worker.load(graph.key, "")
    at = input_offsets(first)[[t.name for t in first.inputs].index("min_p")]
    shared[1, at : at + 4 * bundle.spec.batch].view(np.float32)[:] = 0.25
    worker.run(first.key, 1, [SHARED] * len(first.inputs))
    assert "min_p" not in read
    worker.run(second.key, 2, [UNCHANGED] * len(second.inputs))
    assert read["min_p"].tolist() == [0.25] * bundle.spec.batch
    # the next ids of that run are the input ids of the next one
    worker._last[1].write_from_numpy(np.full((bundle.spec.batch, 1), 5, np.int32))
    worker.run(second.key, 3, [1, *[UNCHANGED] * (len(second.inputs) - 1)])
    assert read["input_ids"].tolist() == [[5]] * bundle.spec.batch


def test_a_read_only_input_is_sent_again_after_another_value() -> None:
    runner, tensor, place = NrtRunner.__new__(NrtRunner), TensorSpec("bias", (2,), "float32"), np.zeros(64, np.uint8)
    runner._last, runner._unchanged = None, {}
    neutral, other = np.zeros(2, np.float32), np.ones(2, np.float32)
    neutral.flags.writeable = False
    sources = [runner._source(tensor, array, place) for array in (neutral, neutral, other, other, neutral)]
    assert sources == [SHARED, UNCHANGED, SHARED, SHARED, SHARED]
    assert not place.any()


def test_auto_is_neuron_where_devices_and_nrtpy_are(family: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a bundle with NEFFs."""
    bundle = read_bundle(untraced(family_spec(family, "chain")))
    assert platform_of(bundle) == "cpu"
    compiled: Any = SimpleNamespace(manifest=SimpleNamespace(compiler=SimpleNamespace(neff="neff")))
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([self / "neuron0"]))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert [platform_of(b) for b in (bundle, compiled)] == ["cpu", "neuron"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert [platform_of(compiled), platform_of(compiled, "neuron")] == ["cpu", "neuron"]


@pytest.mark.slow
def test_what_ranks_cannot_run_is_refused(family: Path, of_two_ranks: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"does not have a NEFF for each graph \(neff: none\); run python"):
        NrtRunner(graphs(family, "chain").bundle)
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "3")
    with pytest.raises(UserError, match="lists 1 cores, the bundle has 2 ranks"):
        NrtRunner(of_two_ranks)
    assert _cores("0-2,8") == [0, 1, 2, 8]
    with pytest.raises(UserError, match="VISIBLE_CORES is 'all'; give numbers"):
        _cores("all")
    monkeypatch.delenv("NEURON_RT_VISIBLE_CORES")
    with pytest.raises(UserError, match="has a different bundle in"):
        NrtRunner(replace(of_two_ranks, manifest=replace(of_two_ranks.manifest, digest="0" * 64)))
    with closing(NrtRunner(of_two_ranks)) as runner, monkeypatch.context() as patch:
        # such as a NEFF for a different target
        patch.setattr(type(of_two_ranks), "read", lambda self, name: b"NOT A NEFF")
        with pytest.raises(UserError, match=r"^rank . of 2 failed \(NrtError: NRT_FAILURE \(6\): .*start again$"):
            runner.prepare(of_two_ranks.graphs[0].key)
    root = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", f"{root}{os.pathsep}{root / 'nkisim/src'}")
    with pytest.raises(UserError, match=r"rank . of 2 failed \(ModuleNotFoundError: No module named 'nrtpy'"):
        NrtRunner(of_two_ranks)
