"""neuron_config.json in the form that NxDI 0.9 writes it, so that its loader and NxDI 0.6's read our bundle.

The fields that no flag of ours changes are NxDI's own defaults, kept in nxdi_defaults.json. `draft_model_cls` is left
out: 0.9 takes it as null, 0.6 has no such argument and ends on it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from model.config import Qwen3Config
from model.dtypes import BY_FLAG
from trnspec.bundle.spec import BundleSpec

_DEFAULTS = json.loads(Path(__file__).with_name("nxdi_defaults.json").read_text(encoding="utf-8"))
_LONG_CONTEXT = 32 * 1024


def render(spec: BundleSpec) -> str:
    """The file's text: indented by two, keys sorted, Infinity as Python writes it."""
    value = _model(spec.target_config, spec.target, _neuron(spec, speculation=spec.k > 0))
    if isinstance(draft := spec.draft_config, Qwen3Config):
        # NxDI fuses a decoder alone; it has no field for the needs of other drafters
        value["fused_spec_config"] = _fused(spec, draft)
    return json.dumps(value, indent=2, sort_keys=True) + "\n"


def _fused(spec: BundleSpec, config: Qwen3Config) -> dict[str, Any]:
    draft = _neuron(spec, speculation=False) | {"tp_degree": spec.draft_ranks}
    return {
        "draft_config": _model(config, spec.draft, draft),
        "draft_model_path": spec.draft,
        "worker_cls": {
            "__module__": "neuronx_distributed_inference.models.qwen3.modeling_qwen3",
            "__name__": "NeuronQwen3Model",
        },
    }


def _model(config: Qwen3Config, name: str, neuron: dict[str, Any]) -> dict[str, Any]:
    return _DEFAULTS["hf"] | {
        "_name_or_path": name,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_ids[0] if config.eos_token_ids else None,
        "fused_spec_config": None,
        "head_dim": config.head_dim,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "max_position_embeddings": config.max_position_embeddings,
        "max_window_layers": config.num_hidden_layers,
        "neuron_config": neuron,
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_scaling": config.rope_scaling and config.rope_scaling.stated(),
        "rope_theta": int(config.rope_theta) if config.rope_theta % 1 == 0 else config.rope_theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "vocab_size": config.vocab_size,
    }


def _neuron(spec: BundleSpec, speculation: bool) -> dict[str, Any]:
    batch = dict.fromkeys(
        ("batch_size", "kv_cache_batch_size", "max_batch_size", "pa_num_blocks", "spec_batch_size", "tkg_batch_size"),
        spec.batch,
    )
    length = dict.fromkeys(
        ("max_context_length", "max_length", "n_active_tokens", "n_positions", "pa_block_size", "seq_len"),
        spec.max_len,
    )
    ranks = dict.fromkeys(("local_ranks_size", "tp_degree", "world_size"), spec.tp)
    return (
        _DEFAULTS["neuron"]
        | batch
        | length
        | ranks
        | {
            "buckets": [spec.max_len],
            "enable_fused_speculation": speculation and spec.has_draft,
            "enable_long_context_mode": spec.max_len >= _LONG_CONTEXT,
            # NxDI tiles for fused speculation alone, and the draft's config is a copy of the pair's
            "kv_cache_tiling": spec.has_draft and spec.max_len > 128 and spec.max_len % 128 == 0,
            # NxDI counts the verified rows, the target's own token included
            "speculation_length": spec.rows if speculation else 0,
            "torch_dtype": BY_FLAG[spec.dtype].name,
        }
    )
