"""Greedy output of the demo pair against transformers' greedy and assisted generation."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.model.demo_bundle import PROMPTS, ROOT, graphs
from trnspec.engine.config import engine_config
from trnspec.engine.engine import Engine
from trnspec.engine.request import Request


def _load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def _hf_generate(model: PreTrainedModel, ids: tuple[int, ...], count: int, **options: object) -> list[int]:
    out = model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False, pad_token_id=0, **options)
    return out[0, len(ids) :].tolist()


@pytest.mark.slow
def test_greedy_equals_transformers_greedy_and_assisted(tmp_path: Path) -> None:
    """Of a compiled bundle."""
    target, draft = _load(ROOT / "demo/target"), _load(ROOT / "demo/draft")
    runner, tokenizer = graphs(tmp_path), Tokenizer.from_file(str(ROOT / "demo/target/tokenizer.json"))
    for text in PROMPTS[::5]:
        ids = tuple(tokenizer.encode(text).ids)
        request = Request(ids, max_new_tokens=32, stop_ids=runner.bundle.spec.target_config.eos_token_ids)
        plain = _hf_generate(target, ids, 32)
        assert Engine(runner, engine_config(runner.bundle)).run([request])[0].ids == plain
        assert _hf_generate(target, ids, 32, assistant_model=draft) == plain
