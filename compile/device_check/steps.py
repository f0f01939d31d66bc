"""The steps of the device check: each returns facts for the report, or raises if it does not hold.

Only the steps that trace or run our own graphs import jax and torchax: an SDK with torch only has neither.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

from compile.device_check.kernels import CASES
from compile.device_check.routes import demo
from compile.neuron import sdk as toolchain
from compile.neuron.flags import LNC, flags_of
from compile.neuron.sdk import Level, nxdi_graphs
from compile.spec import BuildSpec, Recipe
from model.errors import UserError
from model.graph_io import zeros_of
from trnspec.bundle.compiler_flags import FUSED
from trnspec.bundle.opening import open_bundle
from trnspec.bundle.plan import make_plan

_DEMO = Path(__file__).resolve().parents[2] / "demo"
_LNC_VARIABLE = "NEURON_LOGICAL_NC_CONFIG"


def devices(work: Path) -> dict[str, Any]:
    """The devices of this machine, and the compiler."""
    found = toolchain.require(Level.COMPILER, "the device check")
    return {"versions": found.versions, "devices": _devices()}


def versions(work: Path) -> dict[str, Any]:
    """The packages that model.pt needs."""
    return {"versions": toolchain.require(Level.FULL, "model.pt").versions}


def _devices() -> Any:
    try:
        listed = subprocess.run(["neuron-ls", "--json-output"], capture_output=True, text=True, check=True)
        return json.loads(listed.stdout)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        raise UserError(f"neuron-ls names no device ({type(error).__name__}); check the driver") from error


def kernel(name: str, work: Path) -> dict[str, Any]:
    """One kernel's case on the device; UserError names each result beyond its bound, with its error."""
    if getattr(sys.modules.get("nki"), "__nkisim__", False):
        raise UserError("nki is nkisim here, which measures no device; install nki from AWS's package index")
    os.environ[_LNC_VARIABLE] = str(LNC)
    results = CASES[name](lambda launched: launched)
    wrong = [f"{r.what} is off by {r.error:.3g}, the bound is {r.bound:.3g}" for r in results if not r.error <= r.bound]
    if wrong:
        raise UserError("; ".join(wrong))
    return {r.what: {"error": r.error, "bound": r.bound} for r in results}


def neff(work: Path) -> dict[str, Any]:
    """The demo pair's fused graph through neuronx-cc alone."""
    from compile.graph.trace import lower_graph  # noqa: PLC0415 (jax)

    plan = make_plan(demo("tp 1", work).bundle)
    hlo, made = work / "step.hlo.pb", work / "step.neff"
    hlo.write_bytes(lower_graph(plan.spec, nxdi_graphs(plan, FUSED)[0]))
    begin = perf_counter()
    toolchain.compile_hlo(hlo, made, work / "log-step.txt", flags_of({})[FUSED])
    return {"bytes": made.stat().st_size, "seconds": perf_counter() - begin}


def plugin(work: Path) -> dict[str, Any]:
    """The devices of the SDK's plugin that JAX sees, one graph of ours compiled and run by it, stored and loaded."""
    from jaxlib import xla_client  # noqa: PLC0415

    from compile.build import build  # noqa: PLC0415 (jax)
    from trnspec.runtime.xla import XlaRunner  # noqa: PLC0415

    spec = demo("k 0", work, "on-cpu-")
    held = XlaRunner(open_bundle(build(replace(spec, recipe=Recipe(toolchain="cpu")))), "neuron")
    graph = min(held.bundle.graphs, key=lambda g: (not g.key.is_prefill, g.key.bucket, g.key.rows))
    begin = perf_counter()
    held.prepare(graph.key)
    seconds, executable = perf_counter() - begin, held._executables[graph.key]
    devices = held._devices
    stored = executable.serialize()
    listed, client = xla_client.DeviceList(tuple(devices)), devices[0].client
    held._executables[graph.key] = client.deserialize_executable(stored, listed, None)
    held.launch(graph.key, zeros_of(graph.inputs))
    # a plugin may say it in several lines
    version = " ".join(client.platform_version.split())
    facts = {"device": str(devices[0]), "version": version, "compile_seconds": seconds, "stored": len(stored)}
    held.close()
    return facts


def time(case: str, work: Path) -> dict[str, Any]:
    """One case of bench.kernels, in its own process: compile may not import bench."""
    done = _bench("-m", "bench.kernels", "--json", "--only", case, lnc=2 if case.endswith("-lnc2") else 1)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    row = next((r for r in rows if r["case"] == case and "device_us" in r), None)
    if row is None:
        raise UserError((done.stderr.strip() or "no device was there to measure").splitlines()[-1])
    return {"simulated_us": row["us"], "device_us": row["device_us"], "ratio": row["device_us"] / row["us"]}


def times(work: Path) -> dict[str, Any]:
    """Every case of bench.kernels."""
    program = "from bench.kernels.cases import CASES; print('\\n'.join(case.full_name for case in CASES))"
    listed = _bench("-c", program, lnc=1)
    measured, failed = {}, []
    for name in listed.stdout.split():
        try:
            measured[name] = time(name, work)
        except UserError as error:
            failed.append(f"{name}: {error}")
    said = (
        f"{len(failed)} of {len(failed) + len(measured)} cases were not measured, first {failed[0]}" if failed else ""
    )
    return {"failed": said, "measured": measured, "not_measured": failed}


def _bench(*arguments: str, lnc: int) -> subprocess.CompletedProcess[str]:
    # a launch must have as many cores as the runtime
    environment = os.environ | {_LNC_VARIABLE: str(lnc)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=_DEMO.parent, env=environment, capture_output=True, text=True, check=False)


def full(work: Path) -> dict[str, Any]:
    """The graphs of Qwen3-32B and Qwen3-1.7B at tp 32, compiled without weights."""
    from compile.build import build  # noqa: PLC0415 (jax)

    path = build(BuildSpec(out=str(work / "full"), recipe=Recipe(toolchain="neuron")))
    return {"files": {n: e.bytes for n, e in open_bundle(path).files.items()}}
