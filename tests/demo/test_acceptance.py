"""What the demo measures of its drafters: a drafter that is the target is always accepted, whatever the noise."""

from pathlib import Path

import pytest
import torch

from demo.acceptance import MOST, accepted, measure, steps_of, write
from demo.drafters import Chain
from demo.evaluate import Prompt
from demo.models import load

DEMO = Path("demo")


def test_the_target_accepts_itself_with_its_noise_and_less_with_other_noise() -> None:
    target, tokenizer = load(DEMO / "target")
    ids = tokenizer.encode("I believe the meaning of life is").ids
    generator = torch.Generator().manual_seed(0)
    text = write(target, ids, 24, -1, generator)
    counts = accepted(Chain(target), text, generator)
    for way in ("coupled", "rejection"):
        assert torch.equal(counts[way], text.room_A.clamp(max=MOST))
    assert counts["independent"].sum() < counts["coupled"].sum()
    greedy = write(target, ids, 24, -1, None)
    assert torch.equal(accepted(Chain(target), greedy, generator)["greedy"], greedy.room_A.clamp(max=MOST))


@pytest.mark.parametrize(
    ("counts", "k", "steps"),
    [([0, 0, 0], 5, 3), ([2, 1, 0], 5, 1), ([2, 1, 0], 1, 2), ([1, 9, 0, 9, 9], 3, 3)],
    ids=["none", "all", "limited", "first-anchor-of-each-step-counts"],
)
def test_a_step_keeps_the_accepted_drafts_and_one_token(counts: list[int], k: int, steps: int) -> None:
    assert steps_of(counts, k) == steps


def test_two_drafters_are_measured_on_the_same_text() -> None:
    prompts = [Prompt("count", "structured", "Count from 1 to 100: 1, 2, 3,")]
    results = measure(DEMO, ["chain", "parallel"], prompts, new=20, samples=1)
    assert {(r.drafter, r.way) for r in results} == {
        (d, w) for d in ("chain", "parallel") for w in ("greedy", "coupled", "independent", "best", "rejection")
    }
    for result in results:
        assert len(result.by_position) == len(result.tokens_per_step) == MOST
        assert 1 <= result.tokens_per_step[0] <= 2
