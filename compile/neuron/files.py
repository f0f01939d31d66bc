"""The SDK's files of a bundle: NEFFs of its graphs, the IR of their NKI kernels, the compiler's logs.

A NEFF's recipe is a hash of its HLO proto, which names the IR of kernels by its content, of the compiler's version and
of its flags.
"""

import functools
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path

from compile.bundle.staging import StagedFile, Staging
from compile.neuron import sdk, specialise
from compile.neuron.flags import LNC, TARGET, flags_of
from compile.neuron.specialise import KERNELS_FOLDER
from compile.nxd.files import MODEL, check_model, model_files
from compile.recipes import sources
from compile.spec import Recipe
from model.errors import UserError
from trnspec.bundle.manifest import Compiler, File, canonical_hash, flag_tag
from trnspec.bundle.plan import BundlePlan, make_plan
from trnspec.bundle.spec import BundleSpec

# code that becomes the IR of kernels
_SPECIALISED_BY = ("nki_kernels", "compile/neuron/specialise.py", "model/nki/table.py")
_LOG = "log-neuron-cc.txt"
Records = dict[str, File]


def check_toolchain(toolchain: str, spec: BundleSpec) -> None:
    """Raise UserError if this machine lacks what a toolchain needs that a recipe names: neuron or model.pt."""
    if toolchain == MODEL:
        check_model(spec)
    elif toolchain == "neuron" and (why := sdk.missing(spec.kernels != "reference")):
        raise UserError(f"this bundle gets no NEFFs: {why}")


def add_compiled(
    plan: BundlePlan, staging: Staging, graphs: Records, recipe: Recipe, jobs: int = 0
) -> tuple[Records, Compiler]:
    """The records of what the SDK adds to a staged bundle that has its graphs, and the manifest's entry.

    ``jobs`` compilers run at a time, 0 for as many as memory and processors hold.
    """
    launches, work = plan.spec.kernels != "reference", staging.folder / ".build" / "neuron"
    if recipe.toolchain == MODEL:
        files, compiler = model_files(plan, work, graphs, recipe)
        return _make(staging, files), compiler
    if recipe.toolchain == "cpu" or sdk.missing(launches):
        return {}, Compiler()
    versions = sdk.versions(sdk.COMPILER, *[sdk.NKI] * launches)
    flags = flags_of(recipe.compiler_flags, versions[sdk.COMPILER])
    made, protos = Records(), {graph.key.name: graph.file for graph in plan.graphs}
    if launches:
        made |= _specialise(staging, graphs, protos, work / KERNELS_FOLDER, versions)
        protos = {name: f"{KERNELS_FOLDER}/{name}.hlo.pb" for name in protos}
    records, neffs, logs, sizes = graphs | made, list[StagedFile](), list[StagedFile](), dict[str, int]()
    # a first token needs the greedy set; the largest of the others begin first, so that the end has no long one
    greedy = {graph.key for graph in make_plan(replace(plan.spec, graphs="greedy")).graphs}
    for graph in sorted(plan.graphs, key=lambda g: (g.key not in greedy, -records[protos[g.key.name]].bytes)):
        name, line, hlo = graph.key.name, flags[flag_tag(graph.key)], protos[graph.key.name]
        recipe_hash = canonical_hash([records[hlo].sha256, line, versions[sdk.COMPILER]])
        neffs.append((f"neff/{name}.neff", recipe_hash, functools.partial(_compile, staging, hlo, work / name, line)))
        logs.append((f"logs/{name}.txt", recipe_hash, functools.partial(_copy_log, work / name / _LOG)))
        sizes[f"neff/{name}.neff"] = records[hlo].bytes
    made |= _make_neffs(staging, neffs, sizes, jobs if jobs > 0 else sdk.default_jobs()) | _make(staging, logs)
    return made, Compiler("compiler", "neff", TARGET, LNC, flags, versions, "bir" if launches else "none")


def _make(staging: Staging, files: Sequence[StagedFile]) -> Records:
    """The records of files, which are reused or made."""
    return {file[0]: staging.make(file) for file in files}


