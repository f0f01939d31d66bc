"""The CPU compiles the graphs of a bundle unchanged; devices; graphs that the compiler rejects."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.errors import UserError
from tests.model.family import graphs, some_graphs
from trnspec.bundle.plan import is_cache
from trnspec.runtime import jax_compat, xla
from trnspec.runtime.xla import XlaRunner


def test_what_is_compiled_is_the_proto_of_the_manifest(family: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes have the manifest's digest, and the compiled module is the output of XLA's converter."""
    runner, seen = XlaRunner(graphs(family, "none").bundle), list[str]()
    converted, modules = jax_compat._xla.mlir.hlo_to_stablehlo, list[bytes]()

    def convert(proto: bytes) -> bytes:
        seen.append(hashlib.sha256(proto).hexdigest())
        modules.append(converted(proto))
        return modules[-1]

    def compile_module(module: Any, devices: Any, options: Any) -> str:
        assert str(module) == str(jax_compat.ir.Module.parse(modules[-1]))
        assert options == xla.CPU_OPTIONS
        return "executable"

    monkeypatch.setattr(jax_compat._xla.mlir, "hlo_to_stablehlo", convert)
    monkeypatch.setattr(jax_compat, "compile_module", compile_module)
    keys = list(runner.bundle.plan.by_key)
    for key in keys:
        runner.load(key)
    assert seen == [runner.bundle.files[runner.graph(key).file].sha256 for key in keys]
    assert len(seen) > 4


def test_a_module_that_is_edited_is_seen() -> None:
    """Negative control: a barrier in place of a copy changes the module's text."""
    copy = b"""module @copies { func.func public @main(%x: tensor<4xf32>) -> tensor<4xf32> {
      %y = mhlo.copy %x : tensor<4xf32> return %y : tensor<4xf32> } }"""
    with jax_compat.make_ir_context(), jax_compat.ir.Location.unknown():
        module = jax_compat.ir.Module.parse(copy)
        before = str(module)
        xla.without_copies(module)
        assert "optimization_barrier" in str(module) != before


def test_a_graph_that_the_compiler_refuses_is_a_sentence(family: Path) -> None:
    runner = some_graphs(family)
    with pytest.raises(UserError, match=r"\.hlo\.pb cannot be compiled \(FAILED_PRECONDITION: .*\); build the bundle"):
        xla.compile_hlo(b"", runner._devices, runner.bundle.graphs[0])


def test_clear_zeroes_nan_of_a_slot_and_its_blocks(family: Path) -> None:
    runner = XlaRunner(some_graphs(family).bundle)
    for tensor in runner.bundle.plan.state:
        array = np.array(runner._state[tensor.name])
        array[...] = np.nan if is_cache(tensor.name) else 7
        runner._state[tensor.name] = runner._put([xla.unshared(array)])
    runner.clear(1, [2, 3])
    for tensor in runner.bundle.plan.state:
        array = np.asarray(runner._state[tensor.name])
        if is_cache(tensor.name):
            assert np.isfinite(array).all((1, 2, 3)).nonzero()[0].tolist() == [2, 3]
        else:
            assert (array == 7).all()


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "variable", "devices"), [(1, None, 1), (2, None, 2), (1, "2", 2)])
def test_a_process_has_a_device_for_each_rank(ranks: int, variable: str | None, devices: int) -> None:
    count = "import jax; from trnspec.runtime import xla; xla.devices_of('cpu', {}); print(len(jax.devices()))"
    environment = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
    environment |= {"JAX_NUM_CPU_DEVICES": variable} if variable else {}
    command = [sys.executable, "-c", count.format(ranks)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) == devices


def test_more_ranks_than_devices_is_a_sentence() -> None:
    with pytest.raises(UserError, match=r"has 2 cpu devices, the bundle needs 3; start a new process with JAX_NUM_CPU"):
        xla.devices_of("cpu", 3)
    with pytest.raises(UserError, match="JAX has no platform 'neuron' on this machine"):
        xla.devices_of("neuron", 1)
