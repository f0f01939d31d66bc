"""`python -m compile.build`: a spec becomes a plan, the plan graphs and weights, these a bundle."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib.metadata
import json
import platform
import resource
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from compile.bundle.cutting import Cutter
from compile.bundle.remote import free_space
from compile.bundle.staging import StagedFile, staged
from compile.graph.trace import lower_graphs
from compile.neuron.files import add_compiled, check_toolchain
from compile.recipes import TRACED_WITH, graph_recipe
from compile.report import changes, plan_as_json, plan_as_text
from compile.spec import BuildSpec, parse
from model.errors import UserError, guarded, run_cli
from model.graph_spec import GraphSpec
from model.progress import progress
from model.provenance import commit
from trnspec.bundle.manifest import manifest_json, sha256_of
from trnspec.bundle.opening import read_bundle
from trnspec.bundle.plan import BundlePlan, make_plan

# of a logical core of two: a trn2 chip has 96 GiB for four of them (the SDK's page of the Trainium2 architecture)
HBM_BYTES = 24 << 30
_COLLECT = (50_000, 20, 100)
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


@dataclasses.dataclass(frozen=True)
class Built:
    """A bundle's folder, the number of files that this run made and that it kept, its wall time and its peak memory.

    The peak includes the pages of the checkpoint's files that were read.
    """

    path: Path
    made: int
    kept: int
    seconds: float
    peak_bytes: int

    def cost(self) -> dict[str, Any]:
        """The build's cost on this machine."""
        cost = {"made": self.made, "kept": self.kept, "wall_seconds": round(self.seconds, 2)}
        return cost | {"peak_bytes": self.peak_bytes}


def peak_bytes() -> int:
    """The most memory that this process and those that it has started and that still run held, each at its own time.

    getrusage would include their parents' memory at their start.
    """
    with contextlib.suppress(OSError):
        children = [pid for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()]
        return sum(map(_held, ("self", *children)))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _held(pid: str) -> int:
    """The most memory that a process held; 0 of one that has ended."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))
    return 0


def build(spec: BuildSpec) -> Path:
    """Build the bundle of a spec and return its folder; unchanged files are kept. UserError for a bad spec."""
    return build_and_count(spec).path


def build_and_count(spec: BuildSpec) -> Built:
    """The same, with the files made and kept. An existing bundle stays whole until the new one is."""
    begin = time.perf_counter()
    spec.check()
    check_toolchain(spec.recipe.toolchain, spec.bundle)
    with contextlib.ExitStack() as ends, staged(Path(spec.out)) as staging, progress("checking", unit="files") as task:
        plan, checkpoints, missing = _fitting(spec), spec.checkpoints, list[str]()
        cutter = Cutter(plan, checkpoints, staging.sources) if checkpoints else None
        # what is missing is known when the first of these is made
        protos = lower_graphs(plan.spec, (g for g in plan.graphs if g.file in missing))
        ends.enter_context(contextlib.closing(protos))
        files = _files(plan, protos, cutter, checkpoints)
        task.total = len(files)
        finished = {f.name: staging.finished(f) for f in files}
        records = {name: record for name, record in finished.items() if record}
        task.advance(kept := len(records))
        missing = [f.name for f in files if f.name not in records]
        _check_disk(plan, staging.folder, missing, cutter.due(missing, staging.folder) if cutter else 0)
        if kept < len(files):
            staging.begin()
        for file in files:
            if file.name not in records:
                task.at(f"making {file.name}")
                records[file.name] = staging.make(file)
                task.advance()
        task.at("compiling for Trainium")
        added, compiler = add_compiled(plan, staging, records, spec.recipe, spec.jobs)
        records |= added
        staging.finish(manifest_json(plan, records, compiler, versions(), commit(digits=40)), set(records))
        peak = peak_bytes()
    return Built(Path(spec.out), len(records) - kept, kept, time.perf_counter() - begin, peak)


def _files(
    plan: BundlePlan, protos: Iterator[bytes], cutter: Cutter | None, checkpoints: dict[str, Path]
) -> list[StagedFile]:
    files = [_graph(plan, g, protos) for g in plan.graphs]
    if cutter:
        target = checkpoints["target"]
        files += cutter.files()
        files += [_copy(f"tokenizer/{n}", target / n) for n in _TOKENIZER if (target / n).is_file()]
    return files


def _fitting(spec: BuildSpec) -> BundlePlan:
    """The plan of a checked spec; UserError if a rank's memory cannot hold its weights and caches."""
    plan = make_plan(spec.bundle)
    weights, caches = plan.weight_bytes, plan.cache_bytes
    if weights + caches > HBM_BYTES:
        raise UserError(
            f"a rank would hold {weights / 1e9:.1f} GB of weights and {caches / 1e9:.1f} GB of caches, together "
            f"{(weights + caches) / 1e9:.1f} GB, and a logical core has {HBM_BYTES / 1e9:.1f}; raise --tp, or lower "
            "--batch, --max-len or the recipe's blocks"
        )
    return plan


