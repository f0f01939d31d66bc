"""`python -m compile.device_check`: on a trn2 machine, everything that no other machine can check.

Each step runs in its own process, so that a crash or a hang ends that step only. The report is written again after
every step and says of each: held, failed, or not reached. A Python without torch can list the steps. It is used from a
checkout: the wheel does not contain it.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from compile.device_check.questions import FAILED, HELD, NOT_REACHED, page, table
from compile.device_check.table import STEPS, CheckStep
from model.errors import UserError, run_cli


@dataclass(frozen=True)
class Outcome:
    """A step's state (held, failed or not reached), its message if it did not hold, wall seconds, facts."""

    step: str
    what: str
    state: str
    said: str
    seconds: float
    facts: dict[str, Any] = field(default_factory=dict)


def check(steps: Sequence[CheckStep], run: Callable[[CheckStep], dict[str, Any]], out: Path) -> list[Outcome]:
    """Run every step whose needs held, and write the report after each; waiting steps are not reached in it."""
    outcomes, waiting = list[Outcome](), [_not_reached(step, "the run has not come to it") for step in steps]
    for step in steps:
        outcome = _outcome(step, run, {o.step for o in outcomes if o.state != HELD})
        outcomes.append(outcome)
        print(f"{outcome.state:<12}{step.name}{': ' if outcome.said else ''}{outcome.said}", flush=True)
        write_report([*outcomes, *waiting[len(outcomes) :]], out)
    return outcomes


def _not_reached(step: CheckStep, why: str) -> Outcome:
    return Outcome(step.name, step.what, NOT_REACHED, why, 0.0)


def _outcome(step: CheckStep, run: Callable[[CheckStep], dict[str, Any]], not_held: set[str]) -> Outcome:
    begin, said, facts = time.perf_counter(), "", {}
    if missing := not_held & set(step.needs):
        return _not_reached(step, f"{', '.join(sorted(missing))} did not hold")
    try:
        facts = run(step)
        said = facts.pop("failed", "")
    except Exception as error:  # a step may fail in any way; the report says how
        said = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    state = FAILED if said else HELD
    return Outcome(step.name, step.what, state, said, time.perf_counter() - begin, facts)


def isolated(step: CheckStep, out: Path, command: list[str] | None = None) -> dict[str, Any]:
    """Run a step in its own process; its whole output is kept in logs/."""
    child = command or [sys.executable, "-m", "compile.device_check", "--only", step.name, "--out", str(out)]
    log = out / "logs" / f"{step.name.replace(', ', '+').replace(' ', '-')}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(child, capture_output=True, text=True, timeout=step.seconds, check=False)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"it took longer than {step.seconds} s") from error
    log.write_text(done.stdout + done.stderr, encoding="utf-8")
    if done.returncode:
        last = (done.stderr.strip() or "it said nothing").splitlines()[-1].removeprefix("error: ")
        raise UserError(last if done.returncode > 0 else f"its process was ended by signal {-done.returncode}: {last}")
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


def write_report(outcomes: list[Outcome], out: Path) -> Path:
    """report.json and report.md; returns the latter."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.json").write_text(json.dumps([asdict(o) for o in outcomes], indent=1) + "\n", encoding="utf-8")
    counted = ", ".join(f"{sum(o.state == s for o in outcomes)} {s.lower()}" for s in (HELD, FAILED, NOT_REACHED))
    lines = [
        f"# Device check: {counted}",
        "",
        "| step | question | answer | seconds (wall) | said |",
        "|---|---|---|---|---|",
    ]
    for o in outcomes:
        said = o.said.replace("|", "\\|").replace("\n", " ")
        lines.append(f"| {o.step} | {o.what} | {o.state} | {o.seconds:.1f} | {said} |")
    for o in outcomes:
        if o.facts:
            lines += ["", f"## {o.step}", "", f"{o.what}.", "", "```", json.dumps(o.facts, indent=1), "```"]
    lines += ["", "## Every question of docs/device_checks.md", "", *table({o.step: o.state for o in outcomes})]
    (out / "report.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return out / "report.md"


def main(arguments: list[str], steps: tuple[CheckStep, ...] = STEPS) -> None:
    """Run the steps and write the report, the last line of stdout; exit 1 if one did not hold."""
    parser = argparse.ArgumentParser(prog="python -m compile.device_check", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("device_check"), help="folder of the report")
    parser.add_argument("--full", action="store_true", help="compile the 32B + 1.7B graphs too, which takes hours")
    parser.add_argument("--only", help="run one step in this process and print its facts")
    parser.add_argument("--page", action="store_true", help="print docs/device_checks.md and run nothing")
    options = parser.parse_args(arguments)
    named = {step.name: step for step in steps}
    if options.page:
        print(page(), end="")
        return
    if options.only:
        if options.only not in named:
            raise UserError(f"there is no step {options.only!r}; the steps are {', '.join(named)}")
        options.out.mkdir(parents=True, exist_ok=True)
        print(json.dumps(run_step(named[options.only], options.out)))
        return
    if why := _why_not():
        print("On a trn2 machine with the Neuron SDK this command would ask:")
        print("\n".join(f"{number:>3}. {step.name}: {step.what}" for number, step in enumerate(steps, 1)))
        raise UserError(why)
    chosen = [step for step in steps if options.full or step.name != "full"]
    outcomes = check(chosen, lambda step: isolated(step, options.out.resolve()), options.out)
    if left := [step for step in steps if step not in chosen]:
        write_report(
            [*outcomes, *(_not_reached(step, "DEVICE_CHECK=--full asks for it") for step in left)], options.out
        )
    print(options.out / "report.md")
    if any(o.state != HELD for o in outcomes):
        raise SystemExit(1)


def function_of(step: CheckStep) -> Callable[..., dict[str, Any]]:
    """The function of a step."""
    module, _, name = step.function.rpartition(".")
    # this Python may not have the packages that a step needs
    found: Callable[..., dict[str, Any]] = getattr(
        importlib.import_module(f"compile.device_check.{module or 'steps'}"), name
    )
    return found


def run_step(step: CheckStep, out: Path) -> dict[str, Any]:
    """The facts of a step, run here."""
    return function_of(step)(*([step.argument] if step.argument else []), out)


def _why_not() -> str:
    """Why this machine can check nothing, in one sentence."""
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        return (
            f"the device check needs {', '.join(missing)}, which this Python does not have; on a trn2 machine run "
            "make device-install DEVICE_PYTHON=python3, with the Python that has the Neuron SDK"
        )
    toolchain = importlib.import_module("compile.neuron.sdk")
    try:
        toolchain.require(toolchain.Level.COMPILER, "the device check")
    except UserError as error:
        return str(error)
    return ""


_NEEDED = ("torch", "numpy", "safetensors", "tokenizers", "ml_dtypes")


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
