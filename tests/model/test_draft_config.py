"""config.json of published drafts: the configuration read from each format, and unsupported settings."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from model.config import PRESETS, config_from_dict, load_config
from model.drafters.eagle3 import Eagle3Config
from model.drafters.registry import DRAFTERS, infer_drafter, load_draft
from model.errors import UserError
from tests.compile.tiny import BASE
from tests.model.heads import BLOCK_FACTS, BLOCKS, block_config

DEMO = load_config("demo/target")
EAGLE3 = json.loads(Path("demo/draft_eagle3/config.json").read_text())
HEAD = Eagle3Config(
    hidden_size=192, intermediate_size=512, num_attention_heads=8, num_key_value_heads=4, head_dim=32, vocab_size=2048,
    max_position_embeddings=1024, draft_vocab_size=1280, target_hidden_size=192, taps=(1, 3, 5),
    norm_before_residual=True,
)  # fmt: skip
# the original EAGLE-3 format: all at the root, no list of layers
ORIGINAL = EAGLE3["transformer_layer_config"] | {"draft_vocab_size": 1280, "architectures": ["LlamaForCausalLMEagle3"]}
_QWEN3: dict[str, Any] = BASE | {"num_hidden_layers": 8, "tie_word_embeddings": False}
TINY = config_from_dict(_QWEN3, "tiny")
_TAPS, _LAYER = "eagle_aux_hidden_state_layer_ids", EAGLE3["transformer_layer_config"]


def folder(tmp_path: Path, raw: object) -> str:
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return str(tmp_path)


# case -> a head's config.json, and the differences of its configuration from HEAD; taps of 61 are of the 32B
READ: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "speculators": (EAGLE3, {}),
    "original, layers as vLLM gives them": (ORIGINAL, {"taps": (2, 32, 61), "norm_before_residual": False}),
    # sorted, without duplicates; `eagle_config` is read if the root has no list
    "listed": (ORIGINAL | {_TAPS: [5, 1, 3, 3]}, {"norm_before_residual": False}),
    "nested": (ORIGINAL | {"eagle_config": {_TAPS: [3, 1, 5]}}, {"norm_before_residual": False}),
    "both": (ORIGINAL | {_TAPS: [1, 3, 5], "eagle_config": {_TAPS: [2]}}, {"norm_before_residual": False}),
    "a head dim and a norm left out": (
        {n: v for n, v in EAGLE3.items() if n != "norm_before_residual"}
        | {"transformer_layer_config": {n: v for n, v in _LAYER.items() if n != "head_dim"}},
        {"head_dim": 24},
    ),
}


@pytest.mark.parametrize("case", READ)
def test_a_head_s_config_is_read_as_vllm_reads_it(tmp_path: Path, case: str) -> None:
    raw, changes = READ[case]
    path, target = folder(tmp_path, raw), PRESETS["Qwen/Qwen3-32B"] if 61 in changes.get("taps", ()) else DEMO
    assert infer_drafter(path).name == "eagle3"
    assert load_draft(DRAFTERS["eagle3"], path, target) == dataclasses.replace(HEAD, **changes)


@pytest.mark.parametrize("form", BLOCKS)
def test_every_format_of_a_block_is_inferred_and_read(tmp_path: Path, form: str) -> None:
    path = folder(tmp_path, block_config(form))
    config: Any = load_draft(DRAFTERS["dflash"], path, TINY)
    assert infer_drafter(path).name == "dflash"
    assert (list(config.taps), config.shifted, config.causal) == BLOCK_FACTS[form]
    max_k = 5 + config.shifted
    assert config.incompatibility(TINY, max_k) == ""
    assert f"at most {max_k} tokens in a block of 6" in config.incompatibility(TINY, max_k + 1)
    assert config.untrained_ks((2, max_k)) == ([] if config.causal else [2])


# (a supported config.json, changes, the error)
RAW = {"parallel": _QWEN3 | {"pard_token": 63}, "eagle3": EAGLE3} | {form: block_config(form) for form in BLOCKS}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *(("parallel", {"pard_token": value}, f"has {value} as pard_token") for value in (64, None)),
    ("eagle3", {"norm_before_fc": True}, "norm_before_fc"),
    ("eagle3", {"ptd_token_id": 7}, "ptd_token_id"),
    ("eagle3", {"speculators_model_type": "dflash"}, "no EAGLE-3 head"),
    ("eagle3", {"draft_vocab_size": "many"}, "draft_vocab_size is 'many'"),
    ("eagle3", {_TAPS: [1, -3]}, "taps"),
    ("eagle3", {"transformer_layer_config": 7}, "no EAGLE-3 head"),
    ("eagle3", {"transformer_layer_config": {}}, "hidden_size"),
    ("z-lab", {"block_size": 1}, "block_size is 1"),
    ("z-lab", {"layer_types": ["full_attention", "sliding_attention"]}, "sets layer_types"),
    ("z-lab", {"num_target_layers": 6}, "sets num_target_layers to 6"),
    ("z-lab", {"dflash_config": {"mask_token_id": 64}}, "mask_token_id 64, ids are 0 to 63"),
    ("z-lab", {"selector_rank": 256}, "sets selector_rank to 256"),
    ("z-lab", {"attention_bias": True}, "sets attention_bias"),
    ("specforge", {"dflash_config": {"projector_type": "domino"}}, "sets projector_type to 'domino'"),
    ("deepspec", {"markov_head_type": "gated"}, "sets markov_head_type to 'gated'"),
    ("speculators", {"draft_vocab_size": 40}, "sets draft_vocab_size to 40"),
    ("speculators", {"speculators_model_type": "dflash2"}, "describes 'dflash2'"),
    ("speculators", {"sample_from_anchor": "no"}, "shifted is 'no', expected true or false"),
]


@pytest.mark.parametrize(("name", "changes", "match"), REFUSED, ids=[match[:30] for *_, match in REFUSED])
def test_unsupported_configs_are_refused(tmp_path: Path, name: str, changes: dict[str, Any], match: str) -> None:
    raw, target = RAW[name], DEMO if name == "eagle3" else TINY
    drafter = infer_drafter(folder(tmp_path, raw))
    load_draft(drafter, str(tmp_path), target)
    nested = {key: raw[key] | value for key, value in changes.items() if key == "dflash_config"}
    with pytest.raises(UserError, match=match) as refusal:
        load_draft(drafter, folder(tmp_path, raw | changes | nested), target)
    assert "\n" not in str(refusal.value)
