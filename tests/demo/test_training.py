"""Two steps of each drafter's training, and two more that go on from its checkpoint."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from demo.drafters import TRAINED
from demo.learn import Rates, Sampler, top_p_logits
from demo.train_drafters import DrafterPlan, train


@pytest.mark.parametrize("name", list(TRAINED))
def test_a_checkpoint_learns_again(name: str, tmp_path: Path) -> None:
    text = tmp_path / "text.npy"
    np.save(text, np.random.default_rng(0).integers(1, 2048, (8, 48)).astype(np.uint16))
    plan = DrafterPlan(steps=2, rates=Rates(1e-3, 1e-3), batch=2, every=1)
    train(name, plan, text, tmp_path, again=False)
    train(name, plan, text, tmp_path, again=True)
    report = json.loads((tmp_path / "drafters.json").read_text())[name]
    assert [point["step"] for point in report["curve"]] == [1, 2, 3, 4]
    assert len(report["plans"]) == len(report["seconds"]) == 2
    assert (tmp_path / "drafters.svg").read_text().startswith("<svg")
    assert all(weight.isfinite().all() for weight in TRAINED[name](tmp_path).module.parameters())


def test_top_p_keeps_the_least_ids_that_reach_it() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert top_p_logits(logits, 0.79).isfinite().tolist() == [[True, True, False, False]]
    assert top_p_logits(logits, 0.81).isfinite().tolist() == [[True, True, True, False]]
    assert torch.equal(top_p_logits(logits, 1.0), logits)


def test_a_sampler_draws_only_what_top_p_keeps() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().expand(64, -1)
    ids = Sampler(torch.Generator().manual_seed(0), temperature=1.0, top_p=0.79)(logits)
    assert set(ids.flatten().tolist()) == {0, 1}
