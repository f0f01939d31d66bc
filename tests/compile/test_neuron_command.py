"""What a machine with an SDK adds to a bundle that was built elsewhere: model.pt without jax."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from compile.build import build
from compile.neuron.__main__ import main as add
from model.errors import UserError
from tests.compile.tiny import spec
from trnspec.bundle.manifest import MANIFEST
from trnspec.bundle.opening import damage, read_bundle
from trnspec.runtime import pjrt

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


def test_model_pt_is_added_without_jax_and_without_torchax(base: Path, compiler: Path) -> None:
    out = build(spec(base, "elsewhere", toolchain="cpu", k=1, batch=1))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _WITHOUT_JAX, str(out)], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] == str(out)
    bundle = read_bundle(out)
    assert (bundle.manifest.compiler.toolchain, bundle.manifest.compiler.neff) == ("full", "model.pt")
    assert "model.pt" in bundle.files
    assert damage(bundle) == []


def test_a_failure_leaves_the_bundle_as_it_was(base: Path) -> None:
    out = build(spec(base, "kept", toolchain="cpu", k=1, batch=1))
    before = (out / MANIFEST).read_bytes()
    with pytest.raises(UserError, match="toolchain neuron needs neuronx-cc"):
        add([str(out)])
    assert (out / MANIFEST).read_bytes() == before


def test_a_platform_that_is_not_here_is_a_sentence() -> None:
    with pytest.raises(UserError, match="JAX has no platform 'neuron' on this machine; install libneuronxla"):
        pjrt.devices_of("neuron", 1)
