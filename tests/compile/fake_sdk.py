"""The SDK's packages as far as we call them, with the signatures that its sources have.

The program neuronx-cc takes the documented options only. ModelBuilder (NxD 0.18, trace/model_builder.py) runs every
module on its example inputs and compares the alias map with the outputs.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

COMPILER = """#!{python}
import argparse, base64, json, pathlib, re, sys, time
p = argparse.ArgumentParser(allow_abbrev=False)
p.add_argument("command", choices=["compile"])
p.add_argument("hlo")
p.add_argument("--framework", choices=["XLA"], required=True)
p.add_argument("--target", choices=["trn1", "trn2"], required=True)
p.add_argument("--output", required=True)
for name, choices in {{"--lnc": "1 2", "-O": "1 2 3", "--auto-cast": "none matmult all", "--logfile": "",
                       "--model-type": "generic transformer", "--native-int64": "enabled disabled",
                       "--implicit-integer-downcast": "none all", "--verbose": ""}}.items():
    p.add_argument(name, choices=choices.split() or None)
o = p.parse_args()
begin = time.time()
pathlib.Path(o.logfile).write_text(" ".join(sys.argv[1:]))
hlo = pathlib.Path(o.hlo).read_bytes()
if {fails!r} in o.hlo:
    sys.exit("[F137] the graph is too large")
for call in re.findall(rb"eyJ[A-Za-z0-9+/]{{99,}}=*", hlo):
    binary = json.loads(base64.b64decode(call))["klir_binary"]["binary"]
    if not pathlib.Path(binary).is_file():
        sys.exit(f"[NCC_EVRF059] Kernel file {{binary!r}} does not exist on the host")
time.sleep({seconds})
pathlib.Path(o.output).write_bytes(b"NEFF" + hlo[:64])
with open({calls!r}, "a") as file:
    print(begin, time.time(), pathlib.Path(o.hlo).name.partition(".")[0], file=file)
"""


def write_compiler(folder: Path, fails: str = "\0", seconds: float = 0) -> None:
    """The program neuronx-cc; it refuses a graph whose path contains `fails`, and lists its calls in calls.txt."""
    folder.mkdir(exist_ok=True)
    program, calls = folder / "neuronx-cc", str(folder / "calls.txt")
    text = COMPILER.format(python=sys.executable, fails=fails, seconds=seconds, calls=calls)
    program.write_text(text, encoding="utf-8")
    program.chmod(0o755)


def write_neuron_ls(folder: Path, devices: str) -> None:
    """The program neuron-ls, which prints a list of devices as JSON."""
    (folder / "neuron-ls").write_text(f"#!/bin/sh\necho '{devices}'\n", encoding="utf-8")
    (folder / "neuron-ls").chmod(0o755)


def calls(folder: Path) -> list[tuple[float, float, str]]:
    """Begin, end and graph of each call of the program that ended well, in the order of their beginnings."""
    lines = (folder / "calls.txt").read_text(encoding="utf-8").splitlines()
    return sorted((float(begin), float(end), graph) for begin, end, graph in map(str.split, lines))


def peak(folder: Path) -> int:
    """The most calls that ran at once."""
    return max(sum(begin <= start < end for begin, end, _ in calls(folder)) for start, *_ in calls(folder))


class BaseModelInstance:
    def __init__(self, module_cls: Callable[..., Any], input_output_aliases: Any) -> None:
        self.module_cls, self.aliases, self.module = module_cls, input_output_aliases, None

    def load_module(self) -> None:
        self.module = self.module_cls()

    def get(self, bucket_rank: int) -> tuple[Any, Any]:
        return self.module, self.aliases


class ModelBuilder:
    built: ClassVar[list[ModelBuilder]] = []

    def __init__(
        self, router: Any, tp_degree: int, checkpoint_loader: Callable[[], Any], start_rank_id: int = 0,
        local_ranks_size: int | None = None, world_size: int | None = None, compiler_workdir: str | None = None,
        logical_nc_config: int = 1,
    ) -> None:  # fmt: skip
        self.tp, self.lnc, self.work = tp_degree, logical_nc_config, Path(str(compiler_workdir))
        self.added: dict[str, dict[str, Any]] = {}
        self.built.append(self)

    def add(
        self, key: str, model_instance: Any, example_inputs: list[tuple[torch.Tensor, ...]],
        compiler_args: str | None, bucket_config: Any = None, priority_model_idx: int | None = None,
    ) -> None:  # fmt: skip
        assert isinstance(model_instance, BaseModelInstance)
        self.added[key] = {"instance": model_instance, "inputs": example_inputs, "flags": compiler_args,
                           "priority": priority_model_idx}  # fmt: skip

    def trace(self, initialize_model_weights: bool = True) -> torch.jit.ScriptModule:
        assert not initialize_model_weights
        shutil.rmtree(self.work, ignore_errors=True)
        shapes: dict[str, str] = {}
        for key, entry in self.added.items():
            entry["instance"].load_module()
            for index, inputs in enumerate(entry["inputs"]):
                actual, aliases = entry["instance"].get(index)
                outputs, parameters = actual(*inputs), {id(p) for p in actual.parameters()}
                assert all(id(p) in parameters for p in aliases)
                # NxDI's host takes one output of a target, four of a pair; every later one is state
                visible = 4 if any(n.startswith("draft") for n, _ in actual.named_parameters()) else 1
                assert sorted(aliases.values()) == list(range(visible, len(outputs)))
                assert all((outputs[i].shape, outputs[i].dtype) == (p.shape, p.dtype) for p, i in aliases.items())
                shape = str([list(t.shape) for t in inputs])
                assert shapes.setdefault(shape, key) == key, "two tags have one list of input shapes"
        return torch.jit.script(torch.nn.Identity())


def all_reduce(kind: str, inputs: torch.Tensor, groups: list[list[int]], pin_layout: bool) -> torch.Tensor:
    """torch_xla's, of one rank."""
    assert (kind, groups, pin_layout) == ("sum", [list(range(ModelBuilder.built[-1].tp))], False)
    return inputs


def install(patch: pytest.MonkeyPatch) -> None:
    """Put NxD and torch_xla into sys.modules."""
    xla = SimpleNamespace(REDUCE_SUM="sum", all_reduce=all_reduce)
    patch.setitem(sys.modules, "torch_xla.core.xla_model", xla)
    nxd = SimpleNamespace(ModelBuilder=ModelBuilder, BaseModelInstance=BaseModelInstance)
    patch.setitem(sys.modules, "neuronx_distributed.trace.model_builder", nxd)
