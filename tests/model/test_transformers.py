"""Greedy output of a bundle against transformers: the demo pair, also assisted, and random targets."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from compile.build import build
from tests.compile.tiny import spec, write_model
from tests.model.demo_bundle import PROMPTS, ROOT, engine_config, graphs, request
from trnspec.bundle.opening import read_bundle
from trnspec.engine.engine import Engine
from trnspec.engine.request import Request
from trnspec.runtime.xla import XlaRunner


def _load(folder: Path) -> PreTrainedModel:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def _theirs(model: PreTrainedModel, ids: tuple[int, ...], count: int, **options: object) -> list[int]:
    out = model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False, pad_token_id=0, **options)
    return out[0, len(ids) :].tolist()


@pytest.mark.slow
def test_greedy_equals_transformers_greedy_and_assisted(base: Path) -> None:
    """On one rank; tests/compile/test_sharded.py has eight."""
    target, draft = _load(ROOT / "demo/target"), _load(ROOT / "demo/draft")
    g = graphs(base)
    for text in PROMPTS[::5]:
        made = request(g, text, count=32)
        plain = _theirs(target, made.ids, 32)
        assert Engine(g, engine_config(g.bundle)).run([made])[0].ids == plain
        assert _theirs(target, made.ids, 32, assistant_model=draft) == plain


RANDOM = [
    {"num_attention_heads": 4, "num_key_value_heads": 1, "num_hidden_layers": 3},
    {"num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": True},
    {"num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 48, "head_dim": 16},
]


@pytest.mark.slow
@pytest.mark.parametrize("changes", RANDOM, ids=["H4-G1", "H16-G8-tied", "H2-G2-D16"])
def test_random_targets_equal_transformers(tmp_path: Path, changes: dict) -> None:
    # without an end of text, so that every run has its full length
    write_model(tmp_path / "target", 5, scale=0.5, **(changes | {"eos_token_id": None}))
    bundle = read_bundle(build(spec(tmp_path, k=0, batch=3)))
    generator = torch.Generator().manual_seed(1)
    prompts = [tuple(torch.randint(1, 64, (n,), generator=generator).tolist()) for n in (1, 7, 33, 80, 90)]
    target = _load(tmp_path / "target")
    expected = [_theirs(target, ids, 30) for ids in prompts]
    assert len({tuple(e) for e in expected}) == len(prompts)
    found = Engine(XlaRunner(bundle), engine_config(bundle)).run([Request(ids, max_new_tokens=30) for ids in prompts])
    assert [r.ids for r in found] == expected
