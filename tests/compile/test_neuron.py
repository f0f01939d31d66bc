"""NEFFs: what is found on a machine, what neuronx-cc is called with, what a bundle then has, what is made again."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import compile.build
from compile.build import build
from compile.neuron import sdk
from compile.neuron.__main__ import extend
from compile.neuron.__main__ import main as add
from compile.neuron.flags import DEFAULT_FLAGS, LNC, flags_of
from compile.recipes import ROOT
from compile.serve_command import refusals
from compile.spec import read_recipe
from model.errors import UserError
from tests.compile import fake_sdk
from tests.compile.tiny import spec
from tests.model.family import untraced
from trnspec.bundle.manifest import MANIFEST, Compiler
from trnspec.bundle.opening import damage, read_bundle

SMALL: dict[str, Any] = {"k": 1, "batch": 1, "chunks": (128,)}


def _neffs(path: Path) -> dict[str, int]:
    return {p.name: p.stat().st_mtime_ns for p in path.rglob("*.neff")}


def _changed(path: Path, before: dict[str, int]) -> set[str]:
    return {name for name, time in _neffs(path).items() if before.get(name) != time}


def test_without_neuronx_cc_a_bundle_has_no_neffs(base: Path) -> None:
    assert sdk.missing(False) == "this machine has no neuronx-cc; install it from AWS's package index"
    assert read_bundle(untraced(spec(base, "bare", **SMALL))).manifest.compiler == Compiler()
    with pytest.raises(UserError, match="this bundle gets no NEFFs: this machine has no neuronx-cc"):
        build(spec(base, "asked", toolchain="neuron"))
    assert not (base / "asked").exists()


def test_the_flags_are_documented_ones() -> None:
    """Those of the reference guide of SDK 2.32; the rules for integers where the compiler knows them."""
    line = f"--model-type transformer --auto-cast none -O2 --lnc {LNC}"
    assert {"prefill": line, "step": line} == DEFAULT_FLAGS
    assert flags_of({}, "2.26.6360.0+abc") == flags_of({}, "(unknown version)") == DEFAULT_FLAGS
    integers = f"{line} --native-int64=disabled --implicit-integer-downcast=none"
    for version in ("2.27.5334.0", "2.28.7631.0+f4"):
        assert set(flags_of({}, version).values()) == {integers}
    assert flags_of({"step": "-O1"}, "2.28.7631.0") == {"prefill": integers, "step": "-O1"}
    assert read_recipe('{"compiler_flags": "-O3"}').compiler_flags == {"prefill": "-O3", "step": "-O3"}
    with pytest.raises(UserError, match="compiler_flags has 'fused'; give a line of flags for one of prefill, step"):
        flags_of({"fused": "-O3"})


@pytest.mark.parametrize("flag", ["--lnc=1", "--lnc 1", "--logical-nc-config 1", "-lnc 1"])
def test_flags_for_other_cores_than_the_kernels_are_refused(flag: str) -> None:
    with pytest.raises(UserError, match=f"for 1 cores and its kernels have {LNC}, which neuronx-cc refuses.*EVRF066"):
        flags_of({"prefill": f"-O3 {flag}"})


def test_no_other_file_imports_the_sdk() -> None:
    vendor = re.compile(r"import.*\b(torch_neuronx|torch_xla|libneuronxla|neuronxcc|neuronx_distributed\w*)\b")
    rooms = ("model", "trnspec", "compile", "serve", "bench", "deploy", "nki_kernels")
    sources = [f for room in rooms for f in (ROOT / room).rglob("*.py")]
    found = {f.relative_to(ROOT).as_posix() for f in sources if vendor.search(f.read_text(encoding="utf-8"))}
    assert found == {"compile/nxd/files.py"}


def test_every_graph_gets_a_neff_also_where_nxd_is(base: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_sdk.install(monkeypatch)
    out = untraced(spec(base, "neffs", **SMALL))
    bundle = read_bundle(out)
    compiled = bundle.manifest.compiler
    assert (compiled.toolchain, compiled.neff, compiled.flags) == ("compiler", "neff", DEFAULT_FLAGS)
    assert not {"model.pt", "neuron_config.json"} & bundle.files.keys()
    assert not refusals(bundle)["nrt"]
    for graph in bundle.graphs:
        assert (out / f"neff/{graph.key.name}.neff").read_bytes()[:4] == b"NEFF"
        log = (out / f"logs/{graph.key.name}.txt").read_text(encoding="utf-8")
        assert "--target=trn2 --model-type transformer --auto-cast none -O2 --lnc 2" in log


def test_a_neff_is_made_again_for_another_graph_flag_or_compiler_and_for_nothing_else(
    base: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled(**changes: Any) -> Path:
        return untraced(spec(base, "again", **(SMALL | changes)))

    out, count = compiled(), len(read_bundle(base / "again").graphs)
    before = _neffs(out)
    assert len(before) == count
    # graphs are traced again, as after a changed comment in the model: the same bytes
    with mock.patch.object(compile.build, "trace_code", return_value={"model": "changed"}):
        assert _changed(compiled(), before) == set()
    of_steps = {name for name in before if not name.startswith("prefill")}
    assert _changed(compiled(compiler_flags={"step": "-O3"}), before) == of_steps
    before = _neffs(out)
    monkeypatch.setattr(sdk, "versions", lambda *packages: dict.fromkeys(packages, "2.28.7631.0"))
    assert len(_changed(compiled(compiler_flags={"step": "-O3"}), before)) == count
    compiled(toolchain="cpu")
    assert not _neffs(out), "what a bundle does not list is not left in its folder"
    assert damage(read_bundle(out)) == []


def test_a_graph_that_the_compiler_refuses_is_a_sentence_and_the_rest_stays(base: Path, compiler: Path) -> None:
    fake_sdk.write_compiler(compiler, fails="step_k0_bk")
    with pytest.raises(UserError, match=r"ended with 1 on step_k0_bk.* said: \[F137\] the graph is too large; read"):
        untraced(spec(base, "refused", **SMALL, jobs=1))
    before = _neffs(base / ".refused.building")
    assert before
    fake_sdk.write_compiler(compiler)
    assert not _changed(untraced(spec(base, "refused", **SMALL)), before) & before.keys()


def test_compilers_run_as_many_at_a_time_as_jobs_says(base: Path, compiler: Path) -> None:
    fake_sdk.write_compiler(compiler, seconds=0.2)
    untraced(spec(base, "jobs", **SMALL, jobs=2))
    calls = sorted(fake_sdk.calls(compiler))
    assert max(sum(begin <= start < end for begin, end in calls) for start, _ in calls) == 2


def test_neffs_are_added_to_a_bundle_that_was_built_elsewhere(base: Path, compiler: Path) -> None:
    out = untraced(spec(base, "elsewhere", **SMALL, toolchain="cpu"))
    before = (out / MANIFEST).read_bytes()
    fake_sdk.write_compiler(compiler, fails="step_k0_bk")
    with pytest.raises(UserError, match=r"the graph is too large"):
        add([str(out), "--jobs", "2"])
    assert (out / MANIFEST).read_bytes() == before
    fake_sdk.write_compiler(compiler)
    extend(read_bundle(out))
    bundle = read_bundle(out)
    assert (bundle.manifest.compiler.neff, len(_neffs(out))) == ("neff", len(bundle.graphs))
    assert damage(bundle) == []
    # a compiler that takes a graph from its cache writes no log
    for log in (*out.rglob("step_k1_bk128.txt"), *out.rglob("log-neuron-cc.txt")):
        log.unlink()
    extend(bundle)
    assert (out / "logs/step_k1_bk128.txt").read_text(encoding="utf-8") == "neuronx-cc left no log-neuron-cc.txt\n"
