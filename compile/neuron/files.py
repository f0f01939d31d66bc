"""The SDK's files of a bundle: NEFFs of its graphs, the IR of their NKI kernels, the compiler's logs.

A file's recipe is a hash of what it is made from: of an HLO proto, the compiler's version and its flags. Everything is
made on the local disk, in `.build/neuron`; what a bundle lists moves into it.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from compile.bundle.staging import StagedFile, Staging
from compile.neuron import sdk, specialise
from compile.neuron.flags import LNC, TARGET, flags_of
from compile.neuron.specialise import KERNELS_FOLDER
from compile.recipes import sources
from compile.spec import Recipe
from model.cache import KEY_TILE
from trnspec.bundle.compiler_flags import flag_tag
from trnspec.bundle.manifest import Compiler, File, canonical_hash
from trnspec.bundle.plan import BundlePlan

# code that becomes the IR of kernels
_SPECIALISED_BY = ("nki_kernels", "compile/neuron/specialise.py", "model/nki/table.py")
# host memory of one neuronx-cc: up to 40 GB for a decode graph of a 30B model
_JOB_BYTES = 40 << 30


def add_neffs(
    plan: BundlePlan, staging: Staging, records: Mapping[str, File], recipe: Recipe, jobs: int = 0
) -> tuple[dict[str, File], Compiler]:
    """The records of the files of the SDK in a staged bundle, made where they lack, and the manifest's entry.

    ``records`` has the graphs; ``jobs`` compilers run at a time, 0 for as many as the memory holds.
    """
    launches = plan.spec.kernels != "reference"
    versions = sdk.versions(sdk.COMPILER, *[sdk.NKI] * launches)
    flags, folder = flags_of(recipe.compiler_flags, versions[sdk.COMPILER]), staging.folder / ".build" / "neuron"
    # no device runs a prompt's chunk of less than a tile
    graphs = [g for g in plan.graphs if not g.key.is_prefill or g.key.rows >= KEY_TILE]
    inputs, made = {g.key.name: g.file for g in graphs}, dict(records)
    if launches:
        made |= _specialise(staging, made, inputs, folder / KERNELS_FOLDER, versions)
        inputs = {name: f"{KERNELS_FOLDER}/{name}.hlo.pb" for name in inputs}
    neffs, logs = list[StagedFile](), list[StagedFile]()
    for graph in graphs:
        name, line = graph.key.name, flags[flag_tag(graph.key)]
        hash_ = canonical_hash([made[inputs[name]].sha256, line, versions, recipe.compiler_input])
        compiled = functools.partial(_compile, staging, inputs[name], recipe.compiler_input, folder / name, line)
        neffs.append(StagedFile(f"neff/{name}.neff", hash_, compiled))
        logs.append(StagedFile(f"logs/{name}.txt", hash_, _copy_of(folder / name / "log-neuron-cc.txt")))
    made |= make(staging, neffs, jobs or _jobs()) | make(staging, logs)
    new = {name: record for name, record in made.items() if name not in records}
    return new, Compiler("compiler", "neff", TARGET, LNC, flags, versions, "bir" if launches else "none")


def make(staging: Staging, files: Sequence[StagedFile], jobs: int = 1) -> dict[str, File]:
    """The records of files, which are reused or made, ``jobs`` at a time."""
    with ThreadPoolExecutor(jobs) as pool:
        # after an error those that wait are cancelled
        return dict(zip([f.name for f in files], pool.map(staging.make, files), strict=True))


def _jobs() -> int:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(os.cpu_count() or 1, memory // _JOB_BYTES))


def _specialise(
    staging: Staging, records: Mapping[str, File], graphs: Mapping[str, str], kernels: Path, versions: dict[str, str]
) -> dict[str, File]:
    """Records of the graphs with the vendor's calls of kernels, and of the IR that they call."""
    code, configured = sources(_SPECIALISED_BY), dict[bytes, bytes]()

    def write(file: str, path: Path) -> None:
        path.write_bytes(specialise.specialised(staging.path(file).read_bytes(), kernels, configured))

    files = [
        StagedFile(
            f"{KERNELS_FOLDER}/{name}.hlo.pb",
            canonical_hash([records[file].sha256, versions, code]),
            functools.partial(write, file),
        )
        for name, file in graphs.items()
    ]
    made = make(staging, files)
    called = {name for file in files for name in specialise.binaries(staging.path(file.name).read_bytes())}
    ir = [StagedFile(f"{KERNELS_FOLDER}/{n}", canonical_hash(n), _copy_of(kernels / n)) for n in sorted(called)]
    return made | make(staging, ir)


def _compile(staging: Staging, hlo: str, form: str, folder: Path, flags: str, neff: Path) -> None:
    """One graph's NEFF; the compiler runs in a folder of its own, below which it finds the IR of kernels."""
    folder.mkdir(parents=True, exist_ok=True)
    source = staging.path(hlo)
    if form == "stablehlo":
        # a machine of the SDK need not have jax
        from compile.graph.twin import stablehlo  # noqa: PLC0415

        text, source = stablehlo(source.read_bytes()), folder / "graph.mlir"
        source.write_text(text, encoding="utf-8")
    for name in specialise.binaries(staging.path(hlo).read_bytes()) if hlo.startswith(KERNELS_FOLDER) else ():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(staging.path(f"{KERNELS_FOLDER}/{name}"), folder / name)
    sdk.compile_hlo(source, neff, folder / "log-neuron-cc.txt", flags, folder)


def _copy_of(source: Path) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        # a compiler that takes a graph from its cache writes no log
        if source.is_file():
            shutil.copyfile(source, path)
        else:
            path.write_text(f"neuronx-cc left no {source.name}\n", encoding="utf-8")

    return write
