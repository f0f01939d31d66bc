"""Bundles with NEFFs for the stand-in of nrtpy, as `compile.neuron` adds them beside the stand-in's compiler."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from compile.neuron import sdk
from compile.neuron.__main__ import extend
from model.bundle.opening import Bundle, read_bundle
from model.serving.nrt_rank import ALIASED
from tests.compile import fake_sdk
from tests.stand_ins import PACKAGES
from tests.stand_ins.packages.nrtpy import neff

ROOT = Path(__file__).resolve().parents[2]


def with_neffs(bundle: Bundle, folder: Path) -> Bundle:
    """A copy of a bundle in a folder, with the NEFF of each graph."""
    of_file = {Path(graph.file).name: graph for graph in bundle.graphs}
    copy = Path(shutil.copytree(bundle.path, folder / bundle.path.name))

    def compile_hlo(hlo: Path, out: Path, log: Path, flags: str) -> None:
        graph = of_file[hlo.name]
        inputs = [*(t.name for t in (*graph.weights, *graph.inputs)), *(t.name + ALIASED for t in graph.state)]
        out.write_bytes(neff(hlo.read_bytes(), inputs, [t.name for t in (*graph.outputs, *graph.state)]))

    fake_sdk.write_compiler(folder / "bin")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(folder / "bin"), prepend=":")
        patch.setattr(sdk, "compile_hlo", compile_hlo)
        extend(read_bundle(copy))
    return read_bundle(copy)


def find_stand_ins(patch: pytest.MonkeyPatch, folder: Path = PACKAGES) -> None:
    """Let processes that are started from here find the stand-ins."""
    patch.setenv("PYTHONPATH", os.pathsep.join(map(str, (folder, ROOT))))
