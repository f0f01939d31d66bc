"""What a machine with an SDK adds to a bundle that was built elsewhere: model.pt without jax, executables by PJRT."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from compile.build import build
from compile.neuron.__main__ import main as add
from model.bundle.manifest import MANIFEST, manifest_digest, read_bundle
from model.bundle.opening import damage
from model.errors import UserError
from model.serving import pjrt
from model.serving.engine import Engine
from model.serving.ready import shape_of
from model.serving.request import Params, Request
from model.serving.runtime import Graphs
from tests.compile import fake_sdk
from tests.compile.tiny import spec, write_pair

# as on a machine with the SDK, whose jax is another and whose torchax is torch_xla's own
_WITHOUT_JAX = """
import sys
for name in ("jax", "jaxlib", "torchax"):
    sys.modules[name] = None
import pathlib, pytest
from compile.neuron.__main__ import main
from tests.compile import fake_sdk
with pytest.MonkeyPatch.context() as patch:
    fake_sdk.install(patch)
    main([sys.argv[1]])
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    write_pair(folder)
    return folder


def test_model_pt_is_added_without_jax_and_without_torchax(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_sdk.write_compiler(base / "bin")
    monkeypatch.setenv("PATH", str(base / "bin"), prepend=":")
    out = build(spec(base, "elsewhere", toolchain="cpu", k=2))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _WITHOUT_JAX, str(out)], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] == str(out)
    bundle = read_bundle(out)
    assert (bundle["toolchain"], bundle["neff"]) == ("full", "model.pt")
    assert "model.pt" in bundle["files"]
    assert damage(bundle) == []


def test_a_failure_leaves_the_bundle_as_it_was(base: Path) -> None:
    out = build(spec(base, "kept", toolchain="cpu", k=1))
    before = (out / MANIFEST).read_bytes()
    with pytest.raises(UserError, match="--toolchain neuron needs neuronx-cc"):
        add([str(out)])
    assert (out / MANIFEST).read_bytes() == before


def test_executables_are_loaded_by_the_plugin_that_made_them_alone(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = build(spec(base, "compiled", k=2))
    requests = [Request((5, 9, 2, 7), Params(0.9, seed=3), max_new_tokens=6)]

    def ids() -> list[list[int]]:
        bundle = read_bundle(out)
        return [r.ids for r in Engine(Graphs(bundle), shape_of(bundle)).run(requests)]

    expected = ids()
    add([str(out), "--executables", "cpu"])
    assert damage(read_bundle(out)) == []
    with monkeypatch.context() as patch:
        patch.setattr(pjrt, "compile_hlo", lambda *_: pytest.fail("a graph was compiled again"))
        assert ids() == expected
    manifest = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
    manifest["executables"]["version"] = "2.26"
    manifest["manifest_sha256"] = manifest_digest(manifest)
    (out / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(UserError, match=r"was compiled by cpu 2\.26 \(.*\) and this machine has .*; run python -m"):
        ids()


def test_a_platform_that_is_not_here_is_a_sentence() -> None:
    with pytest.raises(UserError, match="JAX has no platform 'neuron' on this machine; install libneuronxla"):
        pjrt.devices_of("neuron", 1)