def _copy(name: str, source: Path) -> StagedFile:
    return StagedFile(name, sha256_of(source), lambda path: _ignore(shutil.copyfile(source, path)))


def _ignore(result: object) -> None:
    """Drop a result, for callables that must return None."""


def _graph(plan: BundlePlan, graph: GraphSpec, protos: Iterator[bytes]) -> StagedFile:
    spec = plan.spec
    configs = [repr(part.config) for part in spec.parts]
    split = [spec.tp, spec.draft_ranks, spec.max_len, spec.layers]
    recipe = graph_recipe(repr(graph), configs, spec.drafter, spec.k, split, spec.dtype, spec.kernels)
    return StagedFile(graph.file, recipe, lambda path: _ignore(path.write_bytes(next(protos))))


def _check_disk(plan: BundlePlan, folder: Path, missing: list[str], there: int) -> None:
    shards = sum(name.startswith("weights/") for name in missing)
    needed = max(0, plan.weight_bytes * shards - there) + (64 << 20 if missing else 0)
    free_space(folder.absolute(), needed)


def versions() -> dict[str, str]:
    """The packages that a bundle's content may depend on."""
    named = {n: importlib.metadata.version(n) for n in (*TRACED_WITH, "safetensors", "trnspec")}
    return named | {"python": platform.python_version()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan and build with progress on stderr; the last line of stdout is the bundle's path."""
    # a trace makes millions of small objects that live as long as it: rounds over all of them find nothing
    gc.set_threshold(*_COLLECT)
    spec = parse(arguments)
    spec.check()
    plan = _fitting(spec)
    if not spec.json:
        print(plan_as_text(plan))
    if spec.dry_run:
        if spec.json:
            print(json.dumps(plan_as_json(plan), indent=1))
        return
    if not spec.checkpoints:
        print(f"{spec.target} holds no weights: this bundle has graphs alone", file=sys.stderr)
    _say_what_is_replaced(spec)
    built = guarded(lambda: build_and_count(spec), spec.out)
    path, cost = built.path, built.cost()
    if why := read_bundle(path, key="").manifest.without_kernels:
        print(f"{path} runs on no Trainium: {why}", file=sys.stderr)
    print(f"{built.made} files made, {built.kept} kept; {built.seconds:.1f} s wall, "
          f"peak memory {cost['peak_bytes'] / 1e9:.2f} GB", file=sys.stderr)  # fmt: skip
    print(json.dumps({"bundle": str(path), "cost": cost} | plan_as_json(plan)) if spec.json else path)


def _say_what_is_replaced(spec: BuildSpec) -> None:
    with contextlib.suppress(UserError, OSError):
        if changed := changes(read_bundle(Path(spec.out), key="").spec, spec.bundle):
            print(f"{spec.out} holds a bundle of {changed}; it stays until the new one is complete", file=sys.stderr)


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
