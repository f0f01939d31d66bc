"""neuron_config.json, from which NxDI 0.6 to 0.9 learns a model's sizes; fields that are left out have its defaults."""

from __future__ import annotations

import json
from typing import Any

from model.config import Qwen3Config
from model.dtypes import BY_FLAG
from model.nki.launches import LNC
from trnspec.bundle.spec import BundleSpec

_QWEN3 = "neuronx_distributed_inference.models.qwen3.modeling_qwen3"


def neuron_config(spec: BundleSpec) -> str:
    """The file's text."""
    value = _model(spec.target_config, spec.target, _neuron(spec, speculation=spec.k > 0))
    if isinstance(spec.draft_config, Qwen3Config):
        # without draft_model_cls: 0.9 takes null for it, 0.6 has no such argument
        value["fused_spec_config"] = {
            "draft_config": _model(spec.draft_config, spec.draft, _neuron(spec, speculation=False)),
            "draft_model_path": spec.draft,
            "worker_cls": {"__module__": _QWEN3, "__name__": "NeuronQwen3Model"},
        }
    return json.dumps(value, indent=2, sort_keys=True) + "\n"


def _model(config: Qwen3Config, name: str, neuron: dict[str, Any]) -> dict[str, Any]:
    """The fields of Hugging Face's config.json that NxDI's Qwen3 and its host read."""
    sizes = (
        "head_dim", "hidden_size", "intermediate_size", "max_position_embeddings", "num_attention_heads",
        "num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "rope_theta", "tie_word_embeddings", "vocab_size",
    )  # fmt: skip
    return {field: getattr(config, field) for field in sizes} | {
        "_name_or_path": name,
        "bos_token_id": config.bos_token_id,
        "do_sample": False,
        "eos_token_id": config.eos_token_ids[0] if config.eos_token_ids else None,
        "hidden_act": "silu",
        "model_type": "qwen3",
        "neuron_config": neuron,
        "output_attentions": False,
        "output_hidden_states": False,
        "pad_token_id": None,
        "rope_scaling": config.rope_scaling and config.rope_scaling.as_hf(),
        "transformers_version": "4.51.0",
    }


def _neuron(spec: BundleSpec, speculation: bool) -> dict[str, Any]:
    return {
        "batch_size": spec.batch,
        "ctx_batch_size": 1,
        "enable_bucketing": True,
        "enable_fused_speculation": speculation,
        "is_continuous_batching": True,
        "logical_nc_config": LNC,
        "on_device_sampling_config": {"dynamic": True, "global_topk": 256},
        "save_sharded_checkpoint": True,
        "seq_len": spec.max_len,
        # NxDI counts the verified rows
        "speculation_length": spec.rows if speculation else 0,
        "torch_dtype": BY_FLAG[spec.dtype].name,
        "tp_degree": spec.tp,
    }
