"""The device check: it goes on after failures, and each check notices a fault that is planted in a stand-in."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import compile.device_check.__main__ as device_check
from compile.device_check import ids, probes
from compile.device_check.__main__ import CHECKS, Check, isolated, main, outcome_of, run_checks
from compile.device_check.kernels import CASES, compare_kernel
from compile.neuron import sdk, specialise
from compile.spec import BuildSpec
from model.errors import UserError
from model.nki import table
from model.nki.table import KERNELS
from nki_kernels.limits import SPARE_PAGES
from nki_kernels.probes import psum_chains_kernel, sum_over_ranks_kernel
from tests.compile import fake_sdk
from tests.compile.tiny import refused, spec, write_noisy_pair
from tests.eager_graphs import eager_graphs
from tests.runtime.neffs import compile_hlo, find_stand_ins, leave_neff
from tests.stand_ins import PACKAGES
from trnspec.bundle.spec import BundleSpec
from trnspec.engine.config import engine_config
from trnspec.engine.engine import Engine
from trnspec.engine.request import Request, Result

BY_NAME, REAL_COMPILE_HLO = {check.name: check for check in CHECKS}, sdk.compile_hlo
LAUNCHED = list[str]()


def test_the_page_follows_the_table_and_a_check_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--only"])
    assert capsys.readouterr().out.splitlines() == list(BY_NAME)
    assert all(set(check.needs) <= set(list(BY_NAME)[:at]) for at, check in enumerate(CHECKS))
    texts = device_check.texts()
    assert list(texts) == list(dict.fromkeys(map(_word, BY_NAME)))
    assert all(len(row) == 4 and all(row) for row in texts.values())
    assert {kernel for name in CASES for kernel in _launched(name)} == set(KERNELS)


def test_it_goes_on_after_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(out: Path) -> dict[str, Any]:
        raise UserError("the ids differ")

    checks = [
        Check("run 1", lambda out: {"us": 3}), Check("run 2", fails), Check("run 3", lambda out: {"us": 1 / 0}),
        Check("run 4", lambda out: {}, ("run 1",)), Check("run 5", pytest.fail, ("run 2",)),
        Check("run 6", pytest.fail, ("run 5",)),
    ]  # fmt: skip
    monkeypatch.setattr(device_check, "texts", lambda: {"run": ["runs", "right", "wrong", "the log"]})
    assert not run_checks(checks, lambda check: outcome_of(check, tmp_path), tmp_path)
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert [(o["state"], o["saw"]) for o in report.values()] == [
        ("passed", "us 3"), ("FAILED", "the ids differ"), ("FAILED", "ZeroDivisionError: division by zero"),
        ("passed", ""), ("skipped", "run 2 did not pass"), ("skipped", "run 5 did not pass"),
    ]  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    assert lines[4:8] == ["run 2: runs", "  FAILED; saw: the ids differ", "  means: wrong", "  report: the log"]
    assert lines[-1] == "skipped          0 s  run 6"
    # one check again, whose need is known
    assert run_checks(checks[3:4], lambda check: outcome_of(check, tmp_path), tmp_path)


def test_a_check_that_crashes_or_hangs_is_an_outcome(tmp_path: Path) -> None:
    python = tmp_path / "python"
    for script, saw in (
        ("kill -ABRT $$", "its process ended with status -6, a signal if below 0"),
        ("exec sleep 60", "it hangs after 1 s"),
        ('echo noise; echo \'{"state": "passed"}\'', None),
    ):
        python.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        python.chmod(0o755)
        assert isolated(Check("run it", pytest.fail, seconds=-59), tmp_path, str(python)).get("saw") == saw


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a report on a machine whose SDK is stand-ins and whose demo pair is tiny."""
    find_stand_ins(monkeypatch)
    monkeypatch.syspath_prepend(str(PACKAGES))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setenv("NKI_SIMULATOR", "1")
    fake_sdk.write_compiler(tmp_path / "bin")
    fake_sdk.write_neuron_ls(tmp_path / "bin", '[{"neuron_device": 0, "neuron_processes": []}]')
    monkeypatch.setattr(sdk, "compile_hlo", compile_hlo)
    monkeypatch.setattr(specialise, "available", lambda: True)
    monkeypatch.setattr(specialise, "specialised", lambda proto, *_: proto)
    monkeypatch.setitem(KERNELS, "sum_over_ranks", sum_over_ranks_kernel)
    base = write_noisy_pair(tmp_path / "pair")

    def demo(name: str, work: Path, **changes: Any) -> BuildSpec:
        recipe = {} if changes else {"toolchain": "neuron", "graphs": "greedy"}
        small = {"max_len": 256, "batch": 4, "out": str(work / name)} | ids.BUILDS[name] | recipe
        return spec(base, **(small | changes))

    monkeypatch.setattr(ids, "demo", demo)
    return tmp_path


