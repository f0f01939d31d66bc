"""`python -m compile.neuron.xla_check.lower CASE TAG FOLDER`: a graph of a case as torch_xla lowers it.

Runs where torch_xla is, without jax. Writes its proto, and a JSON file: the name and parameter number of every
tensor that the graph reads, and the aten operators that fell back to the CPU, which runs a graph while it is traced.
"""

from __future__ import annotations

import importlib
import json
import sys
import unittest.mock
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compile.neuron.module import StepModule, example_inputs
from compile.neuron.sdk import device_ops, nxdi_graphs
from compile.neuron.xla_check.cases import CASES
from model.backing import REFERENCE
from model.graph_spec import GraphSpec
from trnspec.bundle.plan import BundlePlan, make_plan

INPUTS = ("input_ids", "attention_mask", "position_ids", "seq_ids", "sampling_params", "hidden", "adapter_ids")


def lower(plan: BundlePlan, graph: GraphSpec, proto: Path) -> dict[str, Any]:
    """Trace one graph on tensors without values; a fallback that reads a value ends the process."""
    # vendor seam
    lowering: Any = importlib.import_module("torch_xla")._XLAC.lowering
    metrics: Any = importlib.import_module("torch_xla.debug.metrics")
    with torch.device("meta"):
        module = StepModule(plan, graph, device_ops(plan.spec.tp), REFERENCE)
    _take_placeholders(module)
    inputs = [_placeholder(t) for t in example_inputs(graph)]
    metrics.clear_all()
    # as NxD's builder traces: one process represents all ranks
    ranks = unittest.mock.patch("torch_xla.runtime.world_size", return_value=plan.spec.tp)
    with torch.no_grad(), ranks:
        outputs = module(*inputs)
    context = lowering.LoweringContext()
    context.build(list(outputs))
    proto.write_bytes(context.hlo())
    named = dict(module.named_parameters()) | dict(zip(INPUTS, inputs, strict=True))
    numbers = {name: context.tensor_parameter_id(tensor) for name, tensor in named.items()}
    # tensors that the module puts on the device, as the angles' frequencies, become parameters
    made = context.device_parameter_id_tensor_mapping()
    constants = {number: _value(t) for number, t in made.items() if number not in set(numbers.values())}
    names = {id(p): n for n, p in module.named_parameters()}
    return {
        "parameters": {name: number for name, number in numbers.items() if number >= 0},
        "aliases": {names[id(p)]: output for p, output in module.aliases().items()},
        "constants": constants,
        "fallbacks": [n for n in metrics.counter_names() if n.startswith("aten::")],
    }


def _value(constant: Tensor) -> Any:
    try:
        return constant.cpu().tolist()
    except RuntimeError:
        # the token that keeps collectives in order has no value
        return 0


def _take_placeholders(module: nn.Module) -> None:
    for part in module.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is not None:
                part._parameters[name] = nn.Parameter(_placeholder(parameter), requires_grad=False)


def _placeholder(like: Tensor) -> Tensor:
    # vendor seam
    builder: Any = importlib.import_module("torch_xla.core.xla_builder")
    tensor: Tensor = builder.create_placeholder_tensor(like.shape, like.dtype)
    return tensor


def main(case: str, tag: str, folder: Path) -> None:
    """Lower a graph of model.pt in the case's smallest bucket, in a process of its own.

    A process has one token for all collectives: through it a second graph would contain the first.
    """
    plan = make_plan(CASES[case].bundle)
    graph = nxdi_graphs(plan, tag)[0]
    lowered = lower(plan, graph, folder / f"{case}-{tag}.hlo.pb")
    (folder / f"{case}-{tag}.json").write_text(json.dumps(lowered, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
