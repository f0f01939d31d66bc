"""Runs lowered graphs on the CPU behind a host like NxDI's, and compares their tokens with the eager module's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
from torch import Tensor

from compile.device_check.judge import Drawing
from compile.device_check.requests import Asked, nxdi_route, shard_of
from compile.neuron.eager import EagerRanks
from compile.neuron.module import REQUEST_COUNTS
from compile.neuron.sdk import nxdi_graphs, nxdi_tags
from compile.neuron.xla_check.cases import CASES
from compile.neuron.xla_check.lower import INPUTS
from model.dtypes import BY_NAME
from model.errors import UserError
from model.graph_spec import GraphSpec, TensorSpec
from trnspec.bundle import hlo
from trnspec.bundle.plan import BundlePlan
from trnspec.runtime.pjrt import compile_hlo, devices_of

# source: enum PrimitiveType of xla/xla_data.proto (openxla/xla)
_NUMPY = {1: np.bool_, 4: np.int32, 5: np.int64, 11: np.float32, 12: np.float64}
# one for each way of drawing, and one in a slot that was used
_ASKED = (
    Asked("greedy", tuple(range(40, 60)), 12),
    Asked("top-k", tuple(range(90, 102)), 12, Drawing(20, temperature=0.8)),
    Asked("top-p", tuple(range(65, 90)), 12, Drawing(top_p=0.9, temperature=1.0)),
    Asked("temperature", tuple(range(97, 122)), 12, Drawing(temperature=1.3)),
    Asked("greedy again", tuple(range(40, 60)), 12),
)


def compared(plan: BundlePlan, folder: Path, case: str, lowered: dict[str, Any]) -> int:
    """The number of compared tokens; UserError names the first request that differs."""
    # torch's indices have 64 bits
    jax.config.update("jax_enable_x64", True)
    shards = [shard_of(plan, CASES[case].checkpoints, rank) for rank in range(plan.spec.tp)]
    eager = EagerRanks(plan, nxdi_tags(plan), shards)
    graphs = Lowered(plan, folder, case, lowered, shards)
    expected = nxdi_route(plan, lambda tag, inputs: [t.numpy() for t in eager(tag, inputs)])(_ASKED)
    found = nxdi_route(plan, graphs)(_ASKED)
    for request, one, other in zip(_ASKED, found, expected, strict=True):
        if one.ids != other.ids:
            raise UserError(f"{case}: {request.name} gives {one.ids} as torch_xla lowered it, {other.ids} eagerly")
    return sum(len(answer.ids) for answer in found)


class Lowered:
    """The protos of a case, compiled by XLA for as many virtual CPU devices as there are ranks."""

    def __init__(
        self, plan: BundlePlan, folder: Path, case: str, lowered: dict[str, Any], shards: list[dict[str, Tensor]]
    ) -> None:
        self.devices = devices_of("cpu", plan.spec.tp)
        self.lowered, self.executables, self.kinds = lowered, {}, {}
        counts = TensorSpec(REQUEST_COUNTS, (plan.spec.batch,), "int32")
        self.graphs: dict[str, GraphSpec] = {}
        for tag in nxdi_tags(plan):
            proto = (folder / f"{case}-{tag}.hlo.pb").read_bytes()
            self.executables[tag] = compile_hlo(proto, self.devices)
            self.kinds[tag] = _kinds(proto)
            self.graphs[tag] = nxdi_graphs(plan, tag)[0]
        state = (*self.graphs[nxdi_tags(plan)[0]].state, counts)
        zeros = {t.name: np.zeros(t.shape, BY_NAME[t.dtype].numpy) for t in state}
        self.values = [{n: t.numpy() for n, t in shard.items()} | dict(zeros) for shard in shards]

    def __call__(self, tag: str, inputs: list[Tensor]) -> list[np.ndarray]:
        """Run a graph on NxDI's seven inputs; the results before the caches."""
        of_tag = self.lowered[tag]
        given = {name: tensor.numpy() for name, tensor in zip(INPUTS, inputs, strict=True)}
        kinds = self.kinds[tag]
        constants = {int(n): np.array(value, kinds[int(n)]) for n, value in of_tag["constants"].items()}
        names = {number: name for name, number in of_tag["parameters"].items()}
        arguments = []
        for number in range(len(names) + len(constants)):
            name = names.get(number, "")
            parts = [constants.get(number, given.get(name, values.get(name))) for values in self.values]
            arguments.append(_joined(parts, self.devices))
        results = self.executables[tag].execute_sharded(arguments).disassemble_into_single_device_arrays()
        for name, output in of_tag["aliases"].items():
            for values, part in zip(self.values, results[output], strict=True):
                values[name] = np.asarray(part)
        return [np.asarray(parts[0]) for parts in results[: min(of_tag["aliases"].values())]]


def _kinds(proto: bytes) -> dict[int, Any]:
    """The dtype of each parameter by its number."""
    module = hlo.parse(proto)
    entry = next(c for c in module.computations if c.id == module.entry_computation_id)
    return {i.parameter_number: _NUMPY[i.shape.element_type] for i in entry.instructions if i.opcode == "parameter"}


def _joined(parts: list[Any], devices: list[Any]) -> Any:
    arrays = [jax.device_put(p, d) for p, d in zip(parts, devices, strict=True)]
    if len(arrays) == 1:
        return arrays[0]
    mesh = jax.sharding.Mesh(np.array(devices), ("rank",))
    split = arrays[0].ndim > 0
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*["rank"] * split))
    shape = (arrays[0].shape[0] * len(arrays), *arrays[0].shape[1:]) if split else ()
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)