def _make_neffs(staging: Staging, files: Sequence[StagedFile], sizes: Mapping[str, int], jobs: int) -> Records:
    """The same of NEFFs, ``jobs`` compilers at a time, with a line on stderr for each.

    Raises UserError for the first that the compiler refuses, after all others are made.
    """
    made = {name: entry for name, recipe, _ in files if (entry := staging.reuse(name, recipe))}
    missing = {name: sizes[name] for name, *_ in files if name not in made}
    begun, ended, refused = dict[str, float](), dict[str, float](), list[str]()

    def make(file: StagedFile) -> File:
        begun[file[0]] = time.monotonic()
        return staging.make(file)

    with ThreadPoolExecutor(jobs) as pool:
        names = {pool.submit(make, file): file[0] for file in files if file[0] in missing}
        try:
            for done in as_completed(names):
                ended[name := names[done]] = time.monotonic()
                try:
                    made[name] = done.result()
                except UserError as error:
                    refused.append(str(error))
                count, minutes = f"{len(ended)} of {len(missing)}", seconds_left(missing, begun, ended, jobs) / 60
                took = f"{'made' if name in made else 'refused'} in {ended[name] - begun[name]:.0f} s"
                print(f"{name} {took}: {count}, about {minutes:.0f} min to go", file=sys.stderr, flush=True)
        finally:
            pool.shutdown(cancel_futures=True)
    if refused:
        raise UserError(refused[0] + f" ({len(refused) - 1} other graphs were refused too)" * (len(refused) > 1))
    return made


def seconds_left(sizes: Mapping[str, int], begun: Mapping[str, float], ended: Mapping[str, float], jobs: int) -> float:
    """An estimate at the last end, by those that have ended: a graph's time is in proportion to its size."""
    now, rate = max(ended.values()), sum(ended[n] - begun[n] for n in ended) / sum(sizes[n] for n in ended)
    left = [max(0.0, rate * size - now + begun.get(name, now)) for name, size in sizes.items() if name not in ended]
    return max([sum(left) / jobs, *left])


def _specialise(
    staging: Staging, graphs: Records, protos: dict[str, str], work: Path, versions: dict[str, str]
) -> Records:
    """Records of the graphs with the vendor's calls of kernels, and of the IR that they call."""
    code, configured, files = sources(_SPECIALISED_BY), dict[bytes, bytes](), list[StagedFile]()

    def write(file: str, path: Path) -> None:
        path.write_bytes(specialise.specialised((staging.folder / file).read_bytes(), work, configured))

    for name, file in protos.items():
        recipe_hash = canonical_hash([graphs[file].sha256, versions, code])
        files.append((f"{KERNELS_FOLDER}/{name}.hlo.pb", recipe_hash, functools.partial(write, file)))
    made = _make(staging, files)
    if configured:
        print(f"{len(configured)} NKI kernels specialised for {len(files)} graphs", file=sys.stderr)
    called = {name for file in files for name in specialise.binaries((staging.folder / file[0]).read_bytes())}
    ir = [(f"{KERNELS_FOLDER}/{name}", functools.partial(shutil.copyfile, work / name)) for name in sorted(called)]
    return made | _make(staging, [(name, canonical_hash(name), copy) for name, copy in ir])


def _compile(staging: Staging, hlo: str, work: Path, flags: str, neff: Path) -> None:
    """One graph's NEFF; the compiler runs in a folder of its own, below which it finds the IR of kernels."""
    work.mkdir(parents=True, exist_ok=True)
    for name in specialise.binaries((staging.folder / hlo).read_bytes()) if hlo.startswith(KERNELS_FOLDER) else ():
        (work / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(staging.folder / KERNELS_FOLDER / name, work / name)
    sdk.compile_hlo(staging.folder / hlo, neff, work / _LOG, flags, work)


def _copy_log(source: Path, path: Path) -> None:
    # a compiler that takes a graph from its cache writes no log
    if source.is_file():
        shutil.copyfile(source, path)
    else:
        path.write_text(f"neuronx-cc left no {source.name}\n", encoding="utf-8")
