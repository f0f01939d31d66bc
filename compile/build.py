"""`python -m compile.build`: a spec becomes a plan, the plan graphs and weights, these a bundle."""

from __future__ import annotations

import contextlib
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

from compile.bundle.cutting import Cutter, layout
from compile.bundle.open_remote import open_remote
from compile.bundle.remote import free_space
from compile.bundle.staging import StagedFile, staged
from compile.graph.trace import lower_graph
from compile.neuron import config as neuron_config
from compile.neuron.files import check_words, compiled
from compile.plan import BuildPlan, make_plan
from compile.recipes import ROOT, TRACED_WITH, graph_recipe
from compile.report import plan_as_json, plan_as_text
from compile.spec import BuildSpec, parse
from compile.store import push, split
from model.bundle.manifest import (
    FORMAT,
    FORMAT_VERSION,
    GraphSpec,
    canonical_hash,
    graph_as_json,
    read_bundle,
    sha256_of,
)
from model.errors import UserError, guarded, run_cli
from model.progress import progress

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
        cost = {"made": self.made, "kept": self.kept, "wall_seconds": round(self.seconds, 2)}
        return cost | {"peak_bytes": peak_bytes()}


def peak_bytes() -> int:
    """The most memory that this process held; getrusage would count what its parent held when it was started."""
    with contextlib.suppress(OSError):
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return int(status.split("VmHWM:")[1].split()[0]) << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def build(spec: BuildSpec) -> Path:
    """Build the bundle of a spec and return its folder; what has not changed is kept. UserError for a bad spec."""
    return build_and_count(spec).path


def build_and_count(spec: BuildSpec) -> Built:
    """The same, with what was made and what was kept. A bundle that is there stays whole until the new one is."""
    begin = time.perf_counter()
    spec.check()
    check_words(spec)
    with staged(Path(spec.out)) as staging, progress("checking", unit="files") as task:
        plan = make_plan(dataclasses.replace(spec, out=str(staging.folder)))
        cutter = Cutter(plan, staging.sources) if spec.checkpoint else None
        files = _files(plan, cutter)
        of_sdk, how_compiled = compiled(plan, [f for f in files if f.name.startswith("hlo/")])
        files += of_sdk
        task.total = len(files)
        finished = {f.name: None if spec.force else staging.finished(f) for f in files}
        records = {name: record for name, record in finished.items() if record}
        task.advance(kept := len(records))
        missing = [f.name for f in files if f.name not in records]
        _check_disk(plan, missing, cutter.due(missing, staging.folder) if cutter else 0)
        if kept < len(files):
            staging.begin()
        for file in files:
            if file.name not in records:
                task.at(f"making {file.name}")
                records[file.name] = staging.make(file)
                task.advance()
        staging.finish(described(plan) | how_compiled, records)
    return Built(Path(spec.out), len(records) - kept, kept, time.perf_counter() - begin)


def _files(plan: BuildPlan, cutter: Cutter | None) -> list[StagedFile]:
    spec = plan.spec
    config = neuron_config.render(spec)
    files = [_text("neuron_config.json", config), *(_graph(plan, g) for g in plan.graphs)]
    if cutter:
        files += cutter.files()
        files += [
            _copy(f"tokenizer/{name}", Path(spec.checkpoint) / name)
            for name in _TOKENIZER
            if (Path(spec.checkpoint) / name).is_file()
        ]
    return files


def _text(name: str, content: str) -> StagedFile:
    return StagedFile(name, canonical_hash(content), lambda path: _ignore(path.write_text(content, encoding="utf-8")))


def _copy(name: str, source: Path) -> StagedFile:
    return StagedFile(name, sha256_of(source), lambda path: _ignore(shutil.copyfile(source, path)))


def _ignore(result: object) -> None:
    """Drop a result, for callables that must return None."""


