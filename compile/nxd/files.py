"""model.pt and neuron_config.json of a bundle: our step, traced and compiled by NxD's ModelBuilder.

No other file imports NxD or torch_xla. The native PyTorch route and empty packages of the public index have packages of
the same names: those that are meant have the attributes that are called.
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
from compile.neuron import sdk
from compile.neuron.flags import LNC, TARGET, flags_of
from compile.nxd.config import neuron_config
from compile.nxd.module import NxdiStep, StaticOps, example_inputs, nxdi_graphs
from compile.recipes import TRACED_BY, sources
from compile.spec import Recipe
from model.errors import UserError
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


def check_model(spec: BundleSpec) -> None:
    """Raise UserError if NxDI cannot run a bundle of this spec, or this machine cannot build its model.pt."""
    lacking = [package for package, module, name in _PACKAGES if not _has(module, name)]
    reasons = {
        "its graphs have no NKI kernels; use --kernels reference": spec.kernels != "reference",
        f"NxDI fuses a plain draft model, not {spec.drafter}": spec.drafter not in ("none", "chain"),
        f"NxDI runs one k, not {', '.join(map(str, spec.ks))}; give one as --k": len(spec.ks) > 1,
        f"blocks is {spec.blocks}, fewer than the slots have; leave it out": spec.pool < replace(spec, blocks=0).pool,
        f"this machine lacks {', '.join(lacking)}; use the environment for NxD of SDK 2.31": lacking,
    }
    for why in [why for why, holds in reasons.items() if holds]:
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
    versions = sdk.versions(sdk.COMPILER, *(package for package, *_ in _PACKAGES))
    flags, config = flags_of(recipe.compiler_flags, versions[sdk.COMPILER]), neuron_config(plan.spec)
    graphs = sorted((name, file.sha256) for name, file in records.items() if name.startswith("hlo/"))
    traced = canonical_hash([graphs, flags, versions, sources(("compile/nxd", *TRACED_BY))])
    build = functools.partial(build_model, plan, staging.folder / ".build" / "neuron", flags)
    files = StagedFile(MODEL, traced, build), StagedFile(CONFIG, canonical_hash(config), lambda p: _write(p, config))
    found = {file: staging.finished(file) for file in files}
    if not all(found.values()):
        staging.begin()
    made = {file.name: record or staging.make(file) for file, record in found.items()}
    return made, Compiler("full", "model.pt", TARGET, LNC, flags, versions)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def build_model(plan: BundlePlan, work: Path, flags: Mapping[str, str], out: Path) -> None:
    """Trace and compile the plan's prompt and step with ModelBuilder, whose files stay in `work`; save model.pt."""
    # vendor seam
    vendor: Any = importlib.import_module("neuronx_distributed.trace.model_builder")
    os.environ["NEURON_LOGICAL_NC_CONFIG"] = str(LNC)
    spec = plan.spec
    builder = vendor.ModelBuilder(
        router=None, tp_degree=spec.tp, checkpoint_loader=dict, start_rank_id=0, local_ranks_size=spec.tp,
        world_size=spec.tp, compiler_workdir=str(work), logical_nc_config=LNC,
    )  # fmt: skip
    for tag, graphs in nxdi_graphs(plan).items():
        # its buckets differ in the inputs only: one module has the parameters of all
        module, key = NxdiStep(plan, graphs[0], xla_ops(spec.tp)), graphs[0].key
        builder.add(
            key=tag, model_instance=vendor.BaseModelInstance(lambda m=module: m, module.aliases()),
            example_inputs=[example_inputs(spec, g.key) for g in graphs], compiler_args=flags[flag_tag(key)],
            bucket_config=None, priority_model_idx=None if key.is_prefill else 0,
        )  # fmt: skip
    torch.jit.save(builder.trace(initialize_model_weights=False), str(out))


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
