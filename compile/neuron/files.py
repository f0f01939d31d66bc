"""What the SDK adds to a bundle: NEFF files or model.pt, the compiler's logs and HLO, flags and versions.

Everything is made on the local disk, in `.build/neuron`; what is kept of it is a file of the bundle.
"""

from __future__ import annotations

import functools
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compile.bundle.staging import StagedFile
from compile.neuron import sdk as toolchain
from compile.neuron.flags import LNC, TARGET, flags_of
from compile.neuron.sdk import Found, Level, nxdi_graphs, nxdi_tags
from compile.plan import BuildPlan
from compile.recipes import sources
from compile.spec import BuildSpec
from model.bundle.manifest import FUSED, GraphSpec, canonical_hash
from model.bundle.schema import DRAFT, VERIFY, kind_of
from model.errors import UserError

MODEL = "model.pt"
_CHOICES = ("auto", "cpu", "neuron")


# what runs while the module of model.pt is traced, beside what makes the graphs of the plan
_TRACED_BY = ("compile/neuron/module.py", "compile/neuron/sdk.py")


def check_words(spec: BuildSpec) -> None:
    """Raise UserError for a toolchain or compiler flags that are none, also where nothing will be compiled."""
    if spec.toolchain not in _CHOICES:
        raise UserError(f"toolchain is {spec.toolchain!r}; it must be one of {', '.join(_CHOICES)}")
    flags_of(spec.compiler_flags)


def chosen(name: str, kernels: str) -> Found:
    """The toolchain of a build: what is here (auto), nothing (cpu), or at least the compiler (neuron)."""
    if name == "cpu":
        return Found(Level.NONE, (), {})
    if name == "neuron":
        return toolchain.require(Level.COMPILER, "--toolchain neuron", kernels)
    return toolchain.find(kernels)


def compiled(plan: BuildPlan, graphs: list[StagedFile]) -> tuple[list[StagedFile], dict[str, Any]]:
    """The artifacts that the SDK adds to those of the graphs, and what it changes in the manifest."""
    found = chosen(plan.spec.toolchain, plan.spec.kernels)
    if found.level is Level.NONE:
        return [], {}
    flags = flags_of(plan.spec.compiler_flags)
    tags = sorted({_flagged(g) for g in plan.graphs}) if found.level is Level.COMPILER else sorted(nxdi_tags(plan))
    of_graphs = sorted((g.name, g.recipe) for g in graphs)
    recipe = [found.versions, {t: flags[t] for t in tags}, of_graphs, sources(_TRACED_BY)]
    if found.level is Level.COMPILER:
        print(f"this bundle gets NEFFs and no {MODEL}: {found.why_no_model}", file=sys.stderr)
        artifacts, neff = _neffs(plan, dict(of_graphs), flags, found), "neff"
    else:
        artifacts, neff = _model(plan, canonical_hash(recipe), flags), MODEL
    how = {"target": TARGET, "lnc": LNC, "flags": {t: flags[t] for t in tags}, "versions": found.versions}
    return artifacts, {"toolchain": found.level.name.lower(), "neff": neff, "compiler": how}


def _work(plan: BuildPlan) -> Path:
    return Path(plan.spec.out) / ".build" / "neuron"


def _flagged(graph: GraphSpec) -> str:
    """The tag whose flags a graph is compiled with: the same for every k and every ending, and for halves of a step."""
    return FUSED if (kind := kind_of(graph.tag)) in (DRAFT, VERIFY) else kind


def _stem(graph: GraphSpec) -> str:
    return f"{graph.tag}_bk{graph.bucket}"


def _neffs(plan: BuildPlan, recipes: dict[str, str], flags: dict[str, str], found: Found) -> list[StagedFile]:
    if plan.spec.kernels != "reference":
        raise UserError(
            f"--kernels {plan.spec.kernels} needs the whole Neuron SDK and this machine has {toolchain.COMPILER} "
            f"alone, which cannot read our calls of kernels ({found.why_no_model}); use --kernels reference, "
            "--toolchain cpu, or install it"
        )
    made = []
    for graph in plan.graphs:
        log = _work(plan) / _stem(graph) / "log-neuron-cc.txt"
        hlo, line = Path(plan.spec.out) / graph.file, flags[_flagged(graph)]
        recipe = canonical_hash([recipes[graph.file], line, found.versions])
        made += [
            StagedFile(f"neff/{_stem(graph)}.neff", recipe, functools.partial(_neff, hlo, log, line)),
            StagedFile(f"logs/{_stem(graph)}.txt", recipe, _copy_of(log)),
        ]
    return made


def _neff(hlo: Path, log: Path, flags: str, neff: Path) -> None:
    toolchain.compile_hlo(hlo, neff, log, flags)


def _copy_of(source: Path) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        # a compiler that takes a graph from its cache compiles nothing and writes no log
        if source.is_file():
            shutil.copyfile(source, path)
        else:
            path.write_text(f"the compiler left no {source.name}\n", encoding="utf-8")

    return write


def _model(plan: BuildPlan, recipe: str, flags: dict[str, str]) -> list[StagedFile]:
    work = _work(plan)
    made = [StagedFile(MODEL, recipe, lambda path: toolchain.build_model(plan, path, work, flags))]
    for tag in nxdi_tags(plan):
        for index, graph in enumerate(nxdi_graphs(plan, tag)):
            folder = work / tag / f"_tp0_bk{index}"
            made += [
                StagedFile(f"logs/{_stem(graph)}.txt", recipe, _copy_of(folder / "log-neuron-cc.txt")),
                StagedFile(f"logs/{_stem(graph)}.hlo", recipe, _copy_of(folder / "model" / "graph.hlo")),
            ]
    return made
