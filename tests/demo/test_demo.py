"""The corpus is deterministic, and a few steps of training give models of the committed form."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from demo.corpus import batches
from demo.structured import GENERATORS
from demo.train import COPIED, Plan, Trainer, save, train

DEMO = Path("demo")
TOKENIZER = Tokenizer.from_file(str(DEMO / "target/tokenizer.json"))


def test_the_corpus_is_the_same_for_a_seed_and_a_step_lowers_the_loss() -> None:
    first, again, other = (next(batches(TOKENIZER, 2, 32, seed)) for seed in (0, 0, 1))
    assert (torch.equal(first, again), torch.equal(first, other)) == (True, False)
    assert all(g(random.Random(n)).endswith("\n") for g, n in itertools.product(GENERATORS, range(20)))
    torch.manual_seed(0)
    trainer = Trainer("draft_small", (5e-3, 4e-3), 3)
    losses = [trainer.step(first) for _ in range(3)]
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_a_few_steps_give_models_of_the_committed_form(tmp_path: Path) -> None:
    torch.manual_seed(0)
    for name, model in train(Plan(1, 1, 2, batch=2, length=64, generated=48), TOKENIZER).items():
        save(model, name, tmp_path / name)
        saved, committed = (load_file(folder / name / "model.safetensors") for folder in (tmp_path, DEMO))
        forms = ({n: (w.shape, w.dtype) for n, w in weights.items()} for weights in (saved, committed))
        assert next(forms) == next(forms)
        assert all((tmp_path / name / file).read_bytes() == (DEMO / name / file).read_bytes() for file in COPIED)
        assert all(torch.equal(saved[n].float(), w) for n, w in model.state_dict().items() if n in saved)
