"""The Neuron SDK's one seam: its installed parts, neuronx-cc on an HLO proto, ModelBuilder on our step.

No other file imports the SDK. Feature detection looks for the attributes that we call, not for names: the
public package index holds empty packages of the same names.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import importlib.metadata
import os
import pkgutil
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from compile.neuron.flags import LNC, TARGET, nxdi_tag
from compile.neuron.module import Collective, StaticOps, StepModule, example_inputs
from model.errors import UserError
from model.graph_spec import GraphSpec
from model.nki.context import make_context
from model.nki.on_device import launch_on_device
from trnspec.bundle.compiler_flags import DECODE, FUSED, PREFILL
from trnspec.bundle.plan import BundlePlan, whole_prompts

COMPILER, NKI = "neuronx-cc", "nki"
# NxDI routes by the list of input shapes, where a step of the target alone would equal the fused one
NXDI_TAGS = (PREFILL, FUSED)
NXDI_TAGS_ALONE = (PREFILL, DECODE)


class Level(enum.IntEnum):
    """How much of the SDK is here."""

    NONE = 0
    COMPILER = 1
    FULL = 2


@dataclass(frozen=True)
class Probe:
    """A package of AWS's index, and the module and attribute of it that our code calls."""

    package: str
    module: str
    attribute: str


PROBES = (
    Probe("torch-neuronx", "torch_neuronx.xla_impl.trace", "generate_hlo"),
    Probe("libneuronxla", "libneuronxla", "neuron_xla_compile"),
    Probe("neuronx-distributed", "neuronx_distributed.trace.model_builder", "ModelBuilder"),
    # kernels in the graphs alone need it; SDK 2.26.1, the last whose engine loads a pair, has no such package
    Probe(NKI, "nki.isa", "nc_matmul"),
)


_SENTENCES = {
    "look-alike": "{package} {version} is an empty look-alike from the public index: uninstall it and install it from "
    "AWS's package index",
    "other": "{package} {version} lacks what model.pt is made with, as the native PyTorch of SDK 2.32 and later does: "
    "use the SDK's environment for NxD, or the NEFFs, which need neuronx-cc alone",
}


@dataclass(frozen=True)
class Found:
    """The level, a sentence for each package that is not the wanted one, versions, and packages that are absent."""

    level: Level
    look_alikes: tuple[str, ...]
    versions: dict[str, str]
    absent: tuple[str, ...] = ()

    @property
    def why_no_model(self) -> str:
        """Why model.pt cannot be built with this; empty if it can."""
        absent = f"{', '.join(self.absent)} not installed" if self.absent else ""
        return "; ".join(filter(None, (*self.look_alikes, absent)))


def find(kernels: str = "reference") -> Found:
    """Look on this machine for the SDK as a build with these kernels needs it."""
    needed = [p for p in PROBES if p.package != NKI or kernels != "reference"]
    states = {p.package: _state(p) for p in needed} | {COMPILER: _compiler_state()}
    odd = tuple(_SENTENCES[s].format(package=p, version=_version(p)) for p, s in states.items() if s in _SENTENCES)
    absent = tuple(name for name, state in states.items() if state == "absent")
    here = {name for name, state in states.items() if state == "present"}
    level = Level.NONE if COMPILER not in here else Level.FULL if here == states.keys() else Level.COMPILER
    return Found(level, odd, {name: _version(name) for name in sorted(here)}, absent)


def _state(probe: Probe) -> str:
    top = probe.module.partition(".")[0]
    try:
        package = importlib.import_module(top)
    except ImportError:
        return "absent"
    if getattr(package, "__nkisim__", False):
        return "absent"
    with contextlib.suppress(ImportError):
        if hasattr(importlib.import_module(probe.module), probe.attribute):
            return "present"
    # a look-alike is an empty package; torch-neuronx of the native route has modules, and none for torch_xla
    return "other" if any(pkgutil.iter_modules(getattr(package, "__path__", ()))) else "look-alike"


def _compiler_state() -> str:
    if compiler_program():
        return "present"
    try:
        importlib.import_module("neuronxcc")
    except ImportError:
        return "absent"
    return "look-alike"


def compiler_program() -> str | None:
    """The compiler's program, from beside this Python or from the search path."""
    beside = Path(sys.executable).with_name(COMPILER)
    return str(beside) if beside.is_file() else shutil.which(COMPILER)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(unknown version)"


def require(level: Level, what: str, kernels: str = "reference") -> Found:
    """The SDK of this machine, if it suffices; otherwise UserError names the missing part."""
    found = find(kernels)
    if found.level < level:
        wanted = COMPILER if level is Level.COMPILER else "the Neuron SDK"
        partly = found.why_no_model if found.level is Level.COMPILER else "; ".join(found.look_alikes)
        why = partly or "install it from AWS's package index, on a machine with Trainium2"
        raise UserError(f"{what} needs {wanted}, which is not on this machine; {why}")
    return found


def compile_command(hlo: Path, neff: Path, log: Path, flags: str) -> list[str]:
    """The command that turns an HLO proto into a NEFF, as the vendor's frameworks write it."""
    return [
        compiler_program() or COMPILER, "compile", "--framework=XLA", str(hlo), "--output", str(neff),
        f"--target={TARGET}", *shlex.split(flags), f"--logfile={log}", "--verbose=35",
    ]  # fmt: skip


