"""The SDK's files of a bundle: NEFFs of its graphs, the IR of their NKI kernels, the compiler's logs.

A NEFF's recipe is a hash of its HLO proto, of the compiler's version and of its flags.
"""

import functools
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
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
from trnspec.bundle.plan import BundlePlan
from trnspec.bundle.spec import BundleSpec

# code that becomes the IR of kernels
_SPECIALISED_BY = ("nki_kernels", "compile/neuron/specialise.py", "model/nki/table.py")
# host memory of one neuronx-cc: up to 40 GB for a decode graph of a 30B model
_JOB_BYTES = 40 << 30
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

    ``jobs`` compilers run at a time, 0 for as many as the memory holds.
    """
    launches, work = plan.spec.kernels != "reference", staging.folder / ".build" / "neuron"
    if recipe.toolchain == MODEL:
        files, compiler = model_files(plan, work, graphs, recipe)
        return _make(staging, files), compiler
    if recipe.toolchain == "cpu" or sdk.missing(launches):
        return {}, Compiler()
    versions = sdk.versions(sdk.COMPILER, *[sdk.NKI] * launches)
    flags = flags_of(recipe.compiler_flags, versions[sdk.COMPILER])
    protos, made = {graph.key.name: graph.file for graph in plan.graphs}, Records()
    if launches:
        made |= _specialise(staging, graphs, protos, work / KERNELS_FOLDER, versions)
        protos = {name: f"{KERNELS_FOLDER}/{name}.hlo.pb" for name in protos}
    neffs, logs = list[StagedFile](), list[StagedFile]()
    for graph in plan.graphs:
        name, line, hlo = graph.key.name, flags[flag_tag(graph.key)], protos[graph.key.name]
        recipe_hash = canonical_hash([(graphs | made)[hlo].sha256, line, versions])
        write = functools.partial(_compile, staging, hlo, work / name, line)
        neffs.append((f"neff/{name}.neff", recipe_hash, write))
        logs.append((f"logs/{name}.txt", recipe_hash, functools.partial(_copy, work / name / _LOG)))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    jobs = jobs or max(1, min(os.cpu_count() or 1, memory // _JOB_BYTES))
    made |= _make(staging, neffs, jobs) | _make(staging, logs)
    return made, Compiler("compiler", "neff", TARGET, LNC, flags, versions, "bir" if launches else "none")


def _make(staging: Staging, files: Sequence[StagedFile], jobs: int = 1) -> Records:
    """The records of files, which are reused or made, ``jobs`` at a time."""
    with ThreadPoolExecutor(jobs) as pool:
        # after an error those that wait are cancelled
        return dict(zip([name for name, *_ in files], pool.map(staging.make, files), strict=True))


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
    called = {name for file in files for name in specialise.binaries((staging.folder / file[0]).read_bytes())}
    ir = [(f"{KERNELS_FOLDER}/{name}", functools.partial(_copy, work / name)) for name in sorted(called)]
    return made | _make(staging, [(name, canonical_hash(name), copy) for name, copy in ir])


def _compile(staging: Staging, hlo: str, work: Path, flags: str, neff: Path) -> None:
    """One graph's NEFF; the compiler runs in a folder of its own, below which it finds the IR of kernels."""
    work.mkdir(parents=True, exist_ok=True)
    for name in specialise.binaries((staging.folder / hlo).read_bytes()) if hlo.startswith(KERNELS_FOLDER) else ():
        (work / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(staging.folder / KERNELS_FOLDER / name, work / name)
    sdk.compile_hlo(staging.folder / hlo, neff, work / _LOG, flags, work)


def _copy(source: Path, path: Path) -> None:
    # a compiler that takes a graph from its cache writes no log
    if source.is_file():
        shutil.copyfile(source, path)
    else:
        path.write_text(f"neuronx-cc left no {source.name}\n", encoding="utf-8")
