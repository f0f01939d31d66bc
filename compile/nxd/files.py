"""model.pt and neuron_config.json of a bundle: our step, traced and compiled by NxD's ModelBuilder.

No other file imports NxD or torch_xla. They are looked for by the attributes that are called: torch-neuronx of the
native PyTorch route, and empty packages of the public index, have the same names.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from compile.bundle.staging import StagedFile, Staging
from compile.neuron.files import make
from compile.neuron.flags import LNC, TARGET, flags_of
from compile.neuron.sdk import COMPILER, compiler_program, versions
from compile.nxd.config import neuron_config
from compile.nxd.module import NxdiStep, StaticOps, example_inputs, nxdi_graphs
from compile.recipes import TRACED_BY, sources
from compile.spec import Recipe
from model.errors import UserError
from model.graph_spec import GraphSpec
from trnspec.bundle.compiler_flags import flag_tag
from trnspec.bundle.manifest import Compiler, File, canonical_hash
from trnspec.bundle.plan import BundlePlan
from trnspec.bundle.spec import BundleSpec

MODEL, CONFIG = "model.pt", "neuron_config.json"
# package, module, and the attribute of it that is called
_PACKAGES = (
    ("torch-neuronx", "torch_neuronx.xla_impl.trace", "generate_hlo"),
    ("libneuronxla", "libneuronxla", "neuron_xla_compile"),
    ("neuronx-distributed", "neuronx_distributed.trace.model_builder", "ModelBuilder"),
)


def check(spec: BundleSpec) -> None:
    """Raise UserError if NxDI cannot run a bundle of this spec, or this machine cannot build its model.pt."""
    lacking = [package for package, module, name in _PACKAGES if not _has(module, name)]
    if not compiler_program():
        lacking.insert(0, COMPILER)
    if spec.kernels != "reference":
        why = "its graphs have no NKI kernels; use --kernels reference"
    elif spec.k and spec.drafter != "chain":
        why = f"NxDI fuses a plain draft model, not {spec.drafter}; use --drafter chain, or --k 0"
    elif len(spec.ks) > 1:
        why = f"NxDI runs one k, not {', '.join(map(str, spec.ks))}; give one as --k"
    elif spec.pool < replace(spec, blocks=0).pool:
        why = f"each slot has blocks of its own and blocks is {spec.blocks}; leave blocks out"
    elif lacking:
        why = f"this machine lacks {', '.join(lacking)}; use the environment for NxD of SDK 2.31"
    else:
        return
    raise UserError(f"this bundle gets no {MODEL}: {why}")


def _has(module: str, name: str) -> bool:
    try:
        return hasattr(importlib.import_module(module), name)
    except ImportError:
        return False


def add_model(
    plan: BundlePlan, staging: Staging, records: Mapping[str, File], recipe: Recipe
) -> tuple[dict[str, File], Compiler]:
    """The records of model.pt and neuron_config.json of a staged bundle, and the manifest's entry."""
    found = versions(COMPILER, *(package for package, *_ in _PACKAGES))
    flags, config = flags_of(recipe.compiler_flags, found[COMPILER]), neuron_config(plan.spec)
    graphs = sorted((name, file.sha256) for name, file in records.items() if name.startswith("hlo/"))
    traced = canonical_hash([graphs, flags, found, sources(("compile/nxd", *TRACED_BY))])
    work = staging.folder / ".build" / "neuron"
    files = [
        StagedFile(MODEL, traced, functools.partial(build_model, plan, work, flags)),
        StagedFile(CONFIG, canonical_hash(config), functools.partial(_write, config)),
    ]
    return make(staging, files), Compiler("full", "model.pt", TARGET, LNC, flags, found)


def _write(text: str, path: Path) -> None:
    path.write_text(text, encoding="utf-8")


def build_model(plan: BundlePlan, work: Path, flags: Mapping[str, str], out: Path) -> None:
    """Trace and compile the plan's prompt and step with ModelBuilder, whose files stay in `work`; save model.pt."""
    # vendor seam
    vendor: Any = importlib.import_module("neuronx_distributed.trace.model_builder")
    os.environ["NEURON_LOGICAL_NC_CONFIG"] = str(LNC)
    tp = plan.spec.tp
    builder = vendor.ModelBuilder(
        router=None, tp_degree=tp, checkpoint_loader=dict, start_rank_id=0, local_ranks_size=tp, world_size=tp,
        compiler_workdir=str(work), logical_nc_config=LNC,
    )  # fmt: skip
    for tag, graphs in nxdi_graphs(plan).items():
        key = graphs[0].key
        builder.add(
            key=tag, model_instance=_instance(plan, graphs[0], vendor.BaseModelInstance),
            example_inputs=[example_inputs(plan.spec, g.key) for g in graphs], compiler_args=flags[flag_tag(key)],
            bucket_config=None, priority_model_idx=None if key.is_prefill else 0,
        )  # fmt: skip
    torch.jit.save(builder.trace(initialize_model_weights=False), str(out))


def _instance(plan: BundlePlan, graph: GraphSpec, base: Any) -> Any:
    class Instance(base):  # type: ignore[misc]
        """One tag's module. Its buckets differ in the inputs only, so all get the same parameters."""

        def __init__(self) -> None:
            super().__init__(module_cls=NxdiStep, input_output_aliases={})

        def load_module(self) -> None:
            self.module = NxdiStep(plan, graph, xla_ops(plan.spec.tp))

        def get(self, bucket_rank: int, **kwargs: Any) -> tuple[Any, Any]:
            return self.module, self.module.aliases()

    return Instance()


def xla_ops(tp: int) -> StaticOps:
    """The operations of a module that torch_xla traces for `tp` ranks."""
    # vendor seam
    xla: Any = importlib.import_module("torch_xla.core.xla_model")
    runtime: Any = importlib.import_module("torch_xla.runtime")

    def groups() -> list[list[int]]:
        if runtime.world_size() != tp:
            raise UserError(
                f"torch_xla sees {runtime.world_size()} ranks while a graph of {tp} is traced, and drops every "
                "all-reduce; trace with an NxD whose builder mocks the ranks (0.15 to 0.18)"
            )
        return [list(range(tp))]

    return StaticOps(
        lambda x: xla.all_reduce(xla.REDUCE_SUM, x, groups=groups(), pin_layout=False),
        lambda x: xla.all_gather(x, dim=x.dim() - 1, groups=groups(), pin_layout=False),
        tp,
    )