def compile_hlo(hlo: Path, neff: Path, log: Path, flags: str, folder: Path | None = None) -> None:
    """Compile an HLO proto with neuronx-cc, run in a folder, by default the log's, where it leaves files.

    UserError gives the end of its output when it refuses.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        compile_command(hlo.absolute(), neff.absolute(), log.absolute(), flags),
        cwd=folder or log.parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode or not neff.is_file():
        said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
        raise UserError(
            f"neuronx-cc ended with {done.returncode} on {hlo.name} and said: {said}; read {log}, "
            "change compiler_flags, and run the command again"
        )


def nxdi_tags(plan: BundlePlan) -> tuple[str, ...]:
    """The tags of model.pt."""
    return NXDI_TAGS if plan.spec.k else NXDI_TAGS_ALONE


def nxdi_graphs(plan: BundlePlan, tag: str) -> list[GraphSpec]:
    """The graphs of a tag in model.pt, a bucket each."""
    if tag == PREFILL:
        return list(whole_prompts(plan))
    return [g for g in plan.graphs if nxdi_tag(g.key, plan.spec) == tag]


def build_model(plan: BundlePlan, out: Path, work: Path, flags: dict[str, str]) -> None:
    """Trace and compile the plan's graphs of a prompt and of a step with ModelBuilder; save them as NxDI's model.pt.

    The compiler's files stay in `work`, `{tag}/_tp0_bk{bucket index}` each; the builder empties it first.
    """
    # vendor seam
    vendor: Any = importlib.import_module("neuronx_distributed.trace.model_builder")
    tp = plan.spec.tp
    # kernels are traced for as many cores as the graph is compiled for
    os.environ["NEURON_LOGICAL_NC_CONFIG"] = str(LNC)
    builder = vendor.ModelBuilder(
        router=None, tp_degree=tp, checkpoint_loader=dict, start_rank_id=0, local_ranks_size=tp, world_size=tp,
        compiler_workdir=str(work), logical_nc_config=LNC,
    )  # fmt: skip
    for tag in nxdi_tags(plan):
        graphs = nxdi_graphs(plan, tag)
        builder.add(
            key=tag, model_instance=_instance(plan, graphs[0], vendor.BaseModelInstance),
            example_inputs=[example_inputs(g) for g in graphs], compiler_args=flags[tag], bucket_config=None,
            priority_model_idx=None if tag == PREFILL else 0,
        )  # fmt: skip
    torch.jit.save(builder.trace(initialize_model_weights=False), str(out))


def device_ops(tp: int) -> StaticOps:
    """The operations of a module that torch_xla traces, whose replica groups a graph holds as they are."""
    # vendor seam
    xla: Any = importlib.import_module("torch_xla.core.xla_model")
    runtime: Any = importlib.import_module("torch_xla.runtime")

    def within(ranks: int) -> tuple[Collective, Collective]:
        if runtime.world_size() != tp:
            raise UserError(
                f"torch_xla sees {runtime.world_size()} ranks while a graph of {tp} is traced, and of one rank it "
                "drops every all-reduce; trace with an NxD whose builder mocks the ranks (0.15 to 0.18)"
            )
        groups = [list(range(first, first + ranks)) for first in range(0, tp, ranks)]
        return (
            lambda x: xla.all_reduce(xla.REDUCE_SUM, x, groups=groups, pin_layout=False),
            lambda x: xla.all_gather(x, dim=x.dim() - 1, groups=groups, pin_layout=False),
        )

    return StaticOps(within, tp)


def _instance(plan: BundlePlan, graph: GraphSpec, base: Any) -> Any:
    class Instance(base):  # type: ignore[misc]
        """One tag's module. Its buckets differ in the inputs alone, so all get the same parameters."""

        def __init__(self) -> None:
            super().__init__(module_cls=StepModule, input_output_aliases={})

        def load_module(self) -> None:
            backing = backing_of(plan.spec.kernels, launch_on_device)
            self.module = StepModule(plan, graph, device_ops(plan.spec.tp), backing)

        def get(self, bucket_rank: int, **kwargs: Any) -> tuple[Any, Any]:
            return self.module, self.module.aliases()

    return Instance()


def run_model(path: Path, shards: list[dict[str, torch.Tensor]]) -> Callable[..., Any]:
    """Load a model.pt of ours with the weights of every rank; the result runs on the device."""
    # vendor seam: a model.pt needs the classes that torch_neuronx registers
    importlib.import_module("torch_neuronx")
    model = torch.jit.load(str(path))
    model.nxd_model.initialize(shards, torch.tensor([0], dtype=torch.int32))
    return model  # type: ignore[no-any-return]


def nxdi_tokens(path: Path, prompt: Sequence[int]) -> list[int]:
    """The token after a prompt and those of one step, as NxDI's own application loads and runs the bundle."""
    # vendor seam
    vendor: Any = importlib.import_module("neuronx_distributed_inference.models.qwen3.modeling_qwen3")
    application = vendor.NeuronQwen3ForCausalLM(str(path))
    application.load(str(path))

    def run(ids: Sequence[int], positions: Sequence[int]) -> list[int]:
        # by name: the order of arguments is not that of every version
        out = application(
            input_ids=torch.tensor([list(ids)]), position_ids=torch.tensor([list(positions)]),
            seq_ids=torch.tensor([0]), sampling_params=torch.tensor([[1.0, 1.0, 1.0]]),
        )  # fmt: skip
        accepted: list[int] = torch.as_tensor(out.hidden_states[0])[0].tolist()
        return [token for token in accepted if token != -1]

    (first,) = run(prompt, range(len(prompt)))
    return [first, *run([first], [len(prompt)])]
