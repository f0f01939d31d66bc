"""The steps of the device check, in order: each gives facts for the report, or raises what did not hold."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from compile.build import build
from compile.device_check.kernels import CASES
from compile.graph.trace import lower_graph
from compile.neuron import sdk as toolchain
from compile.neuron.flags import flags_of
from compile.neuron.sdk import Level
from compile.plan import make_plan
from compile.spec import BuildSpec
from model.bundle.manifest import FUSED, PREFILL, Bundle, read_bundle
from model.bundle.weights import shard_file
from model.errors import UserError
from model.generate import shape_of
from model.serving.engine import Engine, Params, Request
from model.serving.runtime import Graphs

_DEMO = Path(__file__).resolve().parents[2] / "demo"
_HOUR = 3600
_LNC_VARIABLE = "NEURON_LOGICAL_NC_CONFIG"
_COMPARE = "generate, compare with the CPU's tokens"


@dataclass(frozen=True)
class Step:
    """A name for --only, what it does in one line, how (given a folder to work in), and its limit in seconds.

    A step raises, or puts a sentence under `failed`, if something did not hold.
    """

    name: str
    what: str
    run: Callable[[Path], dict[str, Any]]
    seconds: int = _HOUR


def versions(work: Path) -> dict[str, Any]:
    """What of the SDK is here, and which devices."""
    found = toolchain.require(Level.FULL, "the device check")
    return {"versions": found.versions, "devices": _devices()}


def _devices() -> Any:
    try:
        listed = subprocess.run(["neuron-ls", "--json-output"], capture_output=True, text=True, check=True)
        return json.loads(listed.stdout)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        raise UserError(f"neuron-ls names no device ({type(error).__name__}); check the driver") from error


def kernel(name: str, work: Path) -> dict[str, Any]:
    """One kernel's case on the device; a result beyond its bound is named with its error."""
    if getattr(sys.modules.get("nki"), "__nkisim__", False):
        raise UserError("nki is nkisim here, which measures no device; install nki from AWS's package index")
    os.environ[_LNC_VARIABLE] = "1"
    results = CASES[name](lambda launched: launched)
    wrong = [f"{r.what} is off by {r.error:.3g}, allowed is {r.bound:.3g}" for r in results if not r.error <= r.bound]
    if wrong:
        raise UserError("; ".join(wrong))
    return {r.what: {"error": r.error, "bound": r.bound} for r in results}


def _demo(work: Path, **changes: Any) -> BuildSpec:
    target, draft = str(_DEMO / "target"), str(_DEMO / "draft")
    spec = BuildSpec(
        target=target, draft=draft, checkpoint=target, draft_checkpoint=draft, tp=1, k=3, batch=1, max_len=128,
        out=str(work / "demo"), dtype="fp32", toolchain="neuron",
    )  # fmt: skip
    return replace(spec, **changes)


def neff(work: Path) -> dict[str, Any]:
    """The demo pair's fused graph through neuronx-cc alone; again with every layer inlined if that fails."""
    facts: dict[str, Any] = {}
    for inline in (False, True):
        plan = make_plan(_demo(work, inline=inline))
        graph = next(g for g in plan.graphs if g.tag == FUSED)
        stem = work / ("inlined" if inline else "called")
        hlo, made = stem.with_suffix(".hlo.pb"), stem.with_suffix(".neff")
        hlo.write_bytes(lower_graph(plan, graph))
        begin = time.perf_counter()
        try:
            toolchain.compile_hlo(hlo, made, work / f"log-{stem.name}.txt", flags_of("")[FUSED])
        except UserError as error:
            facts[stem.name] = str(error)
            continue
        return facts | {stem.name: {"bytes": made.stat().st_size, "seconds": time.perf_counter() - begin}}
    raise UserError(f"neither form compiles: {facts['called']}; inlined: {facts['inlined']}")


def model(kernels: str, work: Path) -> dict[str, Any]:
    """The demo pair's bundle with model.pt."""
    toolchain.require(Level.FULL, "model.pt")
    path = build(_demo(work, kernels=kernels, out=str(work / f"demo-{kernels}")))
    return {"bytes": (path / "model.pt").stat().st_size, "flags": read_bundle(path)["compiler"]["flags"]}


class Device:
    """A bundle's model.pt as a runner of the engine; it gets NxDI's inputs."""

    def __init__(self, bundle: Bundle) -> None:
        shards = [load_file(bundle.path / shard_file(rank)) for rank in range(bundle["tp"])]
        self.model = toolchain.run_model(bundle.path / "model.pt", shards)

    def run(self, tag: str, bucket: int, inputs: Any) -> list[np.ndarray]:
        """The four outputs; the caches stay on the device."""
        given = [torch.from_numpy(np.array(x)) for x in inputs[:5]]
        nothing = torch.zeros(given[0].shape[0], dtype=torch.int32)
        return [t.cpu().numpy() for t in self.model(*given, nothing, nothing)[:4]]


