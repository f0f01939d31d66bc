"""`python -m compile.build`: a spec becomes a plan, the plan graphs and weights, these a bundle."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import platform
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from compile.bundle.remote import open_remote
from compile.bundle.shard_writer import write_shard
from compile.bundle.staging import Artifact, Record, Staging
from compile.graph.trace import lower_graph
from compile.neuron import config as neuron_config
from compile.neuron.files import compiled
from compile.plan import BuildPlan, make_plan
from compile.recipes import ROOT, TRACED_WITH, graph_recipe, shard_recipe
from compile.report import plan_as_json, plan_as_text
from compile.spec import BuildSpec, parse
from compile.store import push, shown, split
from model.bundle.checkpoint import Checkpoint
from model.bundle.manifest import FORMAT, FORMAT_VERSION, GraphSpec, canonical_hash, graph_as_json, sha256_of
from model.bundle.shards import cut_label
from model.bundle.weights import shard_file
from model.dtypes import BY_FLAG
from model.errors import UserError, guarded, run_cli

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


@dataclasses.dataclass(frozen=True)
class Built:
    """A bundle's folder, how many of its files this run made and how many it kept, and the time of it."""

    path: Path
    made: int
    kept: int
    seconds: float

    def cost(self) -> dict[str, Any]:
        """What it took on this machine; the peak counts the pages of the checkpoint's files that were looked at."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        return {"made": self.made, "kept": self.kept, "wall_seconds": round(self.seconds, 2), "peak_bytes": peak}


def build(spec: BuildSpec, progress: Progress | None = None) -> Path:
    """Build the bundle of a spec and return its folder; what has not changed is kept. UserError for a bad spec."""
    return build_and_count(spec, progress).path


def build_and_count(spec: BuildSpec, progress: Progress | None = None) -> Built:
    """The same, with what was made and what was kept."""
    begin, kept = time.perf_counter(), 0
    spec.check()
    plan, staging = make_plan(spec), Staging(Path(spec.out))
    artifacts = _artifacts(plan)
    of_sdk, how_compiled = compiled(plan, [a for a in artifacts if a.name.startswith("hlo/")])
    artifacts += of_sdk
    _check_disk(plan)
    task = progress.add_task("checking", total=len(artifacts)) if progress else None
    records: dict[str, Record] = {}
    for artifact in artifacts:
        if progress and task is not None:
            progress.update(task, description=artifact.name)
        record = None if spec.force else staging.finished(artifact)
        kept += record is not None
        records[artifact.name] = record or staging.make(artifact)
        if progress and task is not None:
            progress.advance(task)
    staging.finish(_manifest(plan) | how_compiled, records)
    return Built(Path(spec.out), len(records) - kept, kept, time.perf_counter() - begin)


def _artifacts(plan: BuildPlan) -> list[Artifact]:
    spec = plan.spec
    config = neuron_config.render(spec)
    artifacts = [_text("neuron_config.json", config), *(_graph(plan, g) for g in plan.graphs)]
    if spec.checkpoint:
        checkpoints = {m.prefix: Checkpoint(Path(m.checkpoint), m.config) for m in spec.models}
        artifacts += [_shard(plan, checkpoints, rank) for rank in range(spec.tp)]
        artifacts += [
            _copy(f"tokenizer/{name}", Path(spec.checkpoint) / name)
            for name in _TOKENIZER
            if (Path(spec.checkpoint) / name).is_file()
        ]
    return artifacts


def _text(name: str, content: str) -> Artifact:
    return Artifact(name, canonical_hash(content), lambda path: _ignore(path.write_text(content, encoding="utf-8")))


def _copy(name: str, source: Path) -> Artifact:
    return Artifact(name, sha256_of(source), lambda path: _ignore(shutil.copyfile(source, path)))


def _ignore(result: object) -> None:
    """Drop a result, for callables that must return None."""


def _graph(plan: BuildPlan, graph: GraphSpec) -> Artifact:
    spec = plan.spec
    configs = [dataclasses.asdict(m.config) for m in spec.models]
    split = [spec.tp, spec.draft_ranks, spec.kv_shard]
    recipe = graph_recipe(graph_as_json(graph), configs, split, spec.dtype, spec.kernels, spec.inline)
    return Artifact(graph.file, recipe, lambda path: _ignore(path.write_bytes(lower_graph(plan, graph))))


def _shard(plan: BuildPlan, checkpoints: dict[str, Checkpoint], rank: int) -> Artifact:
    spec = plan.spec
    sources = {prefix: checkpoint.identity() for prefix, checkpoint in checkpoints.items()}
    layout, names, models = _layout(spec), spec.weight_names(), {m.prefix: m for m in spec.models}
    dtype = BY_FLAG[spec.dtype].torch

    def write(path: Path) -> None:
        tensors = (
            (names[f"{prefix}.{ours}"], tensor)
            for prefix, model in models.items()
            for ours, tensor in checkpoints[prefix].shard(rank % model.ranks, model.ranks, dtype, spec.packing(model))
        )
        write_shard(path, plan.target_weights + plan.draft_weights, tensors, cut_label(layout, rank))

    recipe = shard_recipe(sources, rank, layout)
    return Artifact(shard_file(rank), recipe, write)


def _layout(spec: BuildSpec) -> dict[str, Any]:
    """How the weights are cut and laid out; every shard carries it."""
    return {
        "ranks": spec.tp,
        "dtype": spec.dtype,
        "fused_qkv": False,
        "transposed": False,
        "draft_ranks": spec.draft_ranks,
        "packed": {m.prefix: spec.packing(m)._asdict() for m in spec.models},
    }


def _check_disk(plan: BuildPlan) -> None:
    needed = (plan.weight_bytes * plan.spec.tp if plan.spec.checkpoint else 0) + (64 << 20)
    folder = Path(plan.spec.out).absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"the bundle needs {needed / 1e9:.1f} GB and {folder} has {free / 1e9:.1f} GB free; "
            "free some space or choose another --out"
        )


def _manifest(plan: BuildPlan) -> dict[str, Any]:
    spec = plan.spec
    models: dict[str, dict[str, Any]] = {"draft": {"name": "none"}} | {
        m.role: {"name": _model_name(m.name), "config": json.loads(json.dumps(dataclasses.asdict(m.config)))}
        for m in spec.models
    }
    what = spec.what_is_built() | {role: model["name"] for role, model in models.items()}
    return {
        "format": FORMAT, "format_version": FORMAT_VERSION, "complete": True,
        "spec": what, "models": models,
        "config_hash": canonical_hash([what, models]),
        "k": spec.k, "rows": spec.rows, "speculation_length": spec.rows if spec.k else 0,
        "tp": spec.tp, "draft_tp": spec.draft_ranks, "kv_shard": spec.kv_shard, "batch": spec.batch,
        "max_len": spec.max_len, "buckets": list(spec.buckets), "dtype": spec.dtype,
        "graphs": [graph_as_json(g) for g in plan.graphs],
        "weights": _layout(spec) if spec.checkpoint else None,
        "bytes_per_rank": {"weights": plan.weight_bytes, "caches": plan.cache_bytes},
        "toolchain": "cpu", "neff": "none",
        "versions": {n: importlib.metadata.version(n) for n in (*TRACED_WITH, "safetensors", "trnspec")}
        | {"python": platform.python_version()},
        "commit": _commit(),
    }  # fmt: skip


def _model_name(name_or_path: str) -> str:
    # a folder is recorded by its name alone: the bundle must not depend on this machine's paths
    return Path(name_or_path).resolve().name if Path(name_or_path).is_dir() else name_or_path


def _commit() -> str | None:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude", "*"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return found.stdout.strip() or None


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan, build with a progress bar on stderr, push if asked; the last line of stdout is the bundle's path."""
    spec = parse(arguments)
    spec.check()
    address = _address(spec)
    plan = make_plan(spec)
    if not spec.json:
        print(plan_as_text(plan))
    if spec.dry_run:
        if spec.json:
            print(json.dumps(plan_as_json(plan), indent=1))
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        built = guarded(lambda: build_and_count(spec, progress), spec.out)
    path, cost = built.path, built.cost()
    print(f"{built.made} files made, {built.kept} kept; {built.seconds:.1f} s wall, "
          f"peak memory {cost['peak_bytes'] / 1e9:.2f} GB", file=sys.stderr)  # fmt: skip
    if address:
        _push(path, address)
        if not spec.json:
            print(address)
    stored = {"s3": address} if address else {}
    print(json.dumps({"bundle": str(path), "cost": cost} | stored | plan_as_json(plan)) if spec.json else path)


def _address(spec: BuildSpec) -> str:
    """Where the bundle will be pushed; what is wrong with it is said before anything is built."""
    if not spec.s3:
        return ""
    open_remote(spec.s3)
    address = f"{spec.s3.rstrip('/')}/{Path(spec.out).resolve().name}"
    split(address)
    return address


def _push(path: Path, address: str) -> None:
    try:
        guarded(lambda: shown(lambda progress: push(path, address, progress)), address)
    except UserError as error:
        command = f"python -m compile.store push {path} {address}"
        raise UserError(f"{error}. The bundle is whole in {path}; to go on, run: {command}") from error


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
