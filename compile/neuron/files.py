"""The SDK's files in a bundle: NEFF files or model.pt, kernels, the compiler's logs and HLO, flags and versions.

Everything is made on the local disk, in `.build/neuron`; the files that are kept move into the bundle.
"""

from __future__ import annotations

import functools
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

from compile.bundle.staging import StagedFile, Staging
from compile.neuron import sdk, specialise
from compile.neuron.flags import LNC, TARGET, flags_of
from compile.neuron.sdk import Found, Level, nxdi_graphs, nxdi_tags
from compile.neuron.specialise import KERNELS_FOLDER
from compile.recipes import sources
from compile.spec import Recipe
from model.errors import UserError
from trnspec.bundle.compiler_flags import flag_tag
from trnspec.bundle.manifest import Compiler, canonical_hash
from trnspec.bundle.plan import BundlePlan

MODEL: Final = "model.pt"
# code that becomes the IR of kernels
_SPECIALISED_BY = ("nki_kernels", "compile/neuron/specialise.py", "model/nki/table.py")
# code that runs while the module of model.pt is traced, beside the code that makes the graphs of the plan
_TRACED_BY = ("compile/neuron/module.py", "compile/neuron/sdk.py")


def chosen(name: str, kernels: str) -> Found:
    """The toolchain of a build: the installed one (auto), none (cpu), or at least the compiler (neuron)."""
    if name == "cpu":
        return Found(Level.NONE, (), {})
    if name == "neuron":
        return sdk.require(Level.COMPILER, "toolchain neuron", kernels)
    return sdk.find(kernels)


def compiled(
    plan: BundlePlan, folder: Path, graphs: list[StagedFile], recipe: Recipe
) -> tuple[list[StagedFile], Compiler]:
    """The artifacts that the SDK adds to those of the graphs in a folder, and the manifest's entry for it."""
    found = chosen(recipe.toolchain, plan.spec.kernels)
    if found.level is Level.NONE or _without_kernels(plan, found, recipe.toolchain):
        return [], Compiler()
    flags, alone = flags_of(recipe.compiler_flags, found.versions[sdk.COMPILER]), found.level is Level.COMPILER
    tags = sorted({flag_tag(g.key) for g in plan.graphs}) if alone else sorted(nxdi_tags(plan))
    of_graphs = sorted((g.name, g.recipe) for g in graphs)
    if not alone and plan.spec.pool < replace(plan.spec, blocks=0).pool:
        raise UserError(
            f"blocks is {plan.spec.blocks} and {MODEL} gives each slot blocks of its own; leave blocks out, or use the "
            "toolchain cpu"
        )
    if alone:
        print(f"this bundle gets NEFFs and no {MODEL}: {found.why_no_model}", file=sys.stderr)
        artifacts = _neffs(plan, folder, (dict(of_graphs), recipe.compiler_input), flags, found)
    else:
        inputs = [found.versions, {t: flags[t] for t in tags}, of_graphs, sources(_TRACED_BY)]
        artifacts = _model(plan, folder, canonical_hash(inputs), flags)
    used, calls = {t: flags[t] for t in tags}, plan.spec.kernels != "reference"
    if alone:
        return artifacts, Compiler("compiler", "neff", TARGET, LNC, used, found.versions, "bir" if calls else "none")
    return artifacts, Compiler("full", MODEL, TARGET, LNC, used, found.versions, MODEL if calls else "none")


def _work(folder: Path) -> Path:
    return folder / ".build" / "neuron"


def _neffs(
    plan: BundlePlan, folder: Path, graphs: tuple[dict[str, str], str], flags: dict[str, str], found: Found
) -> list[StagedFile]:
    recipes, form = graphs
    made, calls = list[StagedFile](), plan.spec.kernels != "reference"
    kernels, code = _work(folder) / KERNELS_FOLDER, sources(_SPECIALISED_BY) if calls else {}
    for graph in plan.graphs:
        name, line, source = graph.key.name, flags[flag_tag(graph.key)], folder / graph.file
        log = _work(folder) / name / "log-neuron-cc.txt"
        recipe = canonical_hash([recipes[graph.file], line, found.versions, code, form])
        if calls:
            made.append(
                StagedFile(f"{KERNELS_FOLDER}/{name}.hlo.pb", recipe, functools.partial(_specialised, source, kernels))
            )
            source = folder / made[-1].name
        made += [
            StagedFile(f"neff/{name}.neff", recipe, functools.partial(_neff, source, form, log, line, kernels)),
            StagedFile(f"logs/{name}.txt", recipe, _copy_of(log)),
        ]
    return made


def _specialised(hlo: Path, kernels: Path, out: Path) -> None:
    out.write_bytes(specialise.specialised(hlo.read_bytes(), kernels))


def _neff(hlo: Path, form: str, log: Path, flags: str, kernels: Path, neff: Path) -> None:
    if form == "stablehlo":
        # a machine of the SDK need not have jax
        from compile.graph.twin import stablehlo  # noqa: PLC0415

        source, hlo = hlo, log.with_name(f"{hlo.name}.mlir")
        log.parent.mkdir(parents=True, exist_ok=True)
        hlo.write_text(stablehlo(source.read_bytes()), encoding="utf-8")
    # the compiler finds kernels below the folder that it runs in
    sdk.compile_hlo(hlo, neff, log, flags, kernels if kernels.is_dir() else log.parent)


def kernel_files(staging: Staging, files: Iterable[StagedFile]) -> list[StagedFile]:
    """The IR of kernels that the specialised graphs among the finished files of a build call."""
    graphs = [staging.path(f.name) for f in files if f.name.startswith(f"{KERNELS_FOLDER}/")]
    names = sorted({name for graph in graphs for name in specialise.binaries(graph.read_bytes())})
    work = _work(staging.folder) / KERNELS_FOLDER
    return [StagedFile(f"{KERNELS_FOLDER}/{n}", canonical_hash(n), functools.partial(_ir, work / n)) for n in names]


def _ir(source: Path, path: Path) -> None:
    shutil.copyfile(source, path)


def _without_kernels(plan: BundlePlan, found: Found, toolchain: str) -> bool:
    """Whether graphs call kernels and only the compiler is here; UserError if the SDK was asked for."""
    if plan.spec.kernels == "reference" or found.level is Level.FULL or specialise.here():
        return False
    if toolchain == "neuron":
        why = f"its graphs call NKI kernels and this machine has {sdk.COMPILER} without nki"
        raise UserError(
            f"this bundle gets no NEFFs: {why}; install nki from AWS's package index, or use --kernels reference"
        )
    return True


def _copy_of(source: Path) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        # a compiler that takes a graph from its cache compiles nothing and writes no log
        if source.is_file():
            shutil.copyfile(source, path)
        else:
            path.write_text(f"the compiler left no {source.name}\n", encoding="utf-8")

    return write


def _model(plan: BundlePlan, folder: Path, recipe: str, flags: dict[str, str]) -> list[StagedFile]:
    work = _work(folder)
    made = [StagedFile(MODEL, recipe, lambda path: sdk.build_model(plan, path, work, flags))]
    for tag in nxdi_tags(plan):
        for index, graph in enumerate(nxdi_graphs(plan, tag)):
            of_graph = work / tag / f"_tp0_bk{index}"
            made += [
                StagedFile(f"logs/{graph.key.name}.txt", recipe, _copy_of(of_graph / "log-neuron-cc.txt")),
                StagedFile(f"logs/{graph.key.name}.hlo", recipe, _copy_of(of_graph / "model" / "graph.hlo")),
            ]
    return made
