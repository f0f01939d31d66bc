"""`python -m compile.build`: a spec becomes a plan, the plan graphs and weights, these a bundle."""

import dataclasses
import gc
import json
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from compile.bundle.cutting import Cutter
from compile.bundle.staging import staged
from compile.graph.trace import lower_graphs
from compile.neuron.files import add_compiled, check_toolchain
from compile.recipes import TRACED_WITH, trace_code, versions
from compile.report import CAPACITY, hbm_text, plan_as_json, plan_as_text, rank_bytes
from compile.spec import BuildSpec, parse
from model.cache import KEY_TILE
from model.errors import UserError, guarded, run_cli
from model.progress import progress
from model.weights import shard_file
from nki_kernels.limits import SPARE_PAGES
from trnspec.bundle.manifest import canonical_hash, graph_digests, manifest_json, sha256_of
from trnspec.bundle.plan import BundlePlan, make_plan

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


@dataclasses.dataclass(frozen=True)
class BuildResult:
    """The folder of a bundle, how many files this build made and reused, and its wall time."""

    path: Path
    made: int
    reused: int
    seconds: float

    def cost(self) -> dict[str, float]:
        """The build's cost on this machine."""
        return {"made": self.made, "reused": self.reused, "wall_seconds": round(self.seconds, 2)}


def commit(digits: int = 7) -> str | None:
    """The commit of this checkout, with -dirty if it has changes; None outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        done = subprocess.run([*command, f"--abbrev={digits}"], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None


def build(spec: BuildSpec) -> Path:
    """Build a bundle and return its folder. Raises UserError for a spec that cannot be built."""
    return build_and_count(spec).path


def build_and_count(spec: BuildSpec, plan: BundlePlan | None = None) -> BuildResult:
    """Build a bundle of a plan of `checked_plan`, reusing unchanged files; it replaces an old one at the end."""
    begin, plan = time.perf_counter(), plan or checked_plan(spec)
    checkpoints, files = spec.checkpoints, dict[str, str]()
    with staged(Path(spec.out)) as staging, progress("checking", unit="files") as task:
        cutter = Cutter(plan, checkpoints) if checkpoints else None
        shards = {shard_file(rank): recipe for rank, recipe in enumerate(cutter.recipes() if cutter else ())}
        sources = {f"tokenizer/{name}": checkpoints["target"] / name for name in _TOKENIZER} if checkpoints else {}
        files = _graph_recipes(plan) | shards | {n: sha256_of(path) for n, path in sources.items() if path.is_file()}
        task.advance(0, total=len(files))
        records = {name: entry for name, recipe in files.items() if (entry := staging.reuse(name, recipe))}
        task.advance(len(records))
        missing = files.keys() - records
        staging.check_space(plan.weight_bytes * len(shards.keys() & missing) + bool(missing) * (64 << 20))

        def add(name: str, digest: str = "") -> None:
            records[name] = staging.add(name, files[name], digest)
            task.advance()

        for graph, proto in lower_graphs(plan.spec, [g for g in plan.graphs if g.file in missing]):
            task.advance(0, description=f"made {graph.file}")
            staging.temporary(graph.file).write_bytes(proto)
            add(graph.file, sha256(proto).hexdigest())
        for name, path in sources.items():
            if name in missing:
                shutil.copyfile(path, staging.temporary(name))
                add(name)
        if cutter and (ranks := [rank for rank, name in enumerate(shards) if name in missing]):
            task.advance(0, description="cutting weights")
            for rank, digest in cutter.write({r: staging.temporary(shard_file(r)) for r in ranks}).items():
                add(shard_file(rank), digest)
        task.advance(0, description="compiling for Trainium")
        added, compiler = add_compiled(plan, staging, records, spec.recipe, spec.jobs)
        # the packages that a bundle's content may depend on
        packages = versions((*TRACED_WITH, "safetensors", "trnspec")) | {"python": platform.python_version()}
        staging.finish(manifest_json(plan, records | added, compiler, packages, commit(digits=40)))
    return BuildResult(Path(spec.out), staging.made, len(records | added) - staging.made, time.perf_counter() - begin)


def _graph_recipes(plan: BundlePlan) -> dict[str, str]:
    spec, code = plan.spec, trace_code()
    models = [dataclasses.asdict(part.config) for part in spec.parts]
    options = [spec.kernels, spec.layers, spec.without, spec.gather, spec.weights]
    common = [models, spec.drafter, spec.k, spec.tp, spec.max_len, spec.dtype, options, code]
    return {file: canonical_hash([digest, *common]) for file, digest in graph_digests(plan).items()}


def checked_plan(spec: BuildSpec) -> BundlePlan:
    """The plan of a spec. Raises UserError if it cannot be built, or does not fit the HBM of a rank."""
    spec.check()
    check_toolchain(spec.recipe.toolchain, spec.bundle)
    plan = make_plan(spec.bundle)
    sizes = rank_bytes(plan)
    if (excess := sum(sizes.values()) - CAPACITY) > 0:
        blocks = (sizes["caches"] - excess) * plan.spec.pool // sizes["caches"]
        fewer = f"lower --batch or --max-len, or give at most {blocks} blocks by --recipe"
        if blocks < 1 + spec.max_len // KEY_TILE + SPARE_PAGES:
            fewer = "lower --max-len, or have fewer graphs: one --k, and context_buckets and chunks of --recipe"
        raise UserError(f"a rank needs {hbm_text(plan)}; raise --tp, {fewer}")
    return plan


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan and build with progress on stderr; the last line of stdout is the bundle's path."""
    # a trace makes millions of small objects and frees none of them, so most garbage collections would free nothing
    gc.set_threshold(50_000, 20, 100)
    spec = parse(arguments)
    plan = checked_plan(spec)
    if not spec.json:
        print(plan_as_text(plan))
    if spec.dry_run:
        if spec.json:
            print(json.dumps(plan_as_json(plan), indent=1))
        return
    for sentence in spec.notes():
        print(sentence, file=sys.stderr)
    built = guarded(lambda: build_and_count(spec, plan), spec.out)
    print(f"{built.made} files made, {built.reused} reused; {built.seconds:.1f} s wall", file=sys.stderr)
    result = {"bundle": str(built.path), "cost": built.cost()} | plan_as_json(plan)
    print(json.dumps(result) if spec.json else built.path)


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
