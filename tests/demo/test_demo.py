"""The demo's weights are those that tests and pages mean, and a few steps of training give models of the same form."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from demo.corpus import batches
from demo.structured import GENERATORS
from demo.train import COPIED, Learner, Plan, save, train

DEMO = Path("demo")
# the first 16 digits of each file's SHA-256
WEIGHTS = {
    "draft": "6a94e4f35f9ef31f",
    "draft_dflash": "05f127b3f86d2b0d",
    "draft_dspark": "8b0ec53a59b2f0e7",
    "draft_eagle3": "5acb8c2c16afa353",
    "draft_parallel": "62292c0b79b15de0",
    "draft_small": "5e384f433287bdf7",
    "target": "32e10d7721fc0a4c",
}
TOKENIZER = "362c824733ea1edf"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "target/tokenizer.json"))


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def test_weights_and_tokenizers_are_the_committed_ones() -> None:
    assert {file.parent.name: digest(file) for file in DEMO.glob("*/model.safetensors")} == WEIGHTS
    assert {digest(file) for file in DEMO.glob("*/tokenizer.json")} == {TOKENIZER}


def test_the_corpus_is_the_same_for_a_seed_and_every_generator_has_its_turn(tokenizer: Tokenizer) -> None:
    first, again, other = (list(itertools.islice(batches(tokenizer, 2, 64, seed), 2)) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    assert first[0].shape == (2, 64)
    assert all(generate(random.Random(n)).endswith("\n") for generate in GENERATORS for n in range(20))


def test_a_step_lowers_the_loss_of_its_rows(tokenizer: Tokenizer) -> None:
    torch.manual_seed(0)
    learner, ids = Learner("draft_small", (5e-3, 4e-3), 4), next(batches(tokenizer, 1, 32, 0))
    losses = [learner.step(ids) for _ in range(4)]
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_a_few_steps_give_models_of_the_committed_form(tokenizer: Tokenizer, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plan = Plan(target=1, draft=1, distil=2, batch=2, length=64, written=48)
    for name, model in train(plan, tokenizer).items():
        save(model, name, tmp_path / name)
        shapes, committed = (
            {n: (w.shape, w.dtype) for n, w in load_file(folder / name / "model.safetensors").items()}
            for folder in (tmp_path, DEMO)
        )
        assert shapes == committed
        assert all((tmp_path / name / file).read_bytes() == (DEMO / name / file).read_bytes() for file in COPIED)
        reopened = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32).state_dict()
        assert all(torch.equal(reopened[n], w) for n, w in model.state_dict().items())


def test_prompts_are_twelve_of_each_class() -> None:
    prompts = json.loads((DEMO / "prompts.json").read_text(encoding="utf-8"))["prompts"]
    assert sorted(p["entropy"] for p in prompts) == ["open"] * 12 + ["structured"] * 12
