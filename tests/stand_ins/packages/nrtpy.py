"""A stand-in for AWS's `nrtpy`: jaxlib runs the HLO that its NEFFs hold, and ranks meet over gloo.

Names and signatures are those that the SDK documents for nrtpy 2.34; the checks of names, shapes, dtypes and cores are
those of `spike` (aws-neuron/nkipy), its public ancestor. It is stricter where a device may answer anything: an output
that the graph aliases to an input must be the very tensor of that input, and no other output may be an input.

NRTPY_FAULT plants a fault: `wrong` results, a `reload` that is refused after processes with collectives have loaded a
NEFF, a `hang` of rank 1, an `early` end of what is timed.
"""

from __future__ import annotations

import functools
import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model.graph_spec import TensorSpec
from model.nki.launches import CUSTOM_CALL_TARGET, from_text
from nki_kernels.probes import sum_over_ranks_kernel
from nkisim.ranks import simulate_ranks
from trnspec.bundle import hlo
from trnspec.bundle.contract import signature
from trnspec.runtime.jax_compat import compile_module, module_of
from trnspec.runtime.xla import CPU_OPTIONS

MAGIC = b"NEFF"


class NrtpyError(RuntimeError):
    """A mistake in the use of this package."""


class NrtError(RuntimeError):
    """An error of the runtime, with its code."""


class TensorMetadata(NamedTuple):
    """A tensor of a model: its shape, and its size in bytes; spike's has the dtype too."""

    shape: tuple[int, ...]
    size: int
    dtype: str = ""


class BenchmarkResult(NamedTuple):
    """A few of its fields."""

    mean_ms: float
    iterations: int


def _planted(fault: str) -> bool:
    return os.environ.get("NRTPY_FAULT") == fault


def neff(hlo: bytes, inputs: list[str], outputs: list[str]) -> bytes:
    """The stand-in for a compiled graph: its HLO, and the names of its tensors in order."""
    names = json.dumps([inputs, outputs]).encode()
    return MAGIC + len(names).to_bytes(8, "little") + names + hlo


class _Runtime:
    """The one runtime of a process: the cores that it sees, and its place among the ranks."""

    def __init__(self) -> None:
        self.cores = os.environ.get("NEURON_RT_VISIBLE_CORES", "0").split(",")
        self.rank: tuple[int, int] | None = None

    def join(self, rank: int, world: int) -> None:
        if self.rank is None and world > 1:
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
            jax.distributed.initialize(os.environ["NEURON_RT_ROOT_COMM_ID"], world, rank)
        if self.rank not in (None, (rank, world)):
            raise NrtpyError(f"this process is rank {self.rank}, not {(rank, world)}")
        self.rank = rank, world

    def check(self, core: int) -> None:
        if not 0 <= core < len(self.cores):
            raise NrtError(f"NRT_INVALID (2): core {core} of {len(self.cores)} visible ones")


@functools.cache
def _runtime() -> _Runtime:
    return _Runtime()


class NrtpyTensor:
    """A tensor in the memory of one core."""

    def __init__(self, array: Any, name: str | None, core_id: int) -> None:
        self.name, self.core_id, self.shape, self.dtype = name, core_id, array.shape, array.dtype
        # numpy's until a model runs, then jax's
        self.array = array

    @classmethod
    def from_numpy(cls, array: np.ndarray, name: str | None = None, core_id: int = 0) -> NrtpyTensor:
        _runtime().check(core_id)
        return cls(np.array(array), name, core_id)

    def write_from_numpy(self, array: np.ndarray) -> None:
        if array.nbytes != self.array.nbytes:
            raise ValueError(f"Size mismatch: source {array.nbytes} bytes, target {self.array.nbytes} bytes")
        self.array = np.array(array).view(self.dtype).reshape(self.shape)

    def numpy(self) -> np.ndarray:
        # a bfloat16 comes back void
        array = np.array(self.array)
        return array if array.dtype.kind != "V" else array.view(f"V{array.itemsize}")


