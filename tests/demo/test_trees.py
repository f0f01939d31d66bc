"""A tree is grown by what the text met, and counts a step as a chain does where it is one."""

from pathlib import Path

import pytest
import torch

from demo.acceptance import accepted, steps_of, write
from demo.drafters import load_proposer
from demo.models import load
from demo.trees import as_text, grown, ranks_of, shares_of, tokens_per_step

DEMO = Path("demo")
# the best draft is right now and then; a second best one is followed by a best one
CASES = [(0, 0), (0, 1), (1, 0), (1, 0), (1, 0), (2,)]


def test_a_tree_is_grown_by_what_is_kept_most() -> None:
    # a second best row can only hang where a best one does
    assert grown(CASES, 3, True) == [(), (0,), (1,)]
    assert grown(CASES, 5, True) == [(), (0,), (1,), (1, 0), (2,)]
    assert as_text(grown(CASES, 5, True)) == "0,0,2,0"
    # drafts that read each other: nothing hangs from a second best one
    assert as_text(grown(CASES, 5, False)) == "0,0,0,1"


def test_a_step_keeps_the_deepest_row_that_the_text_has_and_one_token() -> None:
    nodes = [(), (0,), (1,), (1, 0)]
    # a best draft and a token, then both drafts and a token
    assert tokens_per_step([[(0, 3), (2, 2), (1, 0), (0,), ()]], nodes) == 2.5
    # two steps: a miss, then four tokens' room of which the tree keeps two
    assert tokens_per_step([[(3, 0), (1, 0), (0,), ()]], nodes) == 2


def test_shares_are_of_places_behind_best_drafts() -> None:
    counts, shares = shares_of(CASES)
    assert counts[:3] == [6, 2, 0]
    assert shares[0][:3] == [pytest.approx(2 / 6, abs=1e-4), 0.5, pytest.approx(1 / 6, abs=1e-4)]
    assert shares[1][:2] == [0.5, 0.5]


@pytest.mark.parametrize("drawn", [False, True], ids=["greedy", "drawn"])
def test_best_ranks_are_the_accepted_drafts(drawn: bool) -> None:
    target, tokenizer = load(DEMO / "target")
    drafter, ids = load_proposer("parallel", DEMO), tokenizer.encode("I believe the meaning of life is").ids
    generator = torch.Generator().manual_seed(0)
    text = write(target, ids, 24, -1, generator if drawn else None)
    ranks = ranks_of(drafter, text)
    counts = accepted(drafter, text, generator)["coupled" if drawn else "greedy"].tolist()
    assert [next((d for d, r in enumerate(c) if r), len(c)) for c in ranks] == counts
    assert tokens_per_step([ranks], [(0,) * d for d in range(4)]) == round(len(counts) / steps_of(counts, 3), 3)
