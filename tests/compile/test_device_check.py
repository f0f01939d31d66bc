"""The device check: what it does without the SDK, that it goes on after failures, and that its steps can fail."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nki
import numpy as np
import pytest

from compile.device_check import routes, steps
from compile.device_check.__main__ import check, function_of, isolated
from compile.device_check.__main__ import main as device_check
from compile.device_check.kernels import CASES, Compared
from compile.device_check.questions import QUESTIONS
from compile.device_check.table import KERNELS, STEPS, CheckStep
from model.errors import UserError


def test_without_the_sdk_it_says_what_it_would_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="the device check needs neuronx-cc, which is not on this machine; install it"):
        device_check(["--out", str(tmp_path / "report")])
    listed = capsys.readouterr().out
    assert all(step.what in listed for step in STEPS)
    assert not (tmp_path / "report").exists()


def _fails(work: Path) -> dict[str, Any]:
    raise UserError("the tokens | differ")


def _breaks(work: Path) -> dict[str, Any]:
    raise ZeroDivisionError("a fault of ours")


def test_a_python_without_torch_lists_the_steps_in_one_sentence(tmp_path: Path) -> None:
    code = """
import sys
for name in ("torch", "numpy", "safetensors", "tokenizers", "ml_dtypes", "jax"):
    sys.modules[name] = None
from compile.device_check.__main__ import main, run_cli
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name in sys.modules and sys.modules[name] is None else real(name)
run_cli(lambda: main(["--out", sys.argv[1]]))
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(
        "error: the device check needs torch, numpy, safetensors, tokenizers, ml_dtypes, which"
    )
    assert len(done.stderr.splitlines()) == 1
    assert f"{len(STEPS)}. full" in done.stdout


def test_the_steps_are_those_that_the_table_names() -> None:
    assert set(CASES) == set(KERNELS)
    names = [step.name for step in STEPS]
    assert len(set(names)) == len(names)
    for number, step in enumerate(STEPS):
        assert callable(function_of(step))
        assert set(step.needs) <= set(names[:number]), "what a step needs comes before it"
    assert {step.argument for step in STEPS if step.function.startswith("routes.")} == set(routes.CHANGES)


def test_short_steps_come_before_long_compiles() -> None:
    names = [step.name for step in STEPS]
    kernels = [f"{kind} {name}" for name in KERNELS for kind in ("kernel", "time")]
    alone = [name for name in names if name.startswith("neff")]
    assert names[: len(alone + kernels) + 1] == [*alone, "devices", *kernels]
    assert all(set(step.needs) <= set(alone) for step in STEPS if step.name in alone), "the compiler alone, no device"
    assert names[-2:] == ["times", "full"]


def test_every_benchmark_case_of_the_table_exists() -> None:
    program = "from bench.kernels.cases import CASES; print('\\n'.join(case.full_name for case in CASES))"
    listed = steps._bench("-c", program, lnc=1).stdout.split()
    assert set(KERNELS.values()) <= set(listed)


def test_every_question_names_steps_that_exist_and_the_report_ends_with_all(tmp_path: Path) -> None:
    states = {step.name: "held" for step in STEPS}
    assert all(bool(q.states(states)) == bool(q.step) for q in QUESTIONS)
    of_pjrt = next(q for q in QUESTIONS if q.step == "pjrt")
    by_hand = next(q for q in QUESTIONS if not q.step)
    assert (of_pjrt.answer(states), by_hand.answer(states)) == ("held", "not reached: by hand")
    assert of_pjrt.answer(states | {"pjrt": "FAILED"}) == "FAILED"
    assert of_pjrt.answer({}) == "not reached"
    check([_step("pjrt")], lambda _: {}, tmp_path)
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert all(f"| {q.question} | " in text for q in QUESTIONS)
    assert f"| {of_pjrt.part} | {of_pjrt.question} | held |" in text


def test_the_page_is_printed_from_the_questions(capsys: pytest.CaptureFixture[str]) -> None:
    device_check(["--page"])
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(rows) == len(QUESTIONS) + 1
    assert {len(row) for row in rows} == {4}


def _step(name: str, what: str = "", needs: tuple[str, ...] = (), seconds: int = 60) -> CheckStep:
    return CheckStep(name, what, "", "", needs, seconds)


