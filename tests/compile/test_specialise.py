"""NKI kernels in NEFFs: the vendor's form of each call, over a stand-in of its seam, and bundles without it."""

from __future__ import annotations

import base64
import json
import os
import runpy
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from compile import recipes
from compile.build import build
from compile.doctor import findings
from compile.doctor import main as doctor
from compile.neuron import sdk, specialise
from compile.neuron.__main__ import extend
from compile.neuron.specialise import KERNELS_FOLDER
from model.nki.launches import CUSTOM_CALL_TARGET, LNC
from model.nki.table import KERNELS
from tests.compile import fake_nki, fake_sdk
from tests.compile.tiny import refused, spec
from tests.model.family import untraced
from trnspec.bundle import hlo
from trnspec.bundle.opening import Bundle, corrupt_files, read_bundle
from trnspec.runtime.xla import XlaRunner

CALLING = {"kernels": "nki", "k": 1, "batch": 1}


def _calls(module: Any) -> list[Any]:
    return [i for c in module.computations for i in c.instructions if i.custom_call_target == CUSTOM_CALL_TARGET]


@pytest.fixture(scope="module")
def made(base: Path) -> tuple[Bundle, int]:
    """A bundle that was built where neuronx-cc and nki are, and how many kernels were specialised for it."""
    with pytest.MonkeyPatch.context() as patch:
        fake_sdk.write_compiler(base / "bin")
        patch.setenv("PATH", str(base / "bin"), prepend=":")
        fake_nki.install(patch)
        fake_nki.SPECIALISED.clear()
        bundle = read_bundle(build(spec(base, "specialised", **CALLING)))
        count = len(fake_nki.SPECIALISED)
        again = read_bundle(build(spec(base, "specialised", **CALLING)))
        assert again.manifest.digest == bundle.manifest.digest
    return again, count


def test_a_bundle_has_each_kernel_and_its_graphs_call_them_in_the_vendor_s_form(
    made: tuple[Bundle, int], capsys: pytest.CaptureFixture[str]
) -> None:
    bundle, count = made
    assert (bundle.manifest.compiler.neff, bundle.manifest.compiler.kernels) == ("neff", "bir")
    assert corrupt_files(bundle) == []
    assert findings(bundle) == []
    doctor([str(bundle.path)])
    assert " GB: weights 0.00, draft 0.00, caches 0.00, code 1.14, rings 2.66, scratch 0.33" in capsys.readouterr().out
    called, launches = set[str](), set[bytes]()
    for graph in bundle.graphs:
        names = graph.file, f"{KERNELS_FOLDER}/{graph.key.name}.hlo.pb"
        plain, given = (_calls(hlo.parse(bytes(bundle.read(name)))) for name in names)
        assert plain
        called |= {_check_call(one, other) for one, other in zip(plain, given, strict=True)}
        launches |= {one.backend_config for one in plain}
    assert count == len(launches), "each launch is specialised once for all graphs"
    assert {f"{KERNELS_FOLDER}/{name}" for name in called} <= bundle.files.keys()
    assert all(b"stand-in" in bundle.read(f"{KERNELS_FOLDER}/{name}") for name in called)
    assert any(json.loads(launch)["changed"] for launch in launches)


def _check_call(plain: Any, specialised: Any) -> str:
    """The kernel's file of a call that has the vendor's form."""
    value, launch = json.loads(base64.b64decode(specialised.backend_config)), json.loads(plain.backend_config)
    binary = value["klir_binary"]
    assert value["func_name"] == KERNELS[launch["kernel"]].fn.__name__
    assert (value["platform_target"], value["kernel_format"], value["grid"]) == ("trn2", "bir", [LNC])
    assert len(binary["input_names"]) == len(specialised.operand_ids)
    changed = [binary["input_names"][i] for i in launch["changed"]]
    assert [pair[0] for pair in binary["aliases"]] == changed
    assert all(name.endswith(".must_alias_input") for name in changed)
    assert not specialised.custom_call_api_version
    aliased = {(a.operand_index, a.output_shape_index[0]) for a in specialised.output_operand_aliasing}
    assert aliased == {(n, len(launch["results"]) + at) for at, n in enumerate(launch["changed"])}
    name: str = binary["binary"]
    return name


def test_an_edit_of_a_kernel_compiles_the_graphs_whose_instructions_it_changes(
    made: tuple[Bundle, int], tmp_path: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other ones, and none after a changed comment, which moves every line below it."""
    fake_nki.install(monkeypatch)
    copy = Path(shutil.copytree(made[0].path, tmp_path / "copy", copy_function=os.link))
    shutil.copytree(recipes.ROOT / "nki_kernels", tmp_path / "nki_kernels")
    monkeypatch.setattr(recipes, "ROOT", tmp_path)
    file, line = tmp_path / "nki_kernels/sampling/accept_drafts.py", "    nisa.tensor_reduce(dst=count_1B1"

    def compiled_after(change: str) -> set[str]:
        file.write_text(file.read_text().replace(line, f"{change}\n{line}"))
        monkeypatch.setitem(KERNELS, file.stem, fake_nki.Kernel(runpy.run_path(str(file))["accept_drafts_kernel"].fn))
        fake_nki.SPECIALISED.clear()
        before = {p: p.stat().st_ino for p in copy.rglob("*.neff")}
        extend(read_bundle(copy))
        assert file.stem + "_kernel" in fake_nki.SPECIALISED
        return {p.stem for p, inode in before.items() if p.stat().st_ino != inode}

    assert compiled_after("    # a comment") == set()
    # the launches of k 0 have no drafts to count
    changed = {"step_k1_bk128", "step_k1_unfiltered_bk128", "verify_k1_bk128"}
    assert compiled_after("    nisa.memset(dst=count_1B1, value=0.0)") == changed
    monkeypatch.setattr(sdk, "versions", lambda *names: dict.fromkeys(names, "another"))
    fake_nki.SPECIALISED.clear()
    extend(read_bundle(copy))
    assert fake_nki.SPECIALISED, "another nki may write other instructions"


def test_refusals_of_nki(made: tuple[Bundle, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle, _ = made
    proto = bytes(bundle.read(bundle.graphs[0].file))
    config, given = fake_nki._config, "and the cores [2], the graph has"
    for owner, name, value, message in (
        (fake_nki, "_config", lambda *of: SimpleNamespace(**vars(config(*of)) | {"output_specs": []}), [given]),
        (specialise, "LNC", 1, [given, " and 1; build with"]),
        (fake_nki, "VERSION", object(), ["nki does not take the kernel ", ": Object of type object is not JSON ser"]),
        (fake_nki, "ALIASES", {0: 0}, ["nki gives ", " the results ", " 0: 0} and the cores [2], the graph has"]),
    ):
        with monkeypatch.context() as patch:
            fake_nki.install(patch)
            patch.setattr(owner, name, value)
            refused(lambda: specialise.specialised(proto, tmp_path, {}), *message)


def test_without_nki_every_entry_point_refuses(base: Path, compiler: Path) -> None:
    assert not specialise.available(), "nkisim answers to the name nki and has no such seam"
    message = "gets no NEFFs: its graphs launch NKI kernels and this machine has neuronx-cc"
    refused(lambda: build(spec(base, "new", **CALLING, toolchain="neuron")), message)
    path = untraced(spec(base, "none", **CALLING))
    compiled = read_bundle(path).manifest.compiler
    assert (compiled.neff, compiled.kernels) == ("none", "none")
    message = "its graphs call NKI kernels that were compiled for no device"
    refused(lambda: XlaRunner(read_bundle(path), "neuron"), message)
