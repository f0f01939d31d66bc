"""Greedy output against transformers: the demo pair, also assisted, and random targets from their checkpoints."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.compile.tiny import spec, write_model
from tests.eager_graphs import eager_graphs
from tests.model.demo_bundle import PROMPTS, ROOT, graphs
from trnspec.engine.config import engine_config
from trnspec.engine.engine import Engine
from trnspec.engine.request import Request


def _load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def _theirs(model: PreTrainedModel, ids: tuple[int, ...], count: int, **options: object) -> list[int]:
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
        plain = _theirs(target, ids, 32)
        assert Engine(runner, engine_config(runner.bundle)).run([request])[0].ids == plain
        assert _theirs(target, ids, 32, assistant_model=draft) == plain


RANDOM = {
    "H4-G1": {"num_attention_heads": 4, "num_key_value_heads": 1, "num_hidden_layers": 3},
    "H16-G8-tied": {"num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": True},
    "H2-G2-D16": {"num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 48, "head_dim": 16},
}


@pytest.mark.parametrize("sizes", RANDOM)
def test_random_targets_equal_transformers(tmp_path: Path, sizes: str) -> None:
    """In eager graphs, without an end of an output, so that every one has its full length."""
    write_model(tmp_path / "target", 5, 0.5, eos_token_id=None, **RANDOM[sizes])
    plan = spec(tmp_path, k=0, batch=3)
    bundle: Any = SimpleNamespace(spec=plan.bundle)
    generator = torch.Generator().manual_seed(1)
    prompts = [tuple(torch.randint(1, 64, (n,), generator=generator).tolist()) for n in (1, 7, 33, 80, 90)]
    expected = [_theirs(_load(tmp_path / "target"), ids, 30) for ids in prompts]
    assert len({tuple(e) for e in expected}) == len(prompts)
    engine = Engine(eager_graphs(plan.bundle, plan.checkpoints), engine_config(bundle))
    assert [r.ids for r in engine.run([Request(ids, max_new_tokens=30) for ids in prompts])] == expected