def test_it_goes_on_after_failures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work: dict[str, Callable[[Path], dict[str, Any]]] = {
        "first": lambda _: {"us": 3},
        "second": _fails,
        "third": _breaks,
        "fourth": lambda _: {},
        "fifth": lambda _: pytest.fail("it needs what did not hold"),
        "sixth": lambda _: pytest.fail("it needs what was not reached"),
    }
    needs = {"fourth": ("first",), "fifth": ("second",), "sixth": ("fifth",)}
    table = [_step(name, f"is it {name}", needs.get(name, ())) for name in work]
    reports: list[list[str]] = []

    def run(step: CheckStep) -> dict[str, Any]:
        if (tmp_path / "report.json").is_file():
            reports.append([r["state"] for r in json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))])
        return work[step.name](tmp_path)

    outcomes = check(table, run, tmp_path)
    assert [o.state for o in outcomes] == ["held", "FAILED", "FAILED", "held", "not reached", "not reached"]
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert reports[0] == ["held", *["not reached"] * 5], "what waits is in the report from the first step on"
    assert [r["said"] for r in report][:4] == ["", "the tokens | differ", "ZeroDivisionError: a fault of ours", ""]
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert text.startswith("# Device check: 2 held, 2 failed, 2 not reached\n")
    assert "| second | is it second | FAILED | 0.0 | the tokens \\| differ |" in text
    assert "| fifth | is it fifth | not reached | 0.0 | second did not hold |" in text
    assert '"us": 3' in text
    assert capsys.readouterr().out.splitlines()[1] == "FAILED      second: the tokens | differ"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import sys; sys.exit('error: no NEFF')", "^no NEFF$"),
        ("import os; os.abort()", "was ended by signal 6: it said nothing"),
        ("raise MemoryError('of the device')", "^MemoryError: of the device$"),
        ("import time; time.sleep(60)", "longer than 2 s"),
    ],
)
def test_a_step_that_crashes_or_hangs_is_an_outcome(tmp_path: Path, code: str, said: str) -> None:
    step = _step("a step, crashing", seconds=2)
    with pytest.raises(UserError, match=said):
        isolated(step, tmp_path, [sys.executable, "-c", code])
    assert isolated(step, tmp_path, [sys.executable, "-c", "print('noise'); print('{\"bytes\": 1}')"]) == {"bytes": 1}
    assert "noise" in (tmp_path / "logs" / "a-step+crashing.txt").read_text(encoding="utf-8")


def test_with_a_compiler_alone_the_steps_run_and_the_exit_code_tells(
    tmp_path: Path, compiler: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two real steps in processes of their own: this machine has no device, so neither may hold."""
    few = tuple(s for s in STEPS if s.name in ("NxD", "kernel accept_drafts"))
    with pytest.raises(SystemExit, match="1"):
        device_check(["--out", str(tmp_path / "report")], few)
    report = json.loads((tmp_path / "report" / "report.json").read_text(encoding="utf-8"))
    assert [r["state"] for r in report] == ["FAILED", "FAILED"]
    assert "model.pt needs the Neuron SDK, which is not on this machine" in report[1]["said"]
    assert "nki is nkisim here, which measures no device" in report[0]["said"]
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "report" / "report.md")
    with pytest.raises(UserError, match="there is no step 'all'; the steps are neff, "):
        device_check(["--only", "all"])


def _all_hold(results: list[Compared]) -> bool:
    return all(r.error <= r.bound for r in results)


def _moved(array: Any) -> Any:
    return array + np.asarray(1 if array.dtype.kind == "i" else 1e-3, array.dtype)


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_s_case_holds_simulated_and_fails_when_results_are_off(name: str) -> None:
    results = CASES[name](nki.simulate)
    assert results
    assert _all_hold(results)

    def off(launched: Any) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            found = nki.simulate(launched)(*arguments)
            return tuple(map(_moved, found)) if isinstance(found, tuple) else _moved(found)

        return call

    assert not _all_hold(CASES[name](off))


def test_numbers_that_are_none_do_not_hold() -> None:
    assert Compared("", [np.nan], [1.0], 1.0).error == float("inf")
    assert Compared("", [1.0, 1.0], [1.0], 1.0).error == float("inf")


def test_times_are_those_of_bench_and_a_case_without_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = functools.cache(steps._bench)
    names = ["accept_drafts_kernel/M32-B4-N8", "x-lnc2"]
    row = json.dumps({"case": "x-lnc2", "us": 2.0, "device_us": 3.0})

    def two_cases(*arguments: str, lnc: int) -> Any:
        if arguments[0] == "-c":
            return real("-c", f"print({' '.join(names)!r})", lnc=lnc)
        assert lnc == (2 if arguments[-1] == "x-lnc2" else 1)
        return real(*arguments, lnc=lnc) if lnc == 1 else real("-c", f"print('{row}')", lnc=lnc)

    monkeypatch.setattr(steps, "_bench", two_cases)
    assert steps.time("x-lnc2", tmp_path) == {"simulated_us": 2.0, "device_us": 3.0, "ratio": 1.5}
    with pytest.raises(UserError, match="no device was there to measure"):
        steps.time(names[0], tmp_path)
    (outcome,) = check([_step("times")], lambda step: steps.times(tmp_path), tmp_path)
    assert outcome.state == "FAILED"
    said = f"1 of 2 cases were not measured, first {names[0]}: no device was there to measure"
    assert outcome.said == said
    assert outcome.facts["measured"] == {"x-lnc2": {"simulated_us": 2.0, "device_us": 3.0, "ratio": 1.5}}
    names.pop(0)
    (outcome,) = check([_step("times")], lambda step: steps.times(tmp_path), tmp_path)
    assert outcome.state == "held"
