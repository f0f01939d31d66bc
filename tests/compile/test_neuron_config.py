"""neuron_config.json against the file that NxDI itself wrote for the same options."""

import json
from pathlib import Path

from compile.neuron.config import render
from compile.spec import BuildSpec
from model.config import load_config

GOLDEN = Path(__file__).parent / "golden" / "nxdi_neuron_config.qwen3-32b+1.7b.tp32.json"
# paths of the machine that wrote the golden file
PATHS = {"_name_or_path", "draft_model_path"}


def _flat(value: object, name: str = "") -> dict[str, object]:
    if isinstance(value, dict) and value:
        return {k: v for key, item in value.items() for k, v in _flat(item, f"{name}/{key}").items()}
    return {name: value}


def _differing(ours: BuildSpec) -> set[str]:
    written, golden = _flat(json.loads(render(ours.bundle))), _flat(json.loads(GOLDEN.read_text(encoding="utf-8")))
    # 0.6 has no such argument, 0.9 takes its absence as null
    assert golden.keys() - written.keys() == {"/fused_spec_config/draft_model_cls"}
    assert written.keys() <= golden.keys()
    return {k for k in written if golden[k] != written[k] and k.rsplit("/", 1)[1] not in PATHS}


def test_equal_to_nxdi_field_by_field() -> None:
    # NxDI's speculation_length 7 is six drafts and the target's own token
    assert _differing(BuildSpec(k="6", tp=32, batch=4, max_len=1024)) == set()


def test_another_k_and_batch_are_noticed() -> None:
    assert _differing(BuildSpec(k="7")) == {"/neuron_config/speculation_length"}
    assert "/fused_spec_config/draft_config/neuron_config/batch_size" in _differing(BuildSpec(k="6", batch=2))


class FusedSpecNeuronConfig:
    """The class of NxDI 0.6 that the loader fills from the file, by its arguments."""

    def __init__(self, worker_cls: object, draft_config: object = None, draft_model_path: object = None) -> None:
        self.given = (worker_cls, draft_config, draft_model_path)


def test_nxdi_0_6_takes_every_field_of_the_draft() -> None:
    FusedSpecNeuronConfig(**json.loads(render(BuildSpec(k="7").bundle))["fused_spec_config"])


# the literals of Qwen/Qwen3-1.7B's published config.json
PUBLISHED = """{"architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
"bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
"initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 28,
"model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
"rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null,
"tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": true,
"use_sliding_window": false, "vocab_size": 151936}"""


def test_a_published_file_is_read_with_its_integer_theta(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(PUBLISHED, encoding="utf-8")
    found = load_config(str(tmp_path))
    assert (found.rope_theta, type(found.rope_theta), type(found.rms_norm_eps)) == (1e6, float, float)
    named = BuildSpec(target=str(tmp_path), draft=str(tmp_path))
    assert json.loads(render(named.bundle))["rope_theta"] == 1000000
