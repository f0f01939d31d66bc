"""The checks of a first hour on a trn2 machine, in order: what each does, what is good, what it reports."""

from __future__ import annotations

import functools
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import nki

from compile.build import build, build_and_count
from compile.device_check.ids import answers, compared, requests
from compile.device_check.kernels import CASES, errors, on_device
from compile.neuron import sdk
from compile.spec import BuildSpec, Recipe
from model.errors import UserError
from model.nki.launches import LNC
from trnspec.bundle.opening import open_bundle

_ROOT = Path(__file__).resolve().parents[2]
_HOUR = 3600
# builds of the demo pair: two buckets, batch 4, k 7
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
    seconds: int = _HOUR


def environment(out: Path) -> dict[str, Any]:
    try:
        done = subprocess.run(["neuron-ls", "--json-output"], capture_output=True, text=True, check=True)
        devices = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        raise UserError(f"neuron-ls names no device ({type(error).__name__}); check the driver") from error
    versions = sdk.versions(sdk.COMPILER, sdk.NKI, "nrtpy", "libneuronxla", "jax", "torch")
    return {"versions": versions, "devices": devices}


def kernel(name: str, out: Path) -> dict[str, Any]:
    if getattr(nki, "__nkisim__", False):
        raise UserError("nki is nkisim here, which measures no device; install nki from AWS's package index")
    os.environ["NEURON_LOGICAL_NC_CONFIG"] = str(LNC)
    found = errors(name, on_device)
    if any(error > bound for error, bound in found):
        raise UserError(f"errors and bounds of its results are {found}")
    return {"errors and bounds": found}


def demo(name: str, out: Path, **changes: Any) -> BuildSpec:
    """The spec of a build of the demo pair."""
    spec = BuildSpec(
        target=str(_ROOT / "demo/target"), draft=str(_ROOT / "demo/draft"), tp=1, k="7", batch=4, max_len=256,
        dtype="fp32", out=str(out / f"neffs-{name}"), recipe=Recipe(toolchain="neuron"),
    )  # fmt: skip
    return replace(spec, **{**BUILDS[name], **changes})


def neffs(name: str, out: Path) -> dict[str, Any]:
    return build_and_count(demo(name, out)).cost()


def ids(platform: str, name: str, out: Path) -> dict[str, Any]:
    plain = {"kernels": "reference", "out": str(out / f"cpu-{name}"), "recipe": Recipe(toolchain="cpu")}
    spec, on_cpu = demo(name, out), open_bundle(build(demo(name, out, **plain)))
    bundle = open_bundle(Path(spec.out)) if platform == "nrt" else on_cpu
    asked, begin = requests(bundle.spec), time.perf_counter()
    found, seconds = answers(bundle, platform, asked), time.perf_counter() - begin
    facts = compared(Path(spec.target), spec.dtype, asked, found, answers(on_cpu, "cpu", asked))
    return facts | {"seconds": seconds}


def times(out: Path) -> dict[str, Any]:
    # compile may not import bench
    command = [sys.executable, "-m", "bench.kernels", "--json"]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    measured = {row["case"]: [row["us"], row["device_us"]] for row in rows if "device_us" in row}
    if not measured:
        raise UserError((done.stderr.strip() or "bench.kernels measured no device").splitlines()[-1])
    return {"simulated and measured us": measured}


CHECKS = (
    Check("environment", "asks neuron-ls and the packages", "neuronx-cc, nki and nrtpy of one SDK; devices",
          "versions, devices", environment, seconds=120),
    *(Check(f"kernel {name}", "runs it at one small shape on two cores", "each result within its bound of the "
            "reference", "errors, bounds", functools.partial(kernel, name), ("environment",), 900) for name in CASES),
    *(Check(f"neffs {name}", "compiles every graph of the demo pair", "a NEFF of each graph", "files, seconds, memory",
            functools.partial(neffs, name), seconds=4 * _HOUR) for name in BUILDS),
    *(Check(f"nrt {name}", "answers requests with the NEFFs, by nrtpy", "the CPU's ids, but for ties; as many drafts "
            "accepted", "ids, margins of ties, steps, seconds", functools.partial(ids, "nrt", name),
            ("environment", f"neffs {name}")) for name in BUILDS),
    Check("neuron fp32", "answers them by the SDK's plugin for PJRT", "the same", "the same",
          functools.partial(ids, "neuron", "fp32"), ("environment",)),
    Check("times", "runs the cases of bench.kernels", "measured near simulated times", "both times of each case", times,
          ("environment",), 4 * _HOUR),
)  # fmt: skip


def page() -> str:
    """The table of docs/device.md; checks that do the same thing are one row."""
    rows = ["| check | does | a good result | reports |", "|---|---|---|---|"]
    for key, group in itertools.groupby(CHECKS, lambda check: (check.does, check.good, check.reports)):
        rows.append(f"| {', '.join(f'`{check.name}`' for check in group)} | {' | '.join(key)} |")
    return "\n".join(rows) + "\n"
