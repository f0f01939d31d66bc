"""`python -m compile.device_check`: what only a trn2 machine can say, in the order of a first hour there.

Every check runs in its own process, so that a crash or a hang ends it and nothing else; report.json is written after
each. It is used from a checkout.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from compile.build import build, build_and_count
from compile.device_check.ids import compared, requests
from compile.device_check.kernels import CASES, errors
from compile.neuron import sdk
from compile.spec import BuildSpec, Recipe
from model.errors import UserError, run_cli
from model.nki.launches import LNC
from model.nki.table import run_on_tensors
from trnspec.bundle.opening import open_bundle
from trnspec.engine.config import engine_config
from trnspec.engine.engine import Engine
from trnspec.engine.request import Params, Request
from trnspec.runtime.runner import load_runner

_DEMO = Path(__file__).resolve().parents[2] / "demo"
# builds of the demo pair: two blocks a sequence, batch 4, k 7
BUILDS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"dtype": "bf16"}, "kernels": {"kernels": "nki"},
                                     "tp 2": {"tp": 2}}  # fmt: skip


@dataclass(frozen=True)
class Check:
    """A row of the table; ``run`` gets the report's folder and raises where the check does not hold.

    It is not reached where one that it needs did not hold, and ended after so many seconds.
    """

    name: str
    does: str
    good: str
    reports: str
    run: Callable[[Path], dict[str, Any]]
    needs: tuple[str, ...] = ()
    seconds: int = 3600


def environment(out: Path) -> dict[str, Any]:
    devices = json.loads(subprocess.check_output(["neuron-ls", "--json-output"]))
    return {"versions": sdk.versions(sdk.COMPILER, sdk.NKI, "nrtpy", "libneuronxla", "jax"), "devices": devices}


def kernel(name: str, out: Path) -> dict[str, Any]:
    if getattr(sys.modules["nki"], "__nkisim__", False):
        raise UserError("nki is nkisim here, which measures no device; install nki from AWS's package index")
    os.environ["NEURON_LOGICAL_NC_CONFIG"] = str(LNC)
    found = errors(name, run_on_tensors)
    if all(error <= bound for error, bound in found):
        return {"errors and bounds": found}
    raise UserError(f"errors and bounds of its results are {found}")


def demo(name: str, work: Path, **changes: Any) -> BuildSpec:
    """The spec of a build of the demo pair."""
    spec = BuildSpec(
        target=str(_DEMO / "target"), draft=str(_DEMO / "draft"), tp=1, k="7", batch=4, max_len=256, dtype="fp32",
        kernels="reference", out=str(work / f"neffs-{name}"), recipe=Recipe(toolchain="neuron"),
    )  # fmt: skip
    return replace(spec, **{**BUILDS[name], **changes})


def neffs(name: str, out: Path) -> dict[str, Any]:
    return build_and_count(demo(name, out)).cost()


def ids(platform: str, name: str, out: Path) -> dict[str, Any]:
    plain = {"kernels": "reference", "out": str(out / f"cpu-{name}"), "recipe": Recipe(toolchain="cpu")}
    on_cpu = open_bundle(build(demo(name, out, **plain)))
    bundle = open_bundle(Path(demo(name, out).out)) if platform == "neuron" else on_cpu
    sent, cpu = requests(bundle.spec), Engine(load_runner(on_cpu), engine_config(on_cpu))
    graphs, begin = load_runner(bundle, platform), time.perf_counter()
    found, seconds = Engine(graphs, engine_config(bundle)).run(sent), time.perf_counter() - begin
    graphs.close()

    def logprob(of: Sequence[int]) -> float:
        return cpu.run([Request(tuple(of), Params(), 1, prompt_logprobs=0)])[0].prompt_scores[-1].logprob

    return compared(bundle.spec, sent, found, cpu.run(sent), logprob) | {"seconds": seconds}


CHECKS = (
    Check("environment", "asks neuron-ls and the packages", "neuronx-cc, nki and nrtpy of one SDK; devices",
          "versions, devices", environment, seconds=120),
    *(Check(f"kernel {name}", "runs it at one small shape on two cores", "each result within its bound of the "
            "reference", "errors, bounds", partial(kernel, name), ("environment",), 900) for name in CASES),
    *(Check(f"neffs {name}", "compiles every graph of the demo pair", "a NEFF of each graph", "files, seconds, memory",
            partial(neffs, name), seconds=4 * 3600) for name in BUILDS),
    *(Check(f"neuron {name}", "answers requests with the NEFFs, by nrtpy", "the CPU's ids, but for ties; as many "
            "drafts accepted", "ids, margins of ties, steps, seconds", partial(ids, "neuron", name),
            ("environment", f"neffs {name}")) for name in BUILDS),
    Check("pjrt fp32", "answers them by the SDK's plugin for PJRT", "the same", "the same",
          partial(ids, "pjrt", "fp32"), ("environment",)),
)  # fmt: skip


def page() -> str:
    """The table of docs/device.md."""
    rows = [f"| `{c.name}` | {c.does} | {c.good} | {c.reports} |" for c in CHECKS]
    return "\n".join(["| check | does | a good result | reports |", "|---|---|---|---|", *rows]) + "\n"


def run_checks(checks: Sequence[Check], run: Callable[[Check], dict[str, Any]], out: Path) -> dict[str, Any]:
    """Check -> its state, why it did not hold, wall seconds and what it reports; all of it in report.json."""
    outcomes: dict[str, Any] = {check.name: {"state": "not reached"} for check in checks}
    for check in checks:
        begin, outcome = time.perf_counter(), outcomes[check.name]
        if lacking := [need for need in check.needs if outcomes[need]["state"] != "held"]:
            outcome["why"] = f"{', '.join(lacking)} did not hold"
        else:
            try:
                outcome |= {"reports": run(check), "state": "held"}
            except Exception as error:  # a check may fail in any way; the report says how
                why = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
                outcome |= {"state": "FAILED", "why": why}
            outcome["seconds"] = time.perf_counter() - begin
        print(f"{outcome['state']:<12}{check.name} {outcome.get('why', '')}".rstrip(), flush=True)
        (out / "report.json").write_text(json.dumps(outcomes, indent=1) + "\n", encoding="utf-8")
    return outcomes


def isolated(check: Check, out: Path, command: Sequence[str] = ()) -> dict[str, Any]:
    """What a check reports, run in its own process, whose output goes to a log."""
    child = command or [sys.executable, "-m", "compile.device_check", "--only", check.name, "--out", str(out)]
    try:
        done = subprocess.run(child, capture_output=True, text=True, timeout=check.seconds, check=False)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"it took longer than {check.seconds} s") from error
    log = out / f"{check.name.replace(', ', '+').replace(' ', '-')}.txt"
    log.write_text(done.stdout + done.stderr, encoding="utf-8")
    if done.returncode:
        last = (done.stderr.strip() or "it said nothing").splitlines()[-1].removeprefix("error: ")
        raise UserError(last if done.returncode > 0 else f"signal {-done.returncode} ended its process: {last}")
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def main(arguments: list[str]) -> None:
    """Run the checks and print a line for each; exit 1 if one did not hold."""
    parser = argparse.ArgumentParser(prog="python -m compile.device_check", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("device_check"), help="folder of the report")
    parser.add_argument("--only", choices=[check.name for check in CHECKS], help="run one check in this process")
    parser.add_argument("--page", action="store_true", help="print the table of docs/device.md and run nothing")
    options = parser.parse_args(arguments)
    if options.page:
        print(page(), end="")
        return
    if not options.only and not any(map(shutil.which, ("neuron-ls", "neuronx-cc"))):
        print(page())
        raise UserError("no check can run: neither neuron-ls nor neuronx-cc is here; run it on a trn2 machine")
    options.out.mkdir(parents=True, exist_ok=True)
    if options.only:
        print(json.dumps(next(check for check in CHECKS if check.name == options.only).run(options.out)))
        return
    outcomes = run_checks(CHECKS, lambda check: isolated(check, options.out.resolve()), options.out)
    if any(outcome["state"] != "held" for outcome in outcomes.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
