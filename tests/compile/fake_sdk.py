"""The SDK's packages as far as we call them, with the signatures that its sources have, and empty ones.

ModelBuilder (NxD 0.18, trace/model_builder.py) runs every module on its example inputs and holds the
alias map against the outputs; the compiler's program takes the documented options alone.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch

COMPILER = """#!{python}
import argparse, base64, json, pathlib, re, sys
if sys.argv[1:] == ["--version"]:
    sys.exit(print("NeuronX Compiler version 2.0-fake"))
p = argparse.ArgumentParser(allow_abbrev=False)
p.add_argument("command", choices=["compile"])
p.add_argument("hlo")
p.add_argument("--framework", choices=["XLA"], required=True)
p.add_argument("--target", choices=["trn1", "trn2"], required=True)
p.add_argument("--output", required=True)
p.add_argument("--lnc", type=int, choices=[1, 2])
p.add_argument("-O", dest="level", choices=["1", "2", "3"])
p.add_argument("--auto-cast", choices=["none", "matmult", "all"])
p.add_argument("--model-type", choices=["generic", "transformer"])
p.add_argument("--native-int64", choices=["enabled", "disabled"])
p.add_argument("--implicit-integer-downcast", choices=["none", "all"])
for name in ("--tensorizer-options", "--internal-hlo2tensorizer-options", "--logfile", "--verbose"):
    p.add_argument(name)
o = p.parse_args()
pathlib.Path(o.logfile).write_text(" ".join(sys.argv[1:]))
hlo = pathlib.Path(o.hlo).read_bytes()
if {fails!r} in o.hlo:
    sys.exit("[F137] the graph is too large")
for call in re.findall(rb"eyJ[A-Za-z0-9+/]{{99,}}=*", hlo):
    binary = json.loads(base64.b64decode(call))["klir_binary"]["binary"]
    if not pathlib.Path(binary).is_file():
        sys.exit(f"[NCC_EVRF059] Kernel file {{binary!r}} does not exist on the host")
pathlib.Path(o.output).write_bytes(b"NEFF" + hlo[:64])
"""


def write_compiler(folder: Path, fails: str = "\0") -> None:
    """The program neuronx-cc; it refuses a graph whose name contains `fails`."""
    folder.mkdir(exist_ok=True)
    program = folder / "neuronx-cc"
    program.write_text(COMPILER.format(python=sys.executable, fails=fails), encoding="utf-8")
    program.chmod(0o755)


def module(name: str, **members: Any) -> ModuleType:
    made = ModuleType(name)
    made.__dict__.update(members)
    # a package: its modules are found in sys.modules alone
    made.__path__ = []  # type: ignore[attr-defined]
    return made


class BaseModelInstance:
    def __init__(self, module_cls: Callable[..., Any], input_output_aliases: Any) -> None:
        self.module_cls, self.input_output_aliases = module_cls, input_output_aliases
        self.module: Any = None

    def load_module(self) -> None:
        self.module = self.module_cls()

    def get(self, bucket_rank: int, **kwargs: Any) -> tuple[Any, Any]:
        return self.module, self.input_output_aliases


class Traced(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class ModelBuilder:
    built: ClassVar[list[ModelBuilder]] = []

    def __init__(
        self, router: Any, tp_degree: int, checkpoint_loader: Callable[[], Any], start_rank_id: int = 0,
        pp_degree: int = 1, ep_degree: int = 1, local_ranks_size: int | None = None, world_size: int | None = None,
        compiler_workdir: str | None = None, debug: bool = False, num_cores_per_group: int = 1,
        init_custom_process_group_fn: Any = None, logical_nc_config: int = 1,
        weights_to_skip_layout_optimization: Any = (), compiler_flag_hook: Any = None,
    ) -> None:  # fmt: skip
        self.tp, self.lnc, self.work = tp_degree, logical_nc_config, Path(str(compiler_workdir))
        self.added: dict[str, dict[str, Any]] = {}
        self.shapes: dict[str, str] = {}
        # sizes of the groups of torch_xla's collectives
        self.groups: set[int] = set()
        self.built.append(self)

    def add(
        self, key: str, model_instance: Any, example_inputs: list[tuple[torch.Tensor, ...]],
        compiler_args: str | None, bucket_config: Any = None, priority_model_idx: int | None = None,
    ) -> None:  # fmt: skip
        assert isinstance(model_instance, BaseModelInstance)
        self.added[key] = {"instance": model_instance, "inputs": example_inputs, "flags": compiler_args,
                           "priority": priority_model_idx}  # fmt: skip

    def trace(
        self, initialize_model_weights: bool = True, dry_run: bool = False, disable_fail_fast: bool = False
    ) -> torch.jit.ScriptModule:
        assert not initialize_model_weights
        shutil.rmtree(self.work, ignore_errors=True)
        for key, entry in self.added.items():
            entry["instance"].load_module()
            for index, inputs in enumerate(entry["inputs"]):
                found, aliases = entry["instance"].get(index)
                self._check(found, aliases, inputs)
                shape = str([list(t.shape) for t in inputs])
                assert self.shapes.setdefault(shape, key) == key, "two tags have one list of input shapes"
                folder = self.work / key / f"_tp0_bk{index}"
                (folder / "model").mkdir(parents=True)
                (folder / "model" / "graph.hlo").write_bytes(b"HLO")
                (folder / "log-neuron-cc.txt").write_text(entry["flags"], encoding="utf-8")
        return torch.jit.script(Traced())

    def _check(self, found: torch.nn.Module, aliases: dict[Any, int], inputs: tuple[torch.Tensor, ...]) -> None:
        outputs = found(*inputs)
        parameters = {id(p) for p in found.parameters()}
        assert all(id(p) in parameters for p in aliases)
        # NxDI's host takes one output of a target alone, four of a pair; every later one is a cache
        visible = 4 if "target_model.norm.weight" in dict(found.named_parameters()) else 1
        assert sorted(aliases.values()) == list(range(visible, len(outputs)))
        assert all(outputs[i].shape == p.shape and outputs[i].dtype == p.dtype for p, i in aliases.items())


def same(x: torch.Tensor) -> torch.Tensor:
    """An all-reduce of one rank."""
    return x


def reduce_groups(
    reduce_type: str, inputs: torch.Tensor, scale: float = 1.0, groups: list[list[int]] | None = None, cctx: Any = None,
    pin_layout: bool = True,
) -> torch.Tensor:  # fmt: skip
    """torch_xla's all_reduce, of one rank."""
    _check_groups(reduce_type, groups, pin_layout)
    return inputs


