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
    """Raise UserError if this machine cannot run the toolchain that a recipe names: neuron or model.pt."""
    if toolchain == MODEL:
        check_model(spec)
    elif toolchain == "neuron" and (why := sdk.missing(spec.kernels != "reference")):
        raise UserError(f"this bundle gets no NEFFs: {why}")


def add_compiled(
    plan: BundlePlan, staging: Staging, graphs: Records, recipe: Recipe, jobs: int = 0
) -> tuple[Records, Compiler]:
    """Add the SDK's files to a staged bundle that has its graphs. Returns their records and the manifest's entry.

    ``jobs`` compilers run at a time, 0 for as many as memory and processors allow.
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
    # the greedy graphs first: a first token needs them; then the largest first, so that no long one is left at the end
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
    """Reuse or make files; returns their records."""
    return {file[0]: staging.make(file) for file in files}


def _make_neffs(staging: Staging, files: Sequence[StagedFile], sizes: Mapping[str, int], jobs: int) -> Records:
    """The records of NEFFs, ``jobs`` compilers at a time, with a line on stderr for each.

    Raises UserError for the first graph that the compiler refuses, after it has compiled all others.
    """
    made = {name: entry for name, recipe, _ in files if (entry := staging.reuse(name, recipe))}
    begin, ended, refused = time.monotonic(), 0, list[str]()
    missing = [file for file in files if file[0] not in made]
    with ThreadPoolExecutor(jobs) as pool:
        names = {pool.submit(staging.make, file): file[0] for file in missing}
        try:
            for done in as_completed(names):
                ended += sizes[name := names[done]]
                try:
                    made[name] = done.result()
                except UserError as error:
                    refused.append(str(error))
                # the time is in proportion to the size of the graphs
                elapsed, left = time.monotonic() - begin, sum(sizes[file[0]] for file in missing) / ended - 1
                state = f"{'compiled' if name in made else 'refused'} after {elapsed:.0f} s"
                print(f"{name} {state}, about {elapsed * left / 60:.0f} min to go", file=sys.stderr, flush=True)
        finally:
            pool.shutdown(cancel_futures=True)
    if refused:
        raise UserError(refused[0] + f" ({len(refused) - 1} other graphs were refused too)" * (len(refused) > 1))
    return made


def _specialise(
    staging: Staging, graphs: Records, protos: dict[str, str], work: Path, versions: dict[str, str]
) -> Records:
    """Write the graphs with the vendor's kernel calls, and the IR that they call; returns the records."""
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
    """Compile one graph; the compiler runs in a separate folder, which contains the IR of the graph's kernels."""
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