def _graph(plan: BuildPlan, graph: GraphSpec) -> StagedFile:
    spec = plan.spec
    configs = [dataclasses.asdict(m.config) for m in spec.models]
    split = [spec.tp, spec.draft_ranks, spec.draft_head_ranks, spec.kv_shard]
    drafter = spec.drafting.as_json()
    tree = str(spec.tree_of(graph.k) or "")
    recipe = graph_recipe(graph_as_json(graph), configs, drafter, tree, split, spec.dtype, spec.kernels, spec.inline)
    return StagedFile(graph.file, recipe, lambda path: _ignore(path.write_bytes(lower_graph(plan, graph))))


def _check_disk(plan: BuildPlan, missing: list[str], there: int) -> None:
    shards = sum(name.startswith("weights/") for name in missing)
    needed = max(0, plan.weight_bytes * shards - there) + (64 << 20 if missing else 0)
    free_space(Path(plan.spec.out).absolute(), needed)


def described(plan: BuildPlan) -> dict[str, Any]:
    """What the manifest says of a plan: all but the files and their digests."""
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
        "k": spec.k, "ks": [0, *spec.ks], "rows": spec.rows, "speculation_length": spec.rows if spec.k else 0,
        "tp": spec.tp, "draft_tp": spec.draft_ranks, "kv_shard": spec.kv_shard, "batch": spec.batch,
        "max_len": spec.max_len, "buckets": list(spec.buckets), "dtype": spec.dtype,
        "drafter": spec.drafting.as_json(),
        "graphs": [graph_as_json(g) for g in plan.graphs],
        "weights": layout(spec) if spec.checkpoint else None,
        "bytes_per_rank": {"weights": plan.weight_bytes, "caches": plan.cache_bytes},
        "toolchain": "cpu", "neff": "none",
        "versions": {n: importlib.metadata.version(n) for n in (*TRACED_WITH, "safetensors", "trnspec")}
        | {"python": platform.python_version()},
        "commit": _commit(),
    }  # fmt: skip


def _model_name(name_or_path: str) -> str:
    """A preset's name, or a folder's own: the bundle must not depend on this machine's paths."""
    if not Path(name_or_path).is_dir():
        return name_or_path
    folder = Path(name_or_path).resolve()
    # the hub's cache: models--Qwen--Qwen3-32B/snapshots/<revision>
    hub = folder.parent.parent.name if folder.parent.name == "snapshots" else ""
    return hub.removeprefix("models--").replace("--", "/", 1) if hub.startswith("models--") else folder.name


def _commit() -> str | None:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude", "*"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return found.stdout.strip() or None


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan, build with signs of life on stderr, push if asked; the last line of stdout is the bundle's path."""
    spec = parse(arguments)
    spec.check()
    check_words(spec)
    address = _address(spec)
    plan = make_plan(spec)
    if not spec.json:
        print(plan_as_text(plan))
    if spec.dry_run:
        if spec.json:
            print(json.dumps(plan_as_json(plan), indent=1))
        return
    _say_what_is_replaced(spec)
    built = guarded(lambda: build_and_count(spec), spec.out)
    path, cost = built.path, built.cost()
    print(f"{built.made} files made, {built.kept} kept; {built.seconds:.1f} s wall, "
          f"peak memory {cost['peak_bytes'] / 1e9:.2f} GB", file=sys.stderr)  # fmt: skip
    if address:
        _push(path, address)
        if not spec.json:
            print(address)
    stored = {"s3": address} if address else {}
    print(json.dumps({"bundle": str(path), "cost": cost} | stored | plan_as_json(plan)) if spec.json else path)


def _say_what_is_replaced(spec: BuildSpec) -> None:
    with contextlib.suppress(UserError, OSError):
        there = read_bundle(Path(spec.out))
        old, new = there["spec"], spec.what_is_built() | {m.role: _model_name(m.name) for m in spec.models}
        changed = [f"{name} {old.get(name)} for {value}" for name, value in new.items() if old.get(name) != value]
        if changed:
            what = ", ".join(changed)
            print(f"{spec.out} holds a bundle of {what}; it stays until the new one is complete", file=sys.stderr)


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
        guarded(lambda: push(path, address), address)
    except UserError as error:
        command = f"python -m compile.store push {path} {address}"
        raise UserError(f"{error}. The bundle is whole in {path}; to go on, run: {command}") from error


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