def _refuse(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(sdk, "compile_hlo", REAL_COMPILE_HLO)
    fake_sdk.write_compiler(folder / "bin", fails="hlo")
    for name in ids.BUILDS:
        shutil.rmtree(folder / name, ignore_errors=True)


def _lose_first_products(patch: pytest.MonkeyPatch, folder: Path) -> None:
    lost_LJ11 = np.array([1, 0])[:, None, None, None] * np.arange(1, 5)[:, None, None]
    patch.setattr(probes, "psum_chains_kernel", {2: lambda *given: psum_chains_kernel[2](*given) - lost_LJ11})


def _off(launch: Any, operands: Any, runner: Any, run: Any = table.run) -> list[Any]:
    LAUNCHED.append(launch.kernel)
    return [a + np.asarray(1e-3 if a.dtype.kind == "f" else 1, a.dtype) for a in run(launch, operands, runner)]


def _set(fault: str) -> Callable[[pytest.MonkeyPatch, Path], None]:
    return lambda patch, folder: patch.setenv("NRTPY_FAULT", fault)


def _word(name: str) -> str:
    return name.split(maxsplit=1)[0]


# first word of a check -> a fault, and what the check says of it
FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch, Path], Any], str]] = {
    "environment": (lambda patch, folder: fake_sdk.write_neuron_ls(folder / "bin", "[]"), "lists no free device"),
    "runtime": (lambda patch, folder: patch.delattr("nrtpy.NrtpyModel.benchmark"), "nrtpy has no benchmark"),
    "psum": (_lose_first_products, "chain 3 in one tensor has [6.0] of its products 1 + 2 + 4"),
    "compile": (_refuse, "with status 1: "),
    "run": (_set("wrong"), "wrong numbers in run 1"),
    "reload": (_set("reload"), "replica group signature mismatch"),
    "kernel": (lambda patch, folder: patch.setattr(table, "run", _off), "result 0 is off by "),
    "build": (_refuse, "with status 1: "),
    "ids": (_set("wrong"), "on the CPU; their log-probabilities differ by"),
    "bench": (lambda patch, folder: shutil.rmtree(next(folder.glob("*_kernel-*"))), "nki left 0 NEFFs"),
    "time": (_set("early"), "0.0 us on the device"),
}
SLOW = {"run", "reload", "build", "ids", "bench", "time"}
# the cases of bench.kernels differ by their name
EACH = [name for name in BY_NAME if _word(name) not in ("bench", "time") or probes.TIMED[0] in name]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (_word(n) in SLOW)) for n in EACH])
def test_a_check_passes_and_a_planted_fault_fails_it(name: str, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, message = FAULTS[_word(name)]
    leave_neff(machine / probes.TIMED[0].replace("/", "-"))
    needed = [need for of in BY_NAME[name].needs for need in (*BY_NAME[of].needs, of)]
    for check in (*needed, name):
        assert outcome_of(BY_NAME[check], machine)["state"] == "passed", check
    LAUNCHED.clear()
    plant(monkeypatch, machine)
    outcome = outcome_of(BY_NAME[name], machine)
    assert outcome["state"] == "FAILED"
    assert message in outcome["saw"]
    assert _word(name) != "kernel" or _launched(name) <= set(LAUNCHED)


def _launched(name: str) -> set[str]:
    """The kernels of a case of the kernel check."""
    return set(name.removeprefix("kernel ").rpartition(": ")[2].split(", "))


def test_rows_of_idle_slots_in_the_null_block_fail_their_case_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def null_block(launch: Any, operands: Any, runner: Any, run: Any = table.run) -> list[Any]:
        results = run(launch, operands, runner)
        for pool in results[len(launch.results) :]:
            pool[0] += pool[-SPARE_PAGES:].sum(0)
        return results

    monkeypatch.setenv("NKI_SIMULATOR", "1")
    monkeypatch.setattr(table, "run", null_block)
    compare_kernel("verify_attention", Path())
    refused(lambda: compare_kernel(next(name for name in CASES if "idle" in name), Path()), "result 1 is off by ")


def test_a_last_bit_of_prefill_fails_the_bits_of_a_position_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def last_bit(launch: Any, operands: Any, runner: Any, run: Any = table.run) -> list[Any]:
        first, *others = run(launch, operands, runner)
        return [np.nextafter(first, np.float32(9)) if launch.kernel == "prompt_attention" else first, *others]

    monkeypatch.setenv("NKI_SIMULATOR", "1")
    monkeypatch.setattr(table, "run", last_bit)
    compare_kernel("append_rows, prompt_attention", Path())
    refused(lambda: compare_kernel(next(name for name in CASES if "bits" in name), Path()), "result 0 is off by ")


@pytest.mark.slow
def test_ranks_that_hang_end_with_their_check_in_time(
    machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(device_check, "CHECKS", [replace(check, seconds=8) for check in CHECKS])
    monkeypatch.setenv("NRTPY_FAULT", "hang")
    for name, message in (("compile all-gather", "NEFF bytes"), ("run all-gather", "it was ended, after 8 s")):
        main(["--out", str(machine), "--in-this-process", name])
        assert message in capsys.readouterr().out
    signal.alarm(0)


Answered = tuple[BundleSpec, list[Request], list[Result]]


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Answered:
    """Requests, and the results of a right device: a tiny pair in eager torch."""
    built = spec(write_noisy_pair(tmp_path_factory.mktemp("pair")), max_len=256, batch=4)
    sent, graphs = ids.requests(built.bundle), eager_graphs(built.bundle, built.checkpoints)
    results = Engine(graphs, engine_config(SimpleNamespace(spec=built.bundle))).run(sent)  # type: ignore[arg-type]
    return built.bundle, sent, results


def _compared(right: Answered, wrong: Callable[[int, int], bool], steps: int = 1, apart: float = 1) -> dict[str, Any]:
    """Facts of results with ids changed, by a prompt's length and a position, to others so far apart or more."""
    device = [
        Result([i ^ wrong(len(r.ids), len(r.ids) + at) for at, i in enumerate(result.ids)], steps=steps * result.steps)
        for r, result in zip(*right[1:], strict=True)
    ]
    return ids.compared(*right[:2], device, right[2], lambda of: apart * of[-1])


# ids that a device gets wrong
WRONG: dict[str, Callable[[int, int], bool]] = {
    "from position 40 on": lambda prompt, at: at >= 40,
    "after prompts over 25 ids": lambda prompt, at: prompt > 25,
    "after a prompt of one id": lambda prompt, at: prompt == 1,
    "in the second block": lambda prompt, at: at > 128,
    "at the last position": lambda prompt, at: at == 255,
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_fault_of_the_device_is_noticed(fault: str, right: Answered) -> None:
    refused(lambda: _compared(right, WRONG[fault]), "log-probabilities differ by ", " would be a tie")


def test_rejected_drafts_lacking_ids_and_ties(right: Answered) -> None:
    assert _compared(right, lambda *_: False)["margins of ties"] == []
    refused(lambda: _compared(right, lambda *_: False, steps=2), "on the CPU: drafts are rejected")
    short = [Result(result.ids[:-1]) for result in right[2]]
    refused(lambda: ids.compared(*right[:2], short, right[2], lambda of: 0), "235 ids were generated, and 236")
    facts = _compared(right, lambda prompt, at: (prompt, at) == (20, 200), apart=0)
    assert facts["margins of ties"] == [0.0]
    assert facts["ids"] == sum(len(result.ids) for result in right[2]) - 56
