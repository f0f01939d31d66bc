"""NEFFs: what neuronx-cc is called with, what a bundle then has, what is made again, and the commands to serve it."""

from __future__ import annotations

import re
import shutil
from functools import partial
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
from compile.serve_command import main as serve_command
from compile.serve_command import serve_command as command_of
from compile.spec import read_recipe
from tests.compile import fake_sdk
from tests.compile.tiny import flip, forge, refused, spec, write_model
from tests.model.family import untraced
from trnspec.bundle.manifest import MANIFEST, Compiler
from trnspec.bundle.opening import corrupt_files, read_bundle

SMALL: dict[str, Any] = {"k": 1, "batch": 1, "chunks": (128,)}


def _files(path: Path, ending: str = "neff") -> dict[str, int]:
    return {p.name: p.stat().st_mtime_ns for p in path.rglob(f"*.{ending}")}


def _changed(path: Path, before: dict[str, int]) -> set[str]:
    return {name for name, time in _files(path).items() if before.get(name) != time}


def test_without_neuronx_cc_a_bundle_has_no_files(base: Path) -> None:
    assert sdk.missing(False) == "this machine has no neuronx-cc; install it from AWS's package index"
    assert read_bundle(untraced(spec(base, "no-neffs", **SMALL))).manifest.compiler == Compiler()
    message = "this bundle gets no NEFFs: this machine has no neuronx-cc"
    refused(lambda: build(spec(base, "new", toolchain="neuron")), message)
    assert not (base / "new").exists()


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
    message = "compiler_flags has 'fused'; give a line of flags for one of prefill, step"
    refused(lambda: flags_of({"fused": "-O3"}), message)
    for flag in ("--lnc=1", "--lnc 1", "--logical-nc-config 1", "-lnc 1"):
        message = f"for 1 cores and its kernels have {LNC}, which neuronx-cc refuses"
        refused(partial(flags_of, {"prefill": f"-O3 {flag}"}), message, "EVRF066")


def test_no_other_file_imports_the_sdk() -> None:
    vendor = re.compile(r"import.*\b(torch_neuronx|torch_xla|libneuronxla|neuronxcc|neuronx_distributed\w*)\b")
    packages = ("model", "trnspec", "compile", "serve", "bench", "deploy", "nki_kernels")
    sources = [f for package in packages for f in (ROOT / package).rglob("*.py")]
    actual = {f.relative_to(ROOT).as_posix() for f in sources if vendor.search(f.read_text(encoding="utf-8"))}
    assert actual == {"compile/nxd/files.py"}


