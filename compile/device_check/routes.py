"""The ways from the demo pair to ids on a device: model.pt by NxDI, the graphs by JAX's plugin, NEFFs by nrtpy.

Each answers the same requests (`compile/device_check/requests.py`). Only the steps that trace or run our own graphs
import jax and torchax: an SDK with torch only has neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from compile.device_check.requests import Answer, Asked, Route, asked, judged, nxdi_route, shard_of
from compile.neuron import config
from compile.neuron import sdk as toolchain
from compile.neuron.eager import EagerRanks
from compile.neuron.flags import flags_of
from compile.neuron.sdk import Level
from compile.spec import BuildSpec, Recipe
from model.errors import UserError
from model.weights import shard_file
from trnspec.bundle.opening import Bundle, open_bundle
from trnspec.bundle.plan import make_plan
from trnspec.runtime.runner import Runner

_DEMO = Path(__file__).resolve().parents[2] / "demo"
_TARGET = _DEMO / "target"
# changes of the demo pair's spec, by the build's name in the table
CHANGES: dict[str, dict[str, Any]] = {
    "k 0": {"k": "0", "draft": BuildSpec.draft},
    "tp 1": {},
    "tp 2": {"tp": 2},
    "tp 4": {"tp": 4},
    "bf16": {"dtype": "bf16"},
    "draft groups": {"tp": 2, "recipe": Recipe(draft_tp=1, toolchain="neuron")},
    "kernels": {"kernels": "nki"},
}


def demo(name: str, work: Path, prefix: str = "", **changes: Any) -> BuildSpec:
    """The spec of a build: two buckets, a batch of four, k 7."""
    spec = BuildSpec(
        target=str(_TARGET), draft=str(_DEMO / "draft"), tp=1, k="7", batch=4, max_len=256, dtype="fp32",
        out=str(work / (prefix + name.replace(" ", "-"))), recipe=Recipe(toolchain="neuron"),
    )  # fmt: skip
    return replace(spec, **{**CHANGES[name], **changes})


def model(name: str, work: Path) -> dict[str, Any]:
    """model.pt of a build of the demo pair, its shards and neuron_config.json."""
    spec = demo(name, work)
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


def requests(name: str, work: Path) -> dict[str, Any]:
    """The requests to the model of a build, by NxDI's host."""
    spec = demo(name, work)
    plan, visible = make_plan(spec.bundle), 4 if spec.k != "0" else 1
    device = toolchain.run_model(Path(spec.out) / "model.pt", _shards(spec))
    route = nxdi_route(plan, lambda tag, inputs: [t.cpu().numpy() for t in device(*inputs)[:visible]])
    return judged(plan, _TARGET, route, eager_route(spec))


def eager_route(spec: BuildSpec) -> Route:
    """The same module, run eagerly here with the reference's kernels."""
    plan = make_plan(replace(spec, kernels="reference").bundle)
    shards = [shard_of(plan, spec.checkpoints, rank) for rank in range(spec.tp)]
    ranks = EagerRanks(plan, toolchain.nxdi_tags(plan), shards)
    return nxdi_route(plan, lambda tag, inputs: [t.numpy() for t in ranks(tag, inputs)])


def _shards(spec: BuildSpec) -> list[dict[str, torch.Tensor]]:
    return [load_file(Path(spec.out) / shard_file(rank)) for rank in range(spec.tp)]


def warm(name: str, work: Path) -> dict[str, Any]:
    """The same model again over a warm compiler cache, which may write no log."""
    spec = demo(name, work)
    folder = work / "again"
    folder.mkdir(exist_ok=True)
    begin = perf_counter()
    toolchain.build_model(make_plan(spec.bundle), folder / "model.pt", folder / "work", flags_of({}))
    return {"seconds": perf_counter() - begin, "logs": len(list(folder.rglob("log-neuron-cc.txt")))}


def nxdi(name: str, work: Path) -> dict[str, Any]:
    """NxDI's application of the bundle: its own load, a prompt and a step through its own forward."""
    spec = demo(name, work)
    first = next(asked(make_plan(spec.bundle)))
    found = toolchain.nxdi_tokens(Path(spec.out), first.prompt)
    (expected,) = eager_route(spec)([replace(first, count=len(found))])
    if found != expected.ids:
        raise UserError(f"NxDI's forward gives the tokens {found} after the prompt, the CPU {expected.ids}")
    return {"tokens": found}


def neffs(name: str, work: Path) -> dict[str, Any]:
    """Every graph of a build through neuronx-cc, which needs no device."""
    from compile.build import build  # noqa: PLC0415 (jax)

    begin = perf_counter()
    bundle = open_bundle(build(demo(name, work, "neff-")))
    compiled = {file: entry.bytes for file, entry in bundle.files.items() if file.startswith("neff/")}
    if not compiled:
        raise UserError(f"this SDK made {bundle.manifest.compiler.neff} of the graphs, and no NEFF of each")
    return {"seconds": perf_counter() - begin, "bytes": compiled}


def nrt(name: str, work: Path) -> dict[str, Any]:
    """The requests to the NEFFs of a build, by nrtpy."""
    return _graphs("nrt", open_bundle(Path(demo(name, work, "neff-").out)))


def graphs(name: str, work: Path) -> dict[str, Any]:
    """The requests to the graphs of a build, by JAX's plugin."""
    from compile.build import build  # noqa: PLC0415 (jax)

    changes = {"recipe": replace(demo(name, work).recipe, toolchain="cpu")}
    return _graphs("neuron", open_bundle(build(demo(name, work, "on-cpu-", **changes))))


def _graphs(platform: str, bundle: Bundle) -> dict[str, Any]:
    from trnspec.runtime.runner import load_runner  # noqa: PLC0415 (jax)

    device, cpu = load_runner(bundle, platform), load_runner(bundle)
    try:
        return judged(bundle.plan, _TARGET, graphs_route(bundle, device), graphs_route(bundle, cpu))
    finally:
        device.close()


def graphs_route(bundle: Bundle, runner: Runner) -> Route:
    """The answers of our own graphs to our engine."""
    from trnspec.engine.config import engine_config  # noqa: PLC0415
    from trnspec.engine.engine import Engine  # noqa: PLC0415 (jax)
    from trnspec.engine.request import Params, Request  # noqa: PLC0415

    engine = Engine(runner, engine_config(bundle))

    def request(of: Asked) -> Request:
        drawing, (low, high) = of.drawing, of.drawing.seed
        params = Params(drawing.temperature, drawing.top_k, drawing.top_p, drawing.min_p, low + (high << 32))
        return Request(of.prompt, params, of.count)

    def answer(batch: Sequence[Asked]) -> list[Answer]:
        return [Answer(result.ids, result.steps) for result in engine.run(map(request, batch))]

    return answer
