"""Configurations of heads as they are published: what is read of them, and what is refused in one sentence."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from model.config import PRESETS, Qwen3Config, load_config
from model.drafters.eagle3 import Eagle3Config
from model.drafters.registry import DRAFTERS, infer_drafter
from model.drafters.registry import load_draft as load_of_kind
from model.errors import UserError
from model.strict import read

TARGET = load_config("demo/target")
EAGLE3 = json.loads(Path("demo/draft_eagle3/config.json").read_text())
HEAD = Eagle3Config(
    hidden_size=192, intermediate_size=512, num_attention_heads=8, num_key_value_heads=4, head_dim=32, vocab_size=2048,
    max_position_embeddings=1024, draft_vocab_size=1280, target_hidden_size=192, taps=(1, 3, 5),
    norm_before_residual=True,
)  # fmt: skip
# the original EAGLE-3 format: all at the root, no layers named
ORIGINAL = EAGLE3["transformer_layer_config"] | {"draft_vocab_size": 1280, "architectures": ["LlamaForCausalLMEagle3"]}


def load_draft(kind: str, name_or_path: str, target: Qwen3Config) -> Any:
    return load_of_kind(DRAFTERS[kind], name_or_path, target)


def folder(tmp_path: Path, raw: object) -> str:
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return str(tmp_path)


def test_the_speculators_format() -> None:
    assert load_draft("eagle3", "demo/draft_eagle3", TARGET) == HEAD


def test_the_original_format_taps_as_vllm_does(tmp_path: Path) -> None:
    config = load_draft("eagle3", folder(tmp_path, ORIGINAL), PRESETS["Qwen/Qwen3-32B"])
    assert config == dataclasses.replace(HEAD, taps=(2, 32, 61), norm_before_residual=False)


def test_layers_are_read_as_vllm_reads_them(tmp_path: Path) -> None:
    """In the order of the layers, each once; in an object of their own if the root has none."""
    key = "eagle_aux_hidden_state_layer_ids"
    for raw in ({key: [5, 1, 3, 3]}, {"eagle_config": {key: [3, 1, 5]}}, {key: [1, 3, 5], "eagle_config": {key: [2]}}):
        assert load_draft("eagle3", folder(tmp_path, ORIGINAL | raw), TARGET).taps == (1, 3, 5)


def test_what_a_config_leaves_out_of_a_head(tmp_path: Path) -> None:
    layer = {n: v for n, v in EAGLE3["transformer_layer_config"].items() if n != "head_dim"}
    raw = {n: v for n, v in EAGLE3.items() if n != "norm_before_residual"} | {"transformer_layer_config": layer}
    config = load_draft("eagle3", folder(tmp_path, raw), TARGET)
    assert isinstance(config, Eagle3Config)
    assert (config.norm_before_residual, config.head_dim) == (True, 24)


def test_the_drafter_is_inferred(tmp_path: Path) -> None:
    """Every format claims its own folders."""
    folders = {"demo/draft": "chain", "demo/draft_parallel": "parallel", "demo/draft_eagle3": "eagle3"}
    folders |= {folder(tmp_path, ORIGINAL): "eagle3"}
    assert {path: infer_drafter(path).name for path in folders} == folders


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_a_manifest_gives_back_what_was_read(kind: str) -> None:
    config = load_draft(kind, f"demo/draft_{kind}", TARGET)
    assert read(type(config), json.loads(json.dumps(vars(config)))) == config


@pytest.mark.parametrize(
    ("kind", "raw", "said"),
    [
        ("eagle3", EAGLE3 | {"norm_before_fc": True}, "norm_before_fc"),
        ("eagle3", EAGLE3 | {"ptd_token_id": 7}, "ptd_token_id"),
        ("eagle3", EAGLE3 | {"speculators_model_type": "dflash"}, "no EAGLE-3 head"),
        ("eagle3", EAGLE3 | {"draft_vocab_size": "many"}, "draft_vocab_size is 'many'"),
        ("eagle3", EAGLE3 | {"eagle_aux_hidden_state_layer_ids": [1, -3]}, "taps"),
        ("eagle3", EAGLE3 | {"transformer_layer_config": 7}, "no EAGLE-3 head"),
        ("eagle3", {"draft_vocab_size": 1280}, "hidden_size"),
    ],
)
def test_what_cannot_be_built_is_one_sentence(tmp_path: Path, kind: str, raw: object, said: str) -> None:
    with pytest.raises(UserError, match=said) as refusal:
        load_draft(kind, folder(tmp_path, raw), TARGET)
    assert "\n" not in str(refusal.value)
