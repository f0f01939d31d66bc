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

import torch
from safetensors.torch import load_file, save_file

from compile.device_check.kernels import CASES
from compile.device_check.requests import NXDI_REQUESTS, serve, shard_of
from compile.neuron import config
from compile.neuron import sdk as toolchain
from compile.neuron.eager import EagerRanks
from compile.neuron.flags import FUSED, LNC, PREFILL, flags_of
from compile.neuron.sdk import Level, nxdi_graphs
from compile.spec import BuildSpec, Recipe
from model.bundle.opening import open_bundle
from model.bundle.plan import make_plan
from model.bundle.weights import shard_file
from model.errors import UserError

_DEMO = Path(__file__).resolve().parents[2] / "demo"
_LONGEST = 128
_LNC_VARIABLE = "NEURON_LOGICAL_NC_CONFIG"


def versions(work: Path) -> dict[str, Any]:
    """The SDK's packages and the devices of this machine."""
    found = toolchain.require(Level.FULL, "the device check")
    return {"versions": found.versions, "devices": _devices()}


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


def _demo(work: Path, **changes: Any) -> BuildSpec:
    target, draft = str(_DEMO / "target"), str(_DEMO / "draft")
    spec = BuildSpec(
        target=target, draft=draft, tp=1, k="3", batch=1, max_len=_LONGEST,
        out=str(work / "demo"), dtype="fp32", recipe=Recipe(toolchain="neuron"),
    )  # fmt: skip
    return replace(spec, **changes)


def neff(work: Path) -> dict[str, Any]:
    """The demo pair's fused graph through neuronx-cc alone."""
    from compile.graph.trace import lower_graph  # noqa: PLC0415 (jax)

    plan = make_plan(_demo(work).bundle)
    hlo, made = work / "step.hlo.pb", work / "step.neff"
    hlo.write_bytes(lower_graph(plan.spec, nxdi_graphs(plan, FUSED)[0]))
    begin = perf_counter()
    toolchain.compile_hlo(hlo, made, work / "log-step.txt", flags_of({})[FUSED])
    return {"bytes": made.stat().st_size, "seconds": perf_counter() - begin}


def model(name: str, work: Path) -> dict[str, Any]:
    """model.pt of a build of the demo pair, its shards and neuron_config.json."""
    spec = _of_build(name, work)
    toolchain.require(Level.FULL, "model.pt", spec.kernels)
    plan, folder, flags = make_plan(spec.bundle), Path(spec.out), flags_of({})
    (folder / "weights").mkdir(parents=True, exist_ok=True)
    for rank in range(spec.tp):
        save_file(
            {n: t.contiguous() for n, t in shard_of(plan, spec.checkpoints, rank).items()}, folder / shard_file(rank)
        )
    (folder / "neuron_config.json").write_text(config.render(spec.bundle), encoding="utf-8")
    begin = perf_counter()
    toolchain.build_model(plan, folder / "model.pt", folder / "work", flags)
    logs = sorted(str(log.relative_to(folder)) for log in folder.rglob("log-neuron-cc.txt"))
    return {"bytes": (folder / "model.pt").stat().st_size, "seconds": perf_counter() - begin, "logs": logs}


# changes of the demo pair's spec, by the build's name in the table
_CHANGES: dict[str, dict[str, Any]] = {
    "tp 1, batch 2": {},
    "tp 2": {"tp": 2},
    "k 0": {"k": "0", "draft": BuildSpec.draft},
    "bf16": {"dtype": "bf16"},
    "draft groups": {"tp": 2, "recipe": Recipe(draft_tp=1, toolchain="neuron")},
    "kernels": {"kernels": "nki", "batch": 1},
}


def _of_build(name: str, work: Path) -> BuildSpec:
    folder = name.replace(", ", "+").replace(" ", "-")
    return _demo(work, batch=2, out=str(work / folder), **_CHANGES[name])