class SlotSeeds:
    """The bundle's graphs on the CPU with the noise of model.pt: keyed by the slot and the prompts that it has had."""

    def __init__(self, graphs: Graphs) -> None:
        self.graphs, self.counts = graphs, Counter[int]()

    def run(self, tag: str, bucket: int, inputs: Any) -> list[np.ndarray]:
        slots = [int(slot) for slot in inputs.seq_ids]
        if tag == PREFILL:
            self.counts.update(slots)
        seeds = np.array([(slot, self.counts[slot]) for slot in slots], np.int32)
        return self.graphs.run(tag, bucket, inputs._replace(seeds=seeds))


def generate(kernels: str, work: Path) -> dict[str, Any]:
    """Load the model, generate two requests, compare every token with the bundle's reference graphs on the CPU."""
    bundle = read_bundle(work / f"demo-{kernels}")
    on_cpu = read_bundle(build(_demo(work, toolchain="cpu", out=str(work / "demo-cpu"))))
    prompt = tuple(range(40, 60))
    requests = [Request(prompt, max_new_tokens=16), Request(prompt, Params(0.8), max_new_tokens=16)]

    def ids(runner: Any) -> list[list[int]]:
        return [r.ids for r in Engine(runner, shape_of(bundle)).run(requests)]

    found, expected = ids(Device(bundle)), ids(SlotSeeds(Graphs(on_cpu)))
    for name, one, other in zip(("greedy", "sampled"), found, expected, strict=True):
        if one != other:
            same = sum(one[: i + 1] == other[: i + 1] for i in range(len(other)))
            raise UserError(f"{name}: the first {same} of {len(other)} tokens are the CPU's, the next is not")
    return {"tokens": sum(map(len, found)), "identical_to_cpu": True}


def times(work: Path) -> dict[str, Any]:
    """Every case of bench.kernels, each in a process of its own: compile may not import bench."""
    program = "from bench.kernels.cases import CASES; print('\\n'.join(case.full_name for case in CASES))"
    listed = _bench("-c", program, lnc=1)
    measured, failed = {}, []
    for name in listed.stdout.split():
        done = _bench("-m", "bench.kernels", "--json", "--only", name, lnc=2 if name.endswith("-lnc2") else 1)
        rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        row = next((r for r in rows if r["case"] == name and "device_us" in r), None)
        if row:
            ratio = row["device_us"] / row["us"]
            measured[name] = {"simulated_us": row["us"], "device_us": row["device_us"], "ratio": ratio}
        else:
            failed.append(f"{name}: {(done.stderr.strip() or 'no device was there to measure').splitlines()[-1]}")
    said = (
        f"{len(failed)} of {len(failed) + len(measured)} cases were not measured, first {failed[0]}" if failed else ""
    )
    return {"failed": said, "measured": measured, "not_measured": failed}


def _bench(*arguments: str, lnc: int) -> subprocess.CompletedProcess[str]:
    # a launch's number of cores must be the runtime's
    environment = os.environ | {_LNC_VARIABLE: str(lnc)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=_DEMO.parent, env=environment, capture_output=True, text=True, check=False)


def full(work: Path) -> dict[str, Any]:
    """The graphs of Qwen3-32B and Qwen3-1.7B at tp 32, compiled without weights."""
    path = build(BuildSpec(out=str(work / "full"), toolchain="neuron"))
    return {"files": {n: e["bytes"] for n, e in read_bundle(path)["files"].items()}}


STEPS = (
    Step("versions", "import the SDK's packages, list their versions and the devices", versions, 120),
    *(
        Step(f"kernel {name}", f"{name} on the device against its law in fp64", functools.partial(kernel, name))
        for name in CASES
    ),
    Step("neff", "compile one small fused graph to a NEFF with neuronx-cc", neff),
    Step("model", "build model.pt of the demo pair with ModelBuilder", functools.partial(model, "reference")),
    Step("generate", f"load it, {_COMPARE}", functools.partial(generate, "reference")),
    Step("model with kernels", "build model.pt with the NKI kernels in the graphs", functools.partial(model, "nki")),
    Step("generate with kernels", f"load that, {_COMPARE}", functools.partial(generate, "nki")),
    Step("times", "time every kernel against its simulated time", times, 4 * _HOUR),
    Step("full", "compile the graphs of Qwen3-32B + Qwen3-1.7B at tp 32", full, 12 * _HOUR),
)
