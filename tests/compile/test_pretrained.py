"""Checkpoints written by transformers' save_pretrained have transformers' greedy ids: Qwen3's shapes, in small."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from compile.spec import BuildSpec
from tests.compile.tiny import spec
from tests.eager_graphs import eager_graphs
from tests.model.family import AsTheyRun, untraced
from trnspec.bundle.opening import read_bundle
from trnspec.engine.config import engine_config
from trnspec.engine.engine import Engine
from trnspec.engine.request import Request

# query and kv heads, hidden and intermediate size, and whether the head is tied, in the proportions of each model
SHAPES = {
    "0.6B": (4, 2, 32, 96, True), "4B": (8, 2, 40, 152, True), "8B": (8, 2, 64, 192, False),
    "32B": (16, 2, 80, 400, False), "MHA": (4, 4, 32, 96, True),
}  # fmt: skip
ALL = {f"{name} {'tied' if tied else 'untied'}": (*shape[:4], tied) for name, shape in SHAPES.items()
       for tied in (True, False)}  # fmt: skip
PROMPTS = [(3, 5, 7), (9, 2, 40, 41, 6), (11,)]


def _saved(folder: Path, shape: tuple[int, int, int, int, bool], **changes: Any) -> Qwen3ForCausalLM:
    """A random model in fp32, loaded from the folder: bf16, several files with an index, a tokenizer."""
    heads, kv_heads, hidden, inner, tied = shape
    config = Qwen3Config(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=97, tie_word_embeddings=tied, initializer_range=0.3, eos_token_id=95,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, **{"head_dim": 16} | changes,
    )  # fmt: skip
    torch.manual_seed(1)
    model = Qwen3ForCausalLM(config).bfloat16()
    model.generation_config = GenerationConfig(eos_token_id=[95, 96], do_sample=True, temperature=0.6, top_k=20)
    model.save_pretrained(folder, max_shard_size="30KB")
    Tokenizer(models.WordLevel({f"w{i}": i for i in range(97)}, unk_token="w0")).save(str(folder / "tokenizer.json"))
    assert len([*folder.glob("*.safetensors")]) > 1
    return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)


def _expected(model: Qwen3ForCausalLM, prompt: tuple[int, ...]) -> list[int]:
    out = model.generate(
        torch.tensor([prompt]), max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def _compare(runner: Any, built: BuildSpec, model: Qwen3ForCausalLM) -> None:
    engine = Engine(runner, engine_config(SimpleNamespace(spec=built.bundle)))  # type: ignore[arg-type]
    expected = [_expected(model, prompt) for prompt in PROMPTS]
    assert [r.ids for r in engine.run([Request(prompt, max_new_tokens=16) for prompt in PROMPTS])] == expected
    assert len({*expected[0]}) > 3


@pytest.mark.parametrize("shape", SHAPES)
def test_a_saved_model_has_transformers_greedy_ids(tmp_path: Path, shape: str) -> None:
    """In eager mode. The end ids are those of both of its files; head_dim may be the default."""
    changes = {"head_dim": 128} if shape == "MHA" else {}
    model = _saved(tmp_path / "target", SHAPES[shape], **changes)
    file = tmp_path / "target/config.json"
    raw = json.loads(file.read_text(encoding="utf-8"))
    assert (raw["head_dim"], raw["tie_word_embeddings"]) == (model.config.head_dim, SHAPES[shape][-1])
    if shape == "MHA":
        file.write_text(json.dumps({k: v for k, v in raw.items() if k != "head_dim"}), encoding="utf-8")
    built = spec(tmp_path, k=0)
    built.check()
    assert built.bundle.target_config.eos_token_ids == (95, 96)
    _compare(eager_graphs(built.bundle, built.checkpoints), built, model)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ALL)
def test_a_bundle_of_a_saved_model_has_transformers_greedy_ids(tmp_path: Path, shape: str) -> None:
    """Compiled, with a draft of the other files of the family; generation_config.json is the checkpoint's."""
    model = _saved(tmp_path / "target", ALL[shape])
    _saved(tmp_path / "draft", SHAPES["0.6B"])
    built = spec(tmp_path, k=2)
    opened = read_bundle(untraced(built))
    assert opened.read("tokenizer/generation_config.json") == (tmp_path / "target/generation_config.json").read_bytes()
    _compare(AsTheyRun(opened), built, model)
