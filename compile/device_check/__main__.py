"""`python -m compile.device_check`: on a trn2 machine, everything that no other machine could check.

Each step runs in a process of its own, so that one that crashes or hangs does not take the rest with it.
The report is written again after every step.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from compile.device_check.steps import STEPS, Step
from compile.neuron import sdk as toolchain
from compile.neuron.sdk import Level
from model.errors import UserError, run_cli


@dataclass(frozen=True)
class Outcome:
    """What became of a step: whether it held, what it said if not, wall seconds, facts."""

    step: str
    what: str
    held: bool
    said: str
    seconds: float
    facts: dict[str, Any] = field(default_factory=dict)


def check(steps: Iterable[Step], run: Callable[[Step], dict[str, Any]], out: Path) -> list[Outcome]:
    """Run every step, whatever became of those before, and keep the report of all so far."""
    outcomes: list[Outcome] = []
    for step in steps:
        begin, said, facts = time.perf_counter(), "", {}
        try:
            facts = run(step)
            said = facts.pop("failed", "")
        except Exception as error:  # a step may fail in any way; the report says how
            said = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        outcomes.append(Outcome(step.name, step.what, not said, said, time.perf_counter() - begin, facts))
        print(f"{'held' if not said else 'FAILED':<7}{step.name}{': ' if said else ''}{said}", flush=True)
        write_report(outcomes, out)
    return outcomes


def isolated(step: Step, out: Path, command: list[str] | None = None) -> dict[str, Any]:
    """Run a step in a process of its own; its whole output is kept in logs/."""
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
    held = sum(o.held for o in outcomes)
    lines = [f"# Device check: {held} of {len(outcomes)} steps held", "", "| step | held | seconds (wall) | said |"]
    lines += ["|---|---|---|---|"]
    for o in outcomes:
        said = o.said.replace("|", "\\|").replace("\n", " ")
        lines.append(f"| {o.step} | {'yes' if o.held else 'no'} | {o.seconds:.1f} | {said} |")
    for o in outcomes:
        if o.facts:
            lines += ["", f"## {o.step}", "", f"{o.what}.", "", "```", json.dumps(o.facts, indent=1), "```"]
    (out / "report.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return out / "report.md"


def main(arguments: list[str], steps: tuple[Step, ...] = STEPS) -> None:
    """Run the steps and write the report, the last line of stdout; exit 1 if one did not hold."""
    parser = argparse.ArgumentParser(prog="python -m compile.device_check", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("device_check"), help="folder of the report")
    parser.add_argument("--full", action="store_true", help="compile the 32B + 1.7B graphs too, which takes hours")
    parser.add_argument("--only", help="run one step in this process and print its facts")
    options = parser.parse_args(arguments)
    named = {step.name: step for step in steps}
    if options.only:
        if options.only not in named:
            raise UserError(f"there is no step {options.only!r}; the steps are {', '.join(named)}")
        options.out.mkdir(parents=True, exist_ok=True)
        print(json.dumps(named[options.only].run(options.out)))
        return
    chosen = [step for step in steps if options.full or step.name != "full"]
    try:
        toolchain.require(Level.COMPILER, "the device check")
    except UserError:
        print("On a trn2 machine with the Neuron SDK this command would:")
        print("\n".join(f"{number:>3}. {step.what}" for number, step in enumerate(steps, 1)))
        raise
    outcomes = check(chosen, lambda step: isolated(step, options.out.resolve()), options.out)
    print(options.out / "report.md")
    if not all(o.held for o in outcomes):
        raise SystemExit(1)


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
