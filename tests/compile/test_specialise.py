"""NKI kernels in NEFFs: the vendor's form of each call, over a stand-in of its seam, and bundles without it."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from compile.build import build
from compile.build import main as build_command
from compile.doctor import findings
from compile.doctor import main as doctor
from compile.neuron import specialise
from compile.neuron.specialise import KERNELS_FOLDER
from compile.serve_command import main as serve_command
from model.errors import UserError
from model.nki.launches import LNC, TARGET
from model.nki.table import KERNELS
from tests.compile import fake_nki
from tests.compile.tiny import relist, spec
from trnspec.bundle import hlo
from trnspec.bundle.opening import damage, read_bundle
from trnspec.runtime.xla import XlaRunner

CALLING = {"kernels": "nki", "k": 1, "batch": 1}
# every field of the configuration, and its type
FORM = {
    "func_name": str, "platform_target": str, "kernel_format": str, "kernel_version": int, "klir_binary": dict,
    "grid": list, "has_collectives": bool, "mac_count": int,
}  # fmt: skip
BINARY = {"binary": str, "input_names": list, "output_names": list, "version_identifier": str, "aliases": list}


def _calls(proto: bytes) -> list[Any]:
    return [i for c in hlo.parse(proto).computations for i in c.instructions if i.custom_call_target == TARGET]


def test_a_bundle_has_each_kernel_and_its_graphs_call_them_in_the_vendor_s_form(
    base: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fake_nki.install(patch)
        bundle = read_bundle(build(spec(base, "specialised", **CALLING)))
        assert (bundle.manifest.compiler.neff, bundle.manifest.compiler.kernels) == ("neff", "bir")
        again = build(spec(base, "specialised", **CALLING))
        assert read_bundle(again).manifest.digest == bundle.manifest.digest
    assert damage(bundle) == []
    assert findings(bundle) == []
    called = set[str]()
    for graph in bundle.graphs:
        plain, given = (bundle.read(f) for f in (graph.file, f"{KERNELS_FOLDER}/{graph.key.name}.hlo.pb"))
        assert len(_calls(plain)) == len(_calls(given)) > 0
        for one, other in zip(_calls(plain), _calls(given), strict=True):
            value = json.loads(base64.b64decode(other.backend_config))
            assert {n: type(v) for n, v in value.items()} == FORM
            assert {n: type(v) for n, v in value["klir_binary"].items()} == BINARY
            launch = json.loads(one.backend_config)
            assert value["func_name"] == KERNELS[launch["kernel"]].fn.__name__
            assert (value["platform_target"], value["kernel_format"], value["grid"]) == ("trn2", "bir", [LNC])
            binary = value["klir_binary"]
            assert len(binary["input_names"]) == len(other.operand_ids)
            changed = [binary["input_names"][i] for i in launch["changed"]]
            assert [pair[0] for pair in binary["aliases"]] == changed
            assert all(name.endswith(".must_alias_input") for name in changed)
            aliased = {(a.operand_index, a.output_shape_index[0]) for a in other.output_operand_aliasing}
            assert aliased == {(n, len(launch["results"]) + at) for at, n in enumerate(launch["changed"])}
            called.add(binary["binary"])
    assert {f"{KERNELS_FOLDER}/{name}" for name in called} <= bundle.files.keys()
    assert all(b"stand-in" in bundle.read(f"{KERNELS_FOLDER}/{name}") for name in called)
    assert any(json.loads(c.backend_config)["changed"] for c in _calls(bundle.read(bundle.graphs[0].file)))


def test_a_kernel_that_is_gone_is_named(base: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        fake_nki.install(patch)
        path = build(spec(base, "lost", **CALLING))
    bundle = read_bundle(path)
    graph = f"{KERNELS_FOLDER}/{bundle.graphs[0].key.name}.hlo.pb"
    module = hlo.parse((path / graph).read_bytes())
    call = next(i for c in module.computations for i in c.instructions if i.custom_call_target == TARGET)
    value = json.loads(base64.b64decode(call.backend_config))
    value["klir_binary"]["binary"] = "0123/gone.bir"
    call.backend_config = base64.b64encode(json.dumps(value).encode())
    (path / graph).write_bytes(module.SerializeToString())
    relist(path, graph)
    (said,) = findings(read_bundle(path))
    assert said.startswith(f"{graph}: it calls 0123/gone.bir, which the bundle lacks (NCC_EVRF059); build the bundle")


@pytest.mark.parametrize("lost", [*FORM, *(f"klir_binary.{name}" for name in BINARY)])
def test_a_configuration_without_a_field_is_refused(lost: str) -> None:
    value: dict[str, Any] = {n: kind() or "x" if kind is str else kind() for n, kind in FORM.items()}
    value["klir_binary"] = {n: "x" if kind is str else kind() for n, kind in BINARY.items()}
    assert specialise.checked(base64.b64encode(json.dumps(value).encode())) == value
    part = value["klir_binary"] if lost.startswith("klir_binary.") else value
    del part[lost.rpartition(".")[2]]
    with pytest.raises(UserError, match=r"NCC_EVRF065|cannot be read"):
        specialise.checked(base64.b64encode(json.dumps(value).encode()))


def test_without_nki_every_door_says_so(
    base: Path, compiler: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not specialise.here(), "nkisim answers to the name nki and has no such seam"
    with pytest.raises(UserError, match="gets no NEFFs: its graphs call NKI kernels and this machine has neuronx-cc w"):
        build(spec(base, "asked", **CALLING, toolchain="neuron"))
    path = build(spec(base, "none", **CALLING))
    compiled = read_bundle(path).manifest.compiler
    assert (compiled.neff, compiled.kernels) == ("none", "none")
    why = "its graphs call NKI kernels that were compiled for no device (kernels: none); build it on a machine with"
    doctor([str(path)])
    assert f"PJRT: no, {why}" in capsys.readouterr().out
    flags = ["--target", str(base / "target"), "--draft", str(base / "draft"), "--out", str(path), "--tp", "1"]
    build_command([*flags, "--max-len", "128", "--dtype", "fp32", "--k", "1", "--batch", "1", "--kernels", "nki"])
    assert f"none runs on no Trainium: {why}" in capsys.readouterr().err
    for door in (lambda: serve_command([str(path)]), lambda: XlaRunner(read_bundle(path), "neuron")):
        with pytest.raises(UserError) as said:
            door()
        assert why in str(said.value)