def gather_groups(
    value: torch.Tensor, dim: int = 0, groups: list[list[int]] | None = None, output: Any = None,
    pin_layout: bool = True,
) -> torch.Tensor:  # fmt: skip
    """torch_xla's all_gather, where every rank has what this one has."""
    return torch.cat([value] * _check_groups("sum", groups, pin_layout), dim)


def _check_groups(reduce_type: str, groups: list[list[int]] | None, pin_layout: bool) -> int:
    assert reduce_type == "sum"
    assert not pin_layout
    assert groups is not None
    assert [r for g in groups for r in g] == list(range(ModelBuilder.built[-1].tp)), "every rank is in one group"
    assert len({len(g) for g in groups}) == 1
    ModelBuilder.built[-1].groups.add(len(groups[0]))
    return len(groups[0])


def install(patch: pytest.MonkeyPatch, look_alike: str = "") -> None:
    """Put the whole SDK into sys.modules; one package of it may be an empty look-alike."""
    members: dict[str, dict[str, Any]] = {
        "torch_neuronx": {}, "torch_neuronx.xla_impl": {}, "torch_neuronx.xla_impl.trace": {"generate_hlo": same},
        "torch_xla": {}, "torch_xla.core": {},
        "torch_xla.core.xla_model": {
            "REDUCE_SUM": "sum", "all_reduce": reduce_groups, "all_gather": gather_groups,
        },
        "torch_xla.runtime": {"world_size": lambda: ModelBuilder.built[-1].tp},
        "libneuronxla": {"neuron_xla_compile": same},
        "neuronx_distributed": {}, "neuronx_distributed.trace": {},
        "neuronx_distributed.trace.model_builder": {
            "ModelBuilder": ModelBuilder, "BaseModelInstance": BaseModelInstance,
        },
        "nki": {}, "nki.isa": {"nc_matmul": same},
    }  # fmt: skip
    for name, contents in members.items():
        if name.partition(".")[0] == look_alike:
            contents = {}
            if "." in name:
                patch.delitem(sys.modules, name, raising=False)
                continue
        patch.setitem(sys.modules, name, module(name, **contents))
