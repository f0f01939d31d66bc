"""The device check: it goes on after failures, each check can fail, and a fault of a device is noticed in a record."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import compile.device_check.__main__ as device_check
from compile.build import build
from compile.device_check import ids
from compile.device_check.__main__ import CHECKS, Check, isolated, main, run_checks
from compile.device_check.kernels import CASES, errors
from compile.spec import BuildSpec, Recipe
from model.cache import KEY_TILE, AttentionMetadata
from model.errors import UserError
from model.nki import simulated
from model.nki.launches import Launch
from model.nki.table import KERNELS
from tests.compile.tiny import refused, spec, write_noisy_pair
from tests.eager_graphs import eager_graphs
from tests.model.paged import empty_caches
from tests.runtime.neffs import find_stand_ins, with_neffs
from trnspec.bundle.opening import open_bundle
from trnspec.engine.config import engine_config
from trnspec.engine.engine import Engine
from trnspec.engine.request import Request, Result


def _check(name: str, run: Any = None, needs: tuple[str, ...] = (), seconds: int = 60) -> Check:
    return Check(name, "", "", "", run, needs, seconds)


def test_without_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    said = "no check can run: neither neuron-ls nor neuronx-cc is here; run it on a trn2"
    refused(lambda: main(["--out", str(tmp_path / "report")]), said)
    lines = capsys.readouterr().out.splitlines()
    assert all(any(line.startswith(f"| `{check.name}` | {check.does} | ") for line in lines) for check in CHECKS)
    assert not (tmp_path / "report").exists()
    assert device_check.page() in (Path(__file__).parents[2] / "docs/device.md").read_text(encoding="utf-8")
    names = [check.name for check in CHECKS]
    assert all(set(check.needs) <= set(names[:at]) for at, check in enumerate(CHECKS))


def test_it_goes_on_after_failures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(out: Path) -> dict[str, Any]:
        raise UserError("the ids differ")

    checks = [
        _check("first", lambda out: {"us": 3}), _check("second", fails), _check("third", lambda out: {"us": 1 / 0}),
        _check("fourth", lambda out: {}, ("first",)), _check("fifth", pytest.fail, ("second",)),
        _check("sixth", pytest.fail, ("fifth",)),
    ]  # fmt: skip
    outcomes = run_checks(checks, lambda check: check.run(tmp_path), tmp_path)
    assert [(o["state"], o.get("why")) for o in outcomes.values()] == [
        ("held", None), ("FAILED", "the ids differ"), ("FAILED", "ZeroDivisionError: division by zero"), ("held", None),
        ("not reached", "second did not hold"), ("not reached", "fifth did not hold"),
    ]  # fmt: skip
    assert outcomes["first"]["reports"] == {"us": 3}
    assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8")) == outcomes
    assert capsys.readouterr().out.splitlines()[1] == "FAILED      second the ids differ"


def test_a_check_that_crashes_or_hangs_is_an_outcome(tmp_path: Path) -> None:
    check = _check("a check, crashing", seconds=1)
    for code, why in (
        ("import sys; sys.exit('error: no NEFF')", "^no NEFF$"),
        ("import os; os.abort()", "signal 6 ended its process: it said nothing"),
        ("raise MemoryError('of the device')", "^MemoryError: of the device$"),
        ("import time; time.sleep(60)", "longer than 1 s"),
    ):
        with pytest.raises(UserError, match=why):
            isolated(check, tmp_path, [sys.executable, "-c", code])
    code = "print('noise'); print('{\"bytes\": 1}')"
    assert isolated(check, tmp_path, [sys.executable, "-c", code]) == {"bytes": 1}
    assert "noise" in (tmp_path / "a-check+crashing.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_s_case_holds_simulated_and_not_when_results_are_off(name: str) -> None:
    launched = set[str]()

    def serve(launch: Launch, tensors: tuple[Tensor, ...], off: float = 0) -> tuple[Tensor, ...]:
        launched.add(launch.kernel)
        return tuple(t + (1e-3 * off if t.is_floating_point() else int(off)) for t in simulated.serve(launch, tensors))

    assert all(error <= bound for error, bound in errors(name, serve))
    assert set(name.split(", ")) <= launched
    assert not all(error <= bound for error, bound in errors(name, partial(serve, off=1)))


def test_every_kernel_that_a_graph_launches_is_checked() -> None:
    assert {kernel for name in CASES for kernel in name.split(", ")} == set(KERNELS)


class Record:
    """What a right device emits: a tiny pair's results in eager torch, and its target's log-probabilities."""

    def __init__(self, built: BuildSpec) -> None:
        graphs = eager_graphs(built.bundle, built.checkpoints)
        self.spec, self.target, self.asked = built.bundle, graphs.pair.target_model, ids.requests(built.bundle)
        self.results = Engine(graphs, engine_config(SimpleNamespace(spec=self.spec))).run(self.asked)  # type: ignore[arg-type]

    @torch.no_grad()
    def logprob(self, of: Sequence[int]) -> float:
        blocks, length = -(-len(of) // KEY_TILE), len(of) - 1
        caches = empty_caches(self.spec.target_config, 1, 1 + blocks, torch.float32)
        rows, table = torch.arange(length).int()[None], 1 + torch.arange(blocks).int()[None]
        hidden = self.target.hidden(torch.tensor([of[:-1]]).int(), caches, AttentionMetadata(rows, table))
        return float(self.target.logits(hidden.x_BNE)[0, -1].log_softmax(-1)[of[-1]])

    def compared(self, change: Callable[[Request, int, int], int], steps: int = 1) -> dict[str, Any]:
        """Facts of results whose ids are changed: of a request, at a position, from an id."""
        device = [
            Result([change(r, len(r.ids) + i, t) for i, t in enumerate(result.ids)], steps=steps * result.steps)
            for r, result in zip(self.asked, self.results, strict=True)
        ]
        return ids.compared(self.spec, self.asked, device, self.results, self.logprob)


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    base = write_noisy_pair(tmp_path_factory.mktemp("pair"))
    return Record(spec(base, "pair", max_len=256, batch=4, k=3, chunks=(128,)))


def test_a_right_device_passes_and_has_every_id(record: Record) -> None:
    facts = record.compared(lambda request, at, i: i)
    assert facts["ids"] == sum(len(result.ids) for result in record.results)
    assert facts["margins of ties"] == []
    assert {i for result in record.results for i in result.ids} == set(range(64))
    assert len(record.results[0].ids) == 256 - 20, "to the context's end"


# the ids that a device gets wrong
FAULTS: dict[str, Callable[[Request, int, int], bool]] = {
    "from position 40 on": lambda request, at, i: at >= 40,
    "after prompts over 25 ids": lambda request, at, i: len(request.ids) > 25,
    "one id": lambda request, at, i: i == 41,
    "in the second bucket": lambda request, at, i: at > 128,
    "at the last position": lambda request, at, i: at == 255,
    "greedy": lambda request, at, i: not request.params.temperature,
    "top-p": lambda request, at, i: 0 < request.params.top_p < 1,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_device_is_noticed(fault: str, record: Record) -> None:
    facts = partial(record.compared, lambda request, at, i: (i + 1) % 64 if FAULTS[fault](request, at, i) else i)
    refused(facts, "their scores differ by ", " would be a tie")


def test_drafts_that_are_rejected_and_ids_that_lack_are_noticed(record: Record) -> None:
    refused(lambda: record.compared(lambda request, at, i: i, steps=2), "on the CPU: drafts are rejected")
    short = [Result(result.ids[:-1]) for result in record.results]
    facts = partial(ids.compared, record.spec, record.asked, short, record.results, record.logprob)
    refused(facts, "235 ids came, 236 from the CPU")


def test_ids_that_are_tied_are_reported(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(request: Request, at: int, i: int) -> int:
        return i + (at == 200 and not request.params.temperature)

    monkeypatch.setattr(record, "logprob", lambda of: -1.0)
    assert record.compared(changed)["margins of ties"] == [0.0]
    # an id that the target likes better and a filter excludes
    monkeypatch.setattr(record, "logprob", lambda of: 9.0 * (of[-1] != record.results[0].ids[180]))
    refused(lambda: record.compared(changed), "their scores differ by -9, and")


@pytest.mark.slow
def test_the_demo_pair_s_neffs_on_a_stand_in_of_nrtpy_have_the_cpu_s_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_stand_ins(monkeypatch)
    monkeypatch.setattr(device_check, "requests", lambda of: ids.requests(of)[:12])
    monkeypatch.setitem(device_check.BUILDS, "fp32", {"k": "1", "batch": 2})
    made = device_check.demo("fp32", tmp_path / "made", recipe=Recipe(toolchain="cpu", chunks=(128,)))
    with_neffs(open_bundle(build(made)), tmp_path)
    facts = device_check.ids("neuron", "fp32", tmp_path)
    assert facts["margins of ties"] == []
    assert facts["steps"] == facts["steps on the CPU"]
