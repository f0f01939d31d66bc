"""`python -m compile.device_check`: what only a trn2 machine can say, in the order of a first hour there.

Every check runs in its own process, so that a crash or a hang ends it and nothing else; report.json is written after
each. It is used from a checkout.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from compile.device_check.checks import CHECKS, Check, page
from model.errors import UserError, run_cli

HELD, FAILED, NOT_REACHED = "held", "FAILED", "not reached"


def run_checks(checks: Sequence[Check], run: Callable[[Check], dict[str, Any]], out: Path) -> dict[str, dict[str, Any]]:
    """Check -> its state, why it did not hold, wall seconds and what it reports; all of it in report.json."""
    outcomes: dict[str, dict[str, Any]] = {check.name: {"state": NOT_REACHED} for check in checks}
    for check in checks:
        begin, outcome = time.perf_counter(), outcomes[check.name]
        if lacking := [need for need in check.needs if outcomes[need]["state"] != HELD]:
            outcome["why"] = f"{', '.join(lacking)} did not hold"
        else:
            try:
                outcome |= {"reports": run(check), "state": HELD}
            except Exception as error:  # a check may fail in any way; the report says how
                why = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
                outcome |= {"state": FAILED, "why": why}
            outcome["seconds"] = time.perf_counter() - begin
        print(f"{outcome['state']:<12}{check.name} {outcome.get('why', '')}".rstrip(), flush=True)
        out.mkdir(parents=True, exist_ok=True)
        (out / "report.json").write_text(json.dumps(outcomes, indent=1) + "\n", encoding="utf-8")
    return outcomes


def isolated(check: Check, out: Path, command: Sequence[str] = ()) -> dict[str, Any]:
    """What a check reports, run in its own process, whose output goes to logs/."""
    child = command or [sys.executable, "-m", "compile.device_check", "--only", check.name, "--out", str(out)]
    log = out / "logs" / f"{check.name.replace(', ', '+').replace(' ', '-')}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(child, capture_output=True, text=True, timeout=check.seconds, check=False)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"it took longer than {check.seconds} s") from error
    log.write_text(done.stdout + done.stderr, encoding="utf-8")
    if done.returncode:
        last = (done.stderr.strip() or "it said nothing").splitlines()[-1].removeprefix("error: ")
        raise UserError(last if done.returncode > 0 else f"signal {-done.returncode} ended its process: {last}")
    reported: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return reported


def main(arguments: list[str]) -> None:
    """Run the checks and print a line for each; exit 1 if one did not hold."""
    parser = argparse.ArgumentParser(prog="python -m compile.device_check", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("device_check"), help="folder of the report")
    parser.add_argument("--only", choices=[check.name for check in CHECKS], help="run one check in this process")
    parser.add_argument("--page", action="store_true", help="print the table of docs/device.md and run nothing")
    options = parser.parse_args(arguments)
    if options.page:
        print(page(), end="")
    elif options.only:
        options.out.mkdir(parents=True, exist_ok=True)
        print(json.dumps(next(c for c in CHECKS if c.name == options.only).run(options.out)))
    elif not any(map(shutil.which, ("neuron-ls", "neuronx-cc"))):
        print(page())
        raise UserError("no check can run: neither neuron-ls nor neuronx-cc is here; run it on a trn2 machine")
    else:
        outcomes = run_checks(CHECKS, lambda check: isolated(check, options.out.resolve()), options.out)
        if any(outcome["state"] != HELD for outcome in outcomes.values()):
            raise SystemExit(1)


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
