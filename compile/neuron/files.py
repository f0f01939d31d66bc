"""The SDK's files in a bundle: NEFF files or model.pt, the compiler's logs and HLO, flags and versions.

Everything is made on the local disk, in `.build/neuron`; the files that are kept move into the bundle.
"""

from __future__ import annotations

import functools
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from compile.bundle.staging import StagedFile
from compile.neuron import sdk
from compile.neuron.flags import LNC, TARGET, flag_tag, flags_of
from compile.neuron.sdk import Found, Level, nxdi_graphs, nxdi_tags
from compile.recipes import sources
from model.bundle.manifest import Compiler, canonical_hash
from model.bundle.plan import BundlePlan
from model.errors import UserError

MODEL: Final = "model.pt"
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
    plan: BundlePlan, folder: Path, graphs: list[StagedFile], toolchain: str, compiler_flags: Mapping[str, str]
) -> tuple[list[StagedFile], Compiler]:
    """The artifacts that the SDK adds to those of the graphs in a folder, and the manifest's entry for it."""
    found = chosen(toolchain, plan.spec.kernels)
    if found.level is Level.NONE:
        return [], Compiler()
    flags, alone = flags_of(compiler_flags), found.level is Level.COMPILER
    tags = sorted({flag_tag(g.key) for g in plan.graphs}) if alone else sorted(nxdi_tags(plan))
    of_graphs = sorted((g.name, g.recipe) for g in graphs)
    if not alone and plan.spec.pool < replace(plan.spec, blocks=0).pool:
        raise UserError(
            f"blocks is {plan.spec.blocks} and {MODEL} gives each slot blocks of its own; leave blocks out, or use the "
            "toolchain cpu"
        )
    if alone:
        print(f"this bundle gets NEFFs and no {MODEL}: {found.why_no_model}", file=sys.stderr)
        artifacts = _neffs(plan, folder, dict(of_graphs), flags, found)
    else:
        recipe = [found.versions, {t: flags[t] for t in tags}, of_graphs, sources(_TRACED_BY)]
        artifacts = _model(plan, folder, canonical_hash(recipe), flags)
    used = {t: flags[t] for t in tags}
    if alone:
        return artifacts, Compiler("compiler", "neff", TARGET, LNC, used, found.versions)
    return artifacts, Compiler("full", MODEL, TARGET, LNC, used, found.versions)


def _work(folder: Path) -> Path:
    return folder / ".build" / "neuron"


def _neffs(
    plan: BundlePlan, folder: Path, recipes: dict[str, str], flags: dict[str, str], found: Found
) -> list[StagedFile]:
    if plan.spec.kernels != "reference":
        raise UserError(
            f"--kernels {plan.spec.kernels} needs the whole Neuron SDK and this machine has {sdk.COMPILER} alone, "
            f"which cannot read our calls of kernels ({found.why_no_model}); use --kernels reference, the toolchain "
            "cpu, or install it"
        )
    made = []
    for graph in plan.graphs:
        name, line = graph.key.name, flags[flag_tag(graph.key)]
        log = _work(folder) / name / "log-neuron-cc.txt"
        recipe = canonical_hash([recipes[graph.file], line, found.versions])
        made += [
            StagedFile(f"neff/{name}.neff", recipe, functools.partial(_neff, folder / graph.file, log, line)),
            StagedFile(f"logs/{name}.txt", recipe, _copy_of(log)),
        ]
    return made


def _neff(hlo: Path, log: Path, flags: str, neff: Path) -> None:
    sdk.compile_hlo(hlo, neff, log, flags)


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