def requests(name: str, work: Path) -> dict[str, Any]:
    """The requests of NxDI's host to the model of a build; every token must equal the eager module's on the CPU."""
    spec = _of_build(name, work)
    shards = [load_file(Path(spec.out) / shard_file(rank)) for rank in range(spec.tp)]
    device, plan = toolchain.run_model(Path(spec.out) / "model.pt", shards), make_plan(spec.bundle)
    reference = make_plan(replace(spec, kernels="reference").bundle)
    eager = EagerRanks(reference, toolchain.nxdi_tags(plan), _plain(spec))
    visible = 4 if spec.bundle.k else 1
    found = serve(plan, lambda tag, inputs: [t.cpu().numpy() for t in device(*inputs)[:visible]])
    expected = serve(plan, lambda tag, inputs: [t.numpy() for t in eager(tag, inputs)])
    for request, one, other in zip(NXDI_REQUESTS, found, expected, strict=True):
        if one != other:
            same = sum(one[: i + 1] == other[: i + 1] for i in range(len(other)))
            raise UserError(f"{request}: the first {same} of {len(other)} tokens are the CPU's, the next is not")
    return {"requests": list(NXDI_REQUESTS), "tokens": sum(map(len, found)), "identical_to_cpu": True}


def _plain(spec: BuildSpec) -> list[dict[str, torch.Tensor]]:
    """The shards in the reference's layout: not packed."""
    plan = make_plan(replace(spec, kernels="reference").bundle)
    return [shard_of(plan, spec.checkpoints, rank) for rank in range(spec.tp)]


def warm(name: str, work: Path) -> dict[str, Any]:
    """The same model again over a warm compiler cache, which may write no log."""
    spec = _of_build(name, work)
    folder = work / "again"
    folder.mkdir(exist_ok=True)
    begin = perf_counter()
    toolchain.build_model(make_plan(spec.bundle), folder / "model.pt", folder / "work", flags_of({}))
    return {"seconds": perf_counter() - begin, "logs": len(list(folder.rglob("log-neuron-cc.txt")))}


def nxdi(name: str, work: Path) -> dict[str, Any]:
    """NxDI's application of the bundle: its own load, a prompt and a step through its own forward."""
    spec = _of_build(name, work)
    shards = [load_file(Path(spec.out) / shard_file(rank)) for rank in range(spec.tp)]
    prompt, _ = NXDI_REQUESTS["greedy"]
    found = toolchain.nxdi_tokens(Path(spec.out), prompt)
    plan = make_plan(spec.bundle)
    eager = EagerRanks(plan, toolchain.nxdi_tags(plan), shards)
    expected = serve(plan, lambda tag, inputs: [t.numpy() for t in eager(tag, inputs)])[0][: len(found)]
    if found != expected:
        raise UserError(f"NxDI's forward gives the tokens {found} after the prompt, the CPU {expected}")
    return {"tokens": found}


def plugin(work: Path) -> dict[str, Any]:
    """The devices of the SDK's plugin that JAX sees, and whether it compiles a graph of ours."""
    from compile.build import build  # noqa: PLC0415 (jax)
    from model.serving import pjrt  # noqa: PLC0415

    bundle = open_bundle(build(_demo(work, recipe=Recipe(toolchain="cpu"), out=str(work / "on-cpu"))))
    graph, devices = nxdi_graphs(bundle.plan, PREFILL)[0], pjrt.devices_of("neuron", 1)
    begin = perf_counter()
    pjrt.compile_hlo(bytes(bundle.read(graph.file)), devices, graph)
    return {"device": str(devices[0]), "compile_seconds": perf_counter() - begin}


def graphs(work: Path) -> dict[str, Any]:
    """The bundle's graphs on the plugin, with seeds, min-p, filters and to the context's end, give the CPU's tokens."""
    from compile.build import build  # noqa: PLC0415 (jax)
    from model.serving.engine import Engine  # noqa: PLC0415
    from model.serving.ready import shape_of  # noqa: PLC0415
    from model.serving.request import Params, Request  # noqa: PLC0415
    from model.serving.runtime import Graphs  # noqa: PLC0415

    bundle = open_bundle(build(_demo(work, recipe=Recipe(toolchain="cpu"), out=str(work / "on-cpu"))))
    asked = [
        Request(tuple(range(40, 60)), params, max_new_tokens=16)
        for params in (Params(), Params(0.8, seed=3), Params(1.0, top_k=20, top_p=0.9, seed=4), Params(1.0, min_p=0.05))
    ]
    # to the context's end, where rows beyond the caches are dropped
    asked.append(Request(tuple(range(40, 60)), max_new_tokens=_LONGEST))
    found, expected = (
        [r.ids for r in Engine(Graphs(bundle, platform), shape_of(bundle)).run(asked)] for platform in ("neuron", "cpu")
    )
    if found != expected:
        different = [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b]
        raise UserError(f"requests {different} of {len(asked)} differ from the CPU's tokens")
    return {"tokens": sum(map(len, found)), "identical_to_cpu": True}


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