def _lines(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> list[str]:
    serve_command([*map(str, arguments)])
    return capsys.readouterr().out.splitlines()


def test_every_graph_gets_a_neff_also_where_nxd_is(
    base: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_sdk.install(monkeypatch)
    out = untraced(spec(base, "neffs", **SMALL))
    bundle = read_bundle(out)
    compiled = bundle.manifest.compiler
    assert (compiled.toolchain, compiled.neff, compiled.flags) == ("compiler", "neff", DEFAULT_FLAGS)
    assert not {"model.pt", "neuron_config.json"} & bundle.files.keys()
    for graph in bundle.graphs:
        assert (out / f"neff/{graph.key.name}.neff").read_bytes()[:4] == b"NEFF"
        log = (out / f"logs/{graph.key.name}.txt").read_text(encoding="utf-8")
        assert "--target=trn2 --model-type transformer --auto-cast none -O2 --lnc 2" in log
    before, after = "VLLM_PLUGINS=trnspec HF_HUB_OFFLINE=1", f"vllm serve {out} --port 8000"
    config = '--additional-config \'{"platform": "%s"}\''
    trn, cpu = f"{before} NEURON_LOGICAL_NC_CONFIG=2 {after} {config}", f"{before} {after} {config}" % "cpu"
    assert _lines(capsys, out) == [trn % "neuron", trn % "pjrt", cpu]
    assert _lines(capsys, out, "--platform", "cpu") == [cpu]
    # of a folder of another machine
    assert command_of("/bundle/x", "neuron", 80)[2:6] == ["/bundle/x", "--port", "80", "--additional-config"]


def test_platforms_that_cannot_serve(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, nki = (untraced(spec(base, kernels, kernels=kernels, **SMALL)) for kernels in ("reference", "nki"))
    neuron, *_ = _lines(capsys, plain)
    without = f"it has no NEFFs (neff: none); run python -m compile.neuron {plain} where neuronx-cc is"
    assert neuron == f"# neuron: no, {without}"
    neuron, pjrt, cpu = _lines(capsys, nki)
    assert neuron.startswith("# neuron: no, its graphs call NKI kernels that were compiled for no device (kernels: non")
    assert pjrt == "# pjrt: no, PJRT runs no NKI kernels; build it with --kernels reference"
    assert f" vllm serve {nki} --port 8000 " in cpu
    bare = untraced(spec(base, "bare", target=str(write_model(tmp_path / "bare", 1, weights=False)), k=0, batch=1))
    for out, chosen, why in (
        (nki, ["--platform", "neuron"], f"{nki} cannot be served on neuron: its graphs call NKI kernels"),
        (bare, [], "cannot be served on neuron or pjrt or cpu: it has no weights; build it from"),
    ):
        refused(partial(serve_command, [str(out), *chosen]), why)


def test_a_neff_is_made_again_for_other_inputs(base: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(**changes: Any) -> Path:
        return untraced(spec(base, "again", **(SMALL | changes)))

    out, count = compiled(), len(read_bundle(base / "again").graphs)
    before = _files(out)
    assert len(before) == count
    # graphs are traced again, as after a changed comment in the model: the same bytes
    with mock.patch.object(compile.build, "trace_code", return_value={"model": "changed"}):
        assert _changed(compiled(), before) == set()
    of_steps = {name for name in before if not name.startswith("prefill")}
    assert _changed(compiled(compiler_flags={"step": "-O3"}), before) == of_steps
    before = _files(out)
    monkeypatch.setattr(sdk, "versions", lambda *packages: dict.fromkeys(packages, "2.28.7631.0"))
    assert len(_changed(compiled(compiler_flags={"step": "-O3"}), before)) == count
    compiled(toolchain="cpu")
    assert not _files(out), "what a bundle does not list is not left in its folder"
    assert corrupt_files(read_bundle(out)) == []


def test_after_a_refused_graph_the_others_are_made_and_reused(base: Path, compiler: Path) -> None:
    (compiler / "neuronx-cc").write_text("#!/bin/sh\n", encoding="utf-8")
    refused(lambda: untraced(spec(base, "no-file", **SMALL)), "neuronx-cc failed on ", " with status 0: nothing; ")
    fake_sdk.write_compiler(compiler, fails="step_k0")
    work = base / ".refused.building/bundle"
    message = "failed on step_k0_", "status 1: [F137] the graph is too large; read", "(1 other graphs were refused too)"
    refused(lambda: untraced(spec(base, "refused", **SMALL, jobs=2)), *message, f"{work}/.build/neuron/step_k0_")
    assert (work / ".build/neuron/step_k0_bk128/log-neuron-cc.txt").is_file()
    before = {ending: _files(work, ending) for ending in ("neff", "pb", "safetensors")}
    assert not (base / "refused").exists()
    fake_sdk.write_compiler(compiler)
    out = untraced(spec(base, "refused", **SMALL))
    assert len(before["neff"]) == len(read_bundle(out).graphs) - 2 == len(fake_sdk.calls(compiler)) - 2
    assert all(files.items() <= _files(out, ending).items() for ending, files in before.items())


def test_the_greedy_set_is_compiled_first_then_what_is_largest(
    base: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With `--jobs`, so many compilers run at once."""
    sizes = {"verify_k1_bk128": 9, "prefill_logprobs_k1_r128_bk128": 8, "step_k1_bk128": 7}
    greedy = {"prefill_k1_r128_bk128", "step_k1_unfiltered_bk128", "step_k0_unfiltered_bk128"}

    def sized(_: object, graphs: Any) -> Any:
        return ((g, bytes(sizes.get(g.key.name, 1))) for g in graphs)

    monkeypatch.setattr(compile.build, "lower_graphs", sized)
    out = build(spec(base, "jobs", **SMALL, jobs=1))
    compiled = [name for *_, name in fake_sdk.calls(compiler)]
    assert (set(compiled[:3]), compiled[3:6], fake_sdk.peak(compiler)) == (greedy, [*sizes], 1)
    assert len(re.findall(r"neff/\S+ compiled after \d s, about \d min to go", capsys.readouterr().err)) == 8
    assert build(spec(base, "jobs", **SMALL, graphs="greedy")) == out
    assert len(fake_sdk.calls(compiler)) == len(compiled), "a bundle of the set needs no compiler when it is there"
    (compiler / "calls.txt").unlink()
    fake_sdk.write_compiler(compiler, seconds=0.5)
    build(spec(base, "at-once", **SMALL, jobs=8))
    assert 1 < fake_sdk.peak(compiler) <= 8


def test_jobs_fit_the_processors_and_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdk.os, "sched_getaffinity", lambda _: range(192))
    for size, limit, jobs in ((1, "max", 192), (10**9, "max", 7), (10**9, "3000000000", 3), (1 << 60, "max", 1)):
        monkeypatch.setattr(sdk, "JOB_BYTES", size)
        texts = {"return_value.read_text.side_effect": ["MemAvailable: 7000000 kB", limit]}
        monkeypatch.setattr(sdk, "Path", mock.Mock(**texts))
        assert sdk.default_jobs() == jobs


def test_neffs_are_added_to_a_bundle_that_was_built_elsewhere(base: Path, compiler: Path) -> None:
    out = Path(shutil.copytree(untraced(spec(base, "built", **SMALL, toolchain="cpu")), base / "elsewhere"))
    forge(out, lambda manifest: manifest.update(commit="there"))
    before = (out / MANIFEST).read_bytes()
    fake_sdk.write_compiler(compiler, fails="step_k0_bk")
    refused(lambda: add([str(out)]), "the graph is too large")
    assert (out / MANIFEST).read_bytes() == before
    fake_sdk.write_compiler(compiler)
    with mock.patch.object(sdk, "default_jobs", side_effect=AssertionError):
        add([str(out), "--jobs", "1"])
    bundle = read_bundle(out)
    assert (bundle.manifest.compiler.neff, bundle.manifest.commit) == ("neff", "there")
    assert len(_files(out)) == len(bundle.graphs)
    assert corrupt_files(bundle) == []
    # a compiler that takes a graph from its cache writes no log
    for log in (*out.rglob("step_k1_bk128.txt"), *out.rglob("log-neuron-cc.txt")):
        log.unlink()
    extend(bundle)
    assert (out / "logs/step_k1_bk128.txt").read_text(encoding="utf-8") == "neuronx-cc left no log-neuron-cc.txt\n"
    flip(out / "weights/tp0_sharded_checkpoint.safetensors")
    refused(lambda: extend(bundle), "is corrupt: weights/tp0")
