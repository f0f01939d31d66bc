"""Bundles with NEFFs for the stand-in of nrtpy, added by `compile.neuron` with a stand-in compiler."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import jax
import pytest

from compile.graph.trace import proto_of
from compile.neuron import sdk
from compile.neuron.__main__ import extend
from model.graph_key import GraphKey, Stage
from model.graph_spec import GraphSpec, TensorSpec
from tests.compile import fake_sdk
from tests.stand_ins import PACKAGES
from tests.stand_ins.packages.nrtpy import neff
from trnspec.bundle import hlo
from trnspec.bundle.opening import Bundle, read_bundle

ROOT = Path(__file__).resolve().parents[2]


def compile_hlo(hlo_file: Path, out: Path, log: Path, flags: str, folder: Path) -> None:
    """Writes the stand-in's NEFF of a graph, in place of `sdk.compile_hlo`."""
    proto = hlo_file.read_bytes()
    entry = hlo.entry(hlo.parse(proto))
    parameters = sorted((i for i in entry.instructions if i.opcode == "parameter"), key=lambda i: i.parameter_number)
    root = next(i for i in entry.instructions if i.id == entry.root_id)
    out.write_bytes(neff(proto, [hlo.io_names(p)[0] for p in parameters], hlo.io_names(root)))


def leave_neff(folder: Path) -> None:
    """Writes a NEFF of one addition, in place of the kernel NEFF that nki writes."""
    x, y = (TensorSpec(name, (4, 8), "float32") for name in "xy")
    lowered = jax.jit(lambda a: (a + 1,)).lower(jax.ShapeDtypeStruct(x.shape, x.dtype))
    proto = proto_of(lowered, GraphSpec(GraphKey(Stage.STEP), (), (x,), (), (y,)))
    folder.mkdir()
    (folder / "kernel.neff").write_bytes(neff(proto, ["x"], ["y"]))


def with_neffs(bundle: Bundle, folder: Path) -> Bundle:
    """A copy of a bundle in a folder, with the NEFF of each graph."""
    copy = Path(shutil.copytree(bundle.path, folder / bundle.path.name))
    fake_sdk.write_compiler(folder / "bin")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(folder / "bin"), prepend=":")
        patch.setattr(sdk, "compile_hlo", compile_hlo)
        extend(read_bundle(copy))
    return read_bundle(copy)


def find_stand_ins(patch: pytest.MonkeyPatch, folder: Path = PACKAGES) -> None:
    """Adds the stand-ins to the path of child processes."""
    patch.setenv("PYTHONPATH", os.pathsep.join(map(str, (folder, ROOT, ROOT / "nkisim/src"))))
