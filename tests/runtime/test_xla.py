"""The CPU compiles the graphs of a bundle unchanged; devices; graphs that the compiler rejects."""

from __future__ import annotations

import hashlib
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
        runner.prepare(key, warm=False)
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


def test_only_read_only_inputs_stay_on_the_devices(family: Path) -> None:
    runner, neutral, ids = some_graphs(family), np.zeros(2, np.float32), np.zeros(2, np.int32)
    neutral.flags.writeable = False
    before = runner._inputs([neutral, ids])
    ids[:] = 7
    after = runner._inputs([neutral, ids])
    assert after[0] is before[0]
    assert np.asarray(after[1]).tolist() == [7, 7]


def test_more_ranks_than_devices_is_a_sentence() -> None:
    with pytest.raises(UserError, match=r"has 2 cpu devices, the bundle needs 3; start a new process with JAX_NUM_CPU"):
        xla.devices_of("cpu", 3)
    with pytest.raises(UserError, match="JAX has no platform 'neuron' on this machine"):
        xla.devices_of("neuron", 1)
