"""`python -m compile.device_check`: what only a trn2 machine can say, in the order of a first hour there.

Every check runs in its own process, so that a crash or a hang ends it and nothing else. What a result means and what to
report is printed with it: the table of docs/device.md. It is used from a checkout.
"""

import argparse
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from compile.device_check.ids import BUILDS, build_neffs, compare_ids
from compile.device_check.kernels import CASES, compare_kernel
from compile.device_check.probes import PROBES, TIMED, bench, compile_probe, psum_chains, run_probe
from compile.neuron import sdk
from compile.recipes import ROOT
from model.errors import UserError, command_line, run_cli
from model.nki.launches import LNC


@dataclass(frozen=True)
class Check:
    """``run`` gets the report's folder, returns what it saw, and raises where the check fails.

    It is skipped where one that it needs did not pass, and ended after so many seconds. Its first word names its
    row of docs/device.md. `by_nrtpy` chooses its Python, since nki and nrtpy may not share an environment.
    """

    name: str
    run: Callable[[Path], dict[str, Any]]
    needs: tuple[str, ...] = ()
    seconds: int = 900
    by_nrtpy: bool = False


def environment(out: Path) -> dict[str, Any]:
    if not shutil.which("neuron-ls"):
        raise UserError("neuron-ls is not on PATH; install aws-neuronx-tools, or run this on a trn2 machine")
    devices = json.loads(subprocess.check_output(["neuron-ls", "--json-output"]))
    if not devices or any(device.get("neuron_processes") for device in devices):
        raise UserError(f"neuron-ls lists no free device ({devices}); end the processes that use them")
    if why := sdk.missing(launches_kernels=True):
        raise UserError(why)
    return {"devices": len(devices)} | sdk.versions(sdk.COMPILER, sdk.NKI, "jax", "torch")


def runtime(out: Path) -> dict[str, Any]:
    # vendor seam
    if not hasattr(importlib.import_module("nrtpy").NrtpyModel, "benchmark"):
        raise UserError("nrtpy has no benchmark; install nrtpy of SDK 2.32 or later from AWS's package index")
    return sdk.versions("nrtpy")


CHECKS = (
    Check("environment", environment, seconds=120),
    Check("runtime", runtime, seconds=120, by_nrtpy=True),
    Check("psum", psum_chains, ("environment",)),
    *(check for name in PROBES for check in (
        Check(f"compile {name}", partial(compile_probe, name)),
        Check(f"run {name}", partial(run_probe, name), ("runtime", f"compile {name}"), 300, by_nrtpy=True),
        Check(f"reload {name}", partial(run_probe, name), (f"run {name}",), 300, by_nrtpy=True),
    )),
    *(Check(f"kernel {name}", partial(compare_kernel, name), ("environment",)) for name in CASES),
    *(check for name in BUILDS for check in (
        Check(f"build {name}", partial(build_neffs, name), seconds=7200),
        Check(f"ids {name}", partial(compare_ids, name), ("runtime", f"build {name}"), 1800, by_nrtpy=True),
    )),
    *(check for name in TIMED for check in (
        Check(f"bench {name}", partial(bench, "run", name), ("environment",)),
        Check(f"time {name}", partial(bench, "time", name), ("runtime", f"bench {name}"), by_nrtpy=True),
    )),
)  # fmt: skip


def texts() -> dict[str, list[str]]:
    """First word of a check -> what it does, what it means if it passes and if it fails, what to report."""
    lines = (ROOT / "docs/device.md").read_text(encoding="utf-8").splitlines()
    rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `"))
    return {first.split("`")[1].split()[0]: rest for first, *rest in rows}


def outcome_of(check: Check, out: Path) -> dict[str, Any]:
    """The state of a check, and what it saw."""
    try:
        return {"state": "passed", "saw": ", ".join(f"{name} {fact}" for name, fact in check.run(out).items())}
    except KeyboardInterrupt:
        return {"state": "FAILED", "saw": f"it was ended, after {check.seconds} s by its alarm"}
    except Exception as error:  # a check may fail in any way
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        return {"state": "FAILED", "saw": f"{kind}{error}"}


def isolated(check: Check, out: Path, python: str) -> dict[str, Any]:
    """The outcome of a check in a process of its own, whose last line it is."""
    command = [python, "-m", "compile.device_check", "--out", str(out), "--in-this-process", check.name]
    try:
        # its alarm is earlier, and ends its ranks too
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=check.seconds + 60, check=False)
    except subprocess.TimeoutExpired as error:
        return {"state": "FAILED", "saw": f"it hangs after {error.timeout:.0f} s"}
    if done.returncode:
        return {"state": "FAILED", "saw": f"its process ended with status {done.returncode}, a signal if below 0"}
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def run_checks(checks: Sequence[Check], run: Callable[[Check], dict[str, Any]], out: Path) -> bool:
    """Whether all of them pass. Prints each, then a table; report.json has their outcomes and those of earlier runs."""
    file, known = out / "report.json", texts()
    outcomes = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    for check in checks:
        does, if_passed, if_failed, report = known[check.name.split()[0]]
        print(f"{check.name}: {does}", flush=True)
        begin, lacking = time.monotonic(), [n for n in check.needs if outcomes.get(n, {}).get("state") != "passed"]
        outcome = {"state": "skipped", "saw": f"{', '.join(lacking)} did not pass"} if lacking else run(check)
        outcomes[check.name] = outcome | {"seconds": round(time.monotonic() - begin)}
        print(f"  {outcome['state']}; saw: {outcome['saw']}")
        if not lacking:
            print(
                f"  means: {if_passed if outcome['state'] == 'passed' else if_failed}\n  report: {report}", flush=True
            )
        file.write_text(json.dumps(outcomes, indent=1) + "\n", encoding="utf-8")
    for check in checks:
        print(f"{outcomes[check.name]['state']:<12}{outcomes[check.name]['seconds']:>6} s  {check.name}")
    return all(outcomes[check.name]["state"] == "passed" for check in checks)


def main(arguments: list[str]) -> None:
    """Run the checks; exit 1 if one did not pass."""
    by_name = {check.name: check for check in CHECKS}
    does = "Run the checks of a first hour on a trn2 machine, from a checkout; docs/device.md explains each."
    parser = command_line("compile.device_check", does, "--nrtpy .venv-nrtpy/bin/python")
    parser.add_argument("--out", type=Path, default=Path("device_check"), help="folder of the report")
    parser.add_argument(
        "--only", nargs="*", choices=by_name, metavar="CHECK", help="run these checks again; without one, list them"
    )
    parser.add_argument("--nrtpy", metavar="PYTHON", default=sys.executable, help="the Python that has nrtpy")
    parser.add_argument("--in-this-process", choices=by_name, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    out, chosen = options.out.resolve(), by_name if options.only is None else options.only
    if not chosen:
        print("\n".join(by_name))
    elif options.in_this_process:
        check = by_name[options.in_this_process]
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.alarm(check.seconds)
        print(json.dumps(outcome_of(check, out)))
    else:
        out.mkdir(parents=True, exist_ok=True)
        os.environ["NEURON_LOGICAL_NC_CONFIG"], python = str(LNC), (sys.executable, options.nrtpy)
        if not run_checks([by_name[n] for n in chosen], lambda c: isolated(c, out, python[c.by_nrtpy]), out):
            raise SystemExit(1)


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
