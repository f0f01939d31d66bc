"""The three greedy graphs of the demo pair on a device, whose ids are the CPU's unless two ids are numerically tied."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from compile.build import build, build_and_count
from compile.recipes import ROOT
from compile.spec import BuildSpec, Recipe
from model.cache import KEY_TILE
from model.errors import UserError
from trnspec.bundle.opening import open_bundle
from trnspec.bundle.spec import BundleSpec
from trnspec.engine.config import engine_config
from trnspec.engine.engine import Engine
from trnspec.engine.request import Params, Request, Result
from trnspec.runtime.runner import load_runner

BUILDS: dict[str, dict[str, Any]] = {f"tp {tp}": {"tp": tp} for tp in (1, 2, 4)} | {"bf16": {"dtype": "bf16"}}
# log-probabilities of the demo target that are so close may change places, which rejects a draft now and then
_TIE, _MAX_STEPS = {"fp32": 2e-3, "bf16": 0.3}, 1.25


def demo(name: str, work: Path, **changes: Any) -> BuildSpec:
    """The spec of a build of the demo pair: two blocks a sequence, batch 4, k 7."""
    spec = BuildSpec(
        target=str(ROOT / "demo/target"), draft=str(ROOT / "demo/draft"), tp=1, batch=4, max_len=256, dtype="fp32",
        out=str(work / name.replace(" ", "-")), recipe=Recipe(toolchain="neuron", graphs="greedy"),
    )  # fmt: skip
    return replace(spec, **{**BUILDS[name], **changes})


def build_neffs(name: str, out: Path) -> dict[str, Any]:
    return build_and_count(demo(name, out)).cost()


def compare_ids(name: str, out: Path) -> dict[str, Any]:
    """The ids of a build's NEFFs against those of the reference's HLO, on one rank of the CPU."""
    plain = {"kernels": "reference", "tp": 1, "out": str(out / "cpu"), "recipe": Recipe(toolchain="cpu")}
    bundle, on_cpu = open_bundle(Path(demo(name, out).out)), open_bundle(build(demo(name, out, **plain)))
    sent, cpu = requests(bundle.spec), Engine(load_runner(on_cpu, "cpu"), engine_config(on_cpu))
    with closing(load_runner(bundle, "neuron")) as graphs:
        results = Engine(graphs, engine_config(bundle)).run(sent)

    def logprob(of: Sequence[int]) -> float:
        return cpu.run([Request(tuple(of), Params(), 1, prompt_logprobs=0)])[0].prompt_scores[-1].logprob

    return compared(bundle.spec, sent, results, cpu.run(sent), logprob)


def requests(spec: BundleSpec) -> list[Request]:
    """A request up to max_len; prompts of one id, of a block's last row and of more than a block."""
    listed = (20, spec.max_len), (KEY_TILE + 22, 60), (1, 60), (KEY_TILE - 1, 12), (KEY_TILE, 12), (30, 60), (9, 60)
    ids = [i % spec.target_config.vocab_size for i in range(40, 40 + spec.max_len)]
    return [Request(tuple(ids[:length]), Params(), count) for length, count in listed]


def compared(
    spec: BundleSpec, sent: Sequence[Request], device: Sequence[Result], cpu: Sequence[Result],
    logprob: Callable[[Sequence[int]], float],
) -> dict[str, Any]:  # fmt: skip
    """Facts of a device's results that have the CPU's ids, each up to the first that is tied with another.

    `logprob` is the CPU's, of the last id after the others. Raises UserError for another id that is not tied, or more
    steps than the CPU takes.
    """
    count, ties = 0, list[float]()
    for request, actual, expected in zip(sent, device, cpu, strict=True):
        pairs = enumerate(zip(actual.ids, expected.ids, strict=False))
        count += (at := next((i for i, (a, b) in pairs if a != b), min(len(actual.ids), len(expected.ids))))
        if at < min(len(actual.ids), len(expected.ids)):
            known, (right, other) = [*request.ids, *actual.ids[:at]], (expected.ids[at], actual.ids[at])
            ties.append(logprob([*known, right]) - logprob([*known, other]))
            if abs(ties[-1]) > _TIE[spec.dtype]:
                raise UserError(
                    f"a prompt of {len(request.ids)} ids: id {at} is {other}, and {right} on the CPU; their "
                    f"log-probabilities differ by {ties[-1]:.3g}, and {_TIE[spec.dtype]} would be a tie"
                )
        elif len(actual.ids) != len(expected.ids):
            raise UserError(f"{len(actual.ids)} ids were generated, and {len(expected.ids)} on the CPU")
    steps, cpu_steps = (sum(result.steps for result in results) for results in (device, cpu))
    if steps > _MAX_STEPS * cpu_steps:
        raise UserError(f"the requests took {steps} steps, {cpu_steps} on the CPU: drafts are rejected")
    return {"ids": count, "margins of ties": ties, "steps": steps, "steps on the CPU": cpu_steps}