class NrtpyModel:
    """A graph on one core."""

    def __init__(self, path: Path, name: str, core_id: int, world: int) -> None:
        content = path.read_bytes()
        if content[: len(MAGIC)] != MAGIC:
            raise NrtError("NRT_FAILURE (6): not a NEFF of this target")
        end = 12 + int.from_bytes(content[4:12], "little")
        inputs, outputs = json.loads(content[12:end])
        proto = hlo.parse(content[end:])
        facts, entry = signature(proto), hlo.entry(proto).instructions
        self.name, self.core_id, self._aliases = name, core_id, facts.aliases
        self.input_tensors_info = _info(inputs, facts.parameters)
        self.output_tensors_info = _info(outputs, facts.results)
        self._dtypes = {n: t.dtype for n, t in zip(inputs + outputs, facts.parameters + facts.results, strict=True)}
        devices = jax.devices("cpu")[:world] if world > 1 else jax.local_devices(backend="cpu")[:1]
        self._device = jax.local_devices(backend="cpu")[0]
        self._sharding = NamedSharding(Mesh(np.array(devices), ("rank",)), PartitionSpec("rank"))
        calls = [i for i in entry if i.custom_call_target == CUSTOM_CALL_TARGET]
        launches = [from_text(i.backend_config.decode())[0] for i in calls]
        self._launch = launches[0] if launches else None
        if not launches:
            with module_of(content[end:]) as module:
                self._executable = compile_module(module, devices, CPU_OPTIONS)

    @classmethod
    def load_from_neff(
        cls, neff_path: str | Path, name: str | None = None, core_id: int = 0, cc_enabled: bool = False,
        rank_id: int = 0, world_size: int = 1,
    ) -> NrtpyModel:  # fmt: skip
        _runtime().check(core_id)
        if _planted("hang") and rank_id == 1:
            time.sleep(600)
        _runtime().join(rank_id, world_size if cc_enabled else 1)
        # processes that start together have one address
        first, address = Path(neff_path).with_suffix(".loaded"), os.environ.get("NEURON_RT_ROOT_COMM_ID", "")
        if _planted("reload") and first.exists() and first.read_text() not in ("", address):
            raise NrtError("NRT_FAILURE (1): replica group signature mismatch")
        first.write_text(address)
        return cls(Path(neff_path), name or Path(neff_path).stem, core_id, world_size)

    def __call__(self, inputs: dict[str, NrtpyTensor], outputs: dict[str, NrtpyTensor]) -> None:
        self._check("Input", inputs, self.input_tensors_info)
        self._check("Output", outputs, self.output_tensors_info)
        named = list(self.input_tensors_info), list(self.output_tensors_info)
        written = {named[1][result]: inputs[named[0][parameter]] for result, parameter in self._aliases.items()}
        read = {id(tensor) for tensor in inputs.values()}
        for name, tensor in outputs.items():
            if written.get(name, tensor) is not tensor or (name not in written and id(tensor) in read):
                raise NrtpyError(f"Output {name}: written in place means the tensor of its input, and only that")
        if self._launch:
            results = [[self._simulated(*(inputs[name].array for name in named[0]))]]
        else:
            arguments = [self._on_device(inputs[name]) for name in named[0]]
            results = self._executable.execute_sharded(arguments).disassemble_into_single_device_arrays()
        for name, (array,) in zip(named[1], results, strict=True):
            outputs[name].array = jax.block_until_ready(array)
        if _planted("wrong"):
            first = outputs[named[1][0]]
            first.array = np.array(first.array)
            first.array[first.array > 1] -= 1

    def benchmark(
        self, inputs: dict[str, NrtpyTensor], outputs: dict[str, NrtpyTensor] | None = None, warmup_iter: int = 5,
        benchmark_iter: int = 5, mode: str = "device",
    ) -> BenchmarkResult:  # fmt: skip
        zeros = {name: np.zeros(info.shape, info.dtype) for name, info in self.output_tensors_info.items()}
        outputs = outputs or {name: NrtpyTensor.from_numpy(array, name, self.core_id) for name, array in zeros.items()}
        self(inputs, outputs)
        # a time of no device, between the roofline and nkisim's of a small kernel
        return BenchmarkResult(0.0 if _planted("early") else 0.05, benchmark_iter)

    def _simulated(self, x: np.ndarray) -> np.ndarray:
        """Launches the kernel that sums over ranks; each rank simulates all of them."""
        parts, kernel = process_allgather(x), sum_over_ranks_kernel[self._launch.lnc]
        simulated = simulate_ranks(kernel, len(parts))([(part, self._launch.arguments[1]) for part in parts])
        return np.asarray(simulated[_runtime().rank[0]])

    def _on_device(self, tensor: NrtpyTensor) -> Any:
        if isinstance(tensor.array, np.ndarray):
            tensor.array = jax.device_put(tensor.array, self._device)
        first, *others = tensor.shape
        shape = (first * self._sharding.num_devices, *others)
        return jax.make_array_from_single_device_arrays(shape, self._sharding, [tensor.array])

    def _check(self, what: str, tensors: dict[str, NrtpyTensor], wanted: dict[str, TensorMetadata]) -> None:
        if tensors.keys() != wanted.keys():
            raise ValueError(f"Unknown or missing {what.lower()}(s) {tensors.keys() ^ wanted.keys()} for '{self.name}'")
        for name, tensor in tensors.items():
            assert tensor.core_id == self.core_id, f"{what} {name}: expected model and tensor on the same core"
            assert tensor.shape == wanted[name].shape, f"{what} {name}: expected shape {wanted[name].shape}"
            assert tensor.dtype == self._dtypes[name], f"{what} {name}: expected dtype {self._dtypes[name]}"


def _info(names: list[str], tensors: tuple[TensorSpec, ...]) -> dict[str, TensorMetadata]:
    return {name: TensorMetadata(t.shape, t.bytes, t.dtype) for name, t in zip(names, tensors, strict=True)}
