"""model.pt and neuron_config.json of a bundle: our step, traced and compiled by NxD's ModelBuilder.

No other file imports NxD or torch_xla.
"""

import functools
import importlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from compile.bundle.staging import StagedFile
from compile.neuron import sdk
from compile.neuron.flags import LNC, TARGET, flags_of
from compile.nxd.module import NxdiStep, StaticOps, example_inputs, nxdi_graphs
from compile.recipes import TRACED_BY, sources
from compile.spec import Recipe
from model.config import Qwen3Config
from model.dtypes import BY_FLAG
from model.errors import UserError
from trnspec.bundle.manifest import Compiler, File, canonical_hash, flag_tag
from trnspec.bundle.plan import BundlePlan
from trnspec.bundle.spec import BundleSpec

MODEL_FILES = MODEL, CONFIG = ("model.pt", "neuron_config.json")
_BUILDER = "neuronx_distributed.trace.model_builder"
# fields of Hugging Face's config.json with one value for every Qwen3, and those of a model
_QWEN3 = {"do_sample": False, "hidden_act": "silu", "model_type": "qwen3", "output_attentions": False,
          "output_hidden_states": False, "pad_token_id": None, "transformers_version": "4.51.0"}  # fmt: skip
_SIZES = ("bos_token_id", "head_dim", "hidden_size", "intermediate_size", "max_position_embeddings",
          "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "rope_theta",
          "tie_word_embeddings", "vocab_size")  # fmt: skip


def check_model(spec: BundleSpec) -> None:
    """Raise UserError if NxDI cannot run a bundle of this spec, or this machine cannot build its model.pt."""
    reasons = {
        "its graphs have no NKI kernels; use --kernels reference": spec.kernels != "reference",
        f"NxDI fuses a plain draft model, not {spec.drafter}": spec.drafter not in ("none", "chain"),
        f"NxDI runs one k, not {', '.join(map(str, spec.ks))}; give one as --k": len(spec.ks) > 1,
        f"blocks is {spec.blocks}, fewer than the slots have; leave it out": spec.pool < replace(spec, blocks=0).pool,
        "this machine has no NxD with a ModelBuilder; use the environment for NxD of SDK 2.31": not _has_builder(),
    }
    for why in [why for why, holds in reasons.items() if holds]:
        raise UserError(f"this bundle gets no {MODEL}: {why}")


def _has_builder() -> bool:
    try:
        return hasattr(importlib.import_module(_BUILDER), "ModelBuilder")
    except ImportError:
        return False


def model_files(
    plan: BundlePlan, work: Path, records: Mapping[str, File], recipe: Recipe
) -> tuple[list[StagedFile], Compiler]:
    """model.pt and neuron_config.json of a bundle that has its graphs, and the manifest's entry."""
    versions = sdk.versions(sdk.COMPILER, "torch-neuronx", "libneuronxla", "neuronx-distributed")
    flags, config = flags_of(recipe.compiler_flags, versions[sdk.COMPILER]), neuron_config(plan.spec)
    graphs = sorted((name, file.sha256) for name, file in records.items() if name.startswith("hlo/"))
    traced = canonical_hash([graphs, flags, versions, sources(("compile/nxd", *TRACED_BY))])
    files: list[StagedFile] = [
        (MODEL, traced, functools.partial(build_model, plan, work, flags)),
        (CONFIG, canonical_hash(config), lambda path: path.write_text(config, encoding="utf-8")),
    ]
    return files, Compiler("full", "model.pt", TARGET, LNC, flags, versions)


def neuron_config(spec: BundleSpec) -> str:
    """neuron_config.json, which gives NxDI 0.6 to 0.9 a model's sizes; NxDI has defaults for all other fields."""
    value = _model(spec.target_config, spec.target, _neuron(spec, speculation=spec.k > 0))
    if isinstance(spec.draft_config, Qwen3Config):
        draft = _model(spec.draft_config, spec.draft, _neuron(spec, speculation=False))
        module = "neuronx_distributed_inference.models.qwen3.modeling_qwen3"
        worker = {"__module__": module, "__name__": "NeuronQwen3Model"}
        # without draft_model_cls: 0.9 takes null for it, 0.6 has no such argument
        value["fused_spec_config"] = {"draft_config": draft, "draft_model_path": spec.draft, "worker_cls": worker}
    return json.dumps(value, indent=2, sort_keys=True) + "\n"


def _model(config: Qwen3Config, name: str, neuron: dict[str, Any]) -> dict[str, Any]:
    end = config.eos_token_ids[0] if config.eos_token_ids else None
    scaling = config.rope_scaling and config.rope_scaling.as_hf()
    fields = {"_name_or_path": name, "eos_token_id": end, "neuron_config": neuron, "rope_scaling": scaling}
    return _QWEN3 | {field: getattr(config, field) for field in _SIZES} | fields


def _neuron(spec: BundleSpec, speculation: bool) -> dict[str, Any]:
    return {
        "batch_size": spec.batch, "ctx_batch_size": 1, "enable_bucketing": True,
        "enable_fused_speculation": speculation, "is_continuous_batching": True, "logical_nc_config": LNC,
        "on_device_sampling_config": {"dynamic": True, "global_topk": 256}, "save_sharded_checkpoint": True,
        # NxDI counts the verified rows
        "seq_len": spec.max_len, "speculation_length": spec.rows if speculation else 0,
        "torch_dtype": BY_FLAG[spec.dtype].name, "tp_degree": spec.tp,
    }  # fmt: skip


def build_model(plan: BundlePlan, work: Path, flags: Mapping[str, str], out: Path) -> None:
    """Trace and compile the plan's prompt and step with ModelBuilder, whose files stay in `work`; save model.pt."""
    # vendor seams
    vendor: Any = importlib.import_module(_BUILDER)
    xla: Any = importlib.import_module("torch_xla.core.xla_model")
    spec, ranks = plan.spec, {"groups": [list(range(plan.spec.tp))], "pin_layout": False}
    ops = StaticOps(lambda x: xla.all_reduce(xla.REDUCE_SUM, x, **ranks), spec.tp)
    builder = vendor.ModelBuilder(
        router=None, tp_degree=spec.tp, checkpoint_loader=dict, start_rank_id=0, local_ranks_size=spec.tp,
        world_size=spec.tp, compiler_workdir=str(work), logical_nc_config=LNC,
    )  # fmt: skip
    for tag, graphs in nxdi_graphs(plan).items():
        # its buckets differ in the inputs only: one module has the parameters of all
        module, key = NxdiStep(plan, graphs[0], ops), graphs[0].key
        builder.add(
            key=tag, model_instance=vendor.BaseModelInstance(lambda m=module: m, module.aliases()),
            example_inputs=[example_inputs(spec, g.key) for g in graphs], compiler_args=flags[flag_tag(key)],
            bucket_config=None, priority_model_idx=None if key.is_prefill else 0,
        )  # fmt: skip
    torch.jit.save(builder.trace(initialize_model_weights=False), str(out))
