"""Greedy output of a bundle against transformers: greedy and assisted generation, demo pair, tp 1 and 2."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from model.engine import Engine
from tests.model.demo_bundle import PROMPTS, ROOT, graphs, request, shape_of


@pytest.fixture(scope="module")
def models():
    """Target and draft in fp32."""
    torch.set_num_threads(1)
    return [AutoModelForCausalLM.from_pretrained(ROOT / "demo" / n, dtype=torch.float32) for n in ("target", "draft")]


@pytest.mark.parametrize("tp", [1, 2])
def test_greedy_equals_transformers_greedy_and_assisted(base, models, tp: int) -> None:
    target, draft = models
    g = graphs(base, tp=tp, batch=1, max_len=128)
    for text in PROMPTS[::4]:
        made = request(g, text, count=32)
        ids = torch.tensor([made.ids])
        plain = target.generate(ids, max_new_tokens=32, do_sample=False)[0, len(made.ids) :].tolist()
        helped = target.generate(ids, max_new_tokens=32, do_sample=False, assistant_model=draft)
        assert Engine(g, shape_of(g.bundle)).run([made])[0].ids == plain
        assert helped[0, len(made.ids) :].tolist() == plain
