"""What the draft's guessed filters cost: how steps are counted, that a bad guess shows, what a filter launches."""

from __future__ import annotations

import pytest
import torch

from bench import filter_cost
from bench.filter_cost import StepCost, exact_us, guessed_us, table
from bench.quality.guess import Tally, agreement, drawn, row, tally
from model.config import config_from_dict
from model.filters import GUESSED_STEPS
from model.qwen3 import Qwen3
from model.serving.request import Params
from tests.compile.tiny import BASE

Y, N = True, False


@pytest.mark.parametrize(
    ("agrees", "k", "expected"),
    [
        # a prompt of one id; the step's own token is never drafted
        ([N, Y, Y, N, Y], 2, Tally(drafted=3, accepted=3, steps=2)),
        ([N, N, N, N], 3, Tally(drafted=3, accepted=0, steps=3)),
        ([N, Y, Y, Y, Y, Y], 1, Tally(drafted=3, accepted=3, steps=3)),
    ],
    ids=["some", "none", "all"],
)
def test_a_step_looks_at_drafts_until_the_first_that_differs(agrees: list[bool], k: int, expected: Tally) -> None:
    assert tally(agrees, 0, k) == expected


def test_a_bad_guess_is_seen() -> None:
    torch.manual_seed(1)
    draft = Qwen3(config_from_dict(BASE | {"num_hidden_layers": 1, "tie_word_embeddings": False}, "tiny"))
    for name, weight in draft.named_parameters():
        if weight.dtype == torch.float32:
            torch.nn.init.normal_(weight, std=1.0 if "norm" in name else 0.3)
    ids = tuple(i % 64 for i in range(7, 97))

    def missed(steps: tuple[float, ...]) -> int:
        asked = [Params(0.9, top_k=8, top_p=0.9, seed=seed) for seed in range(4)]
        pairs = ((drawn(draft, ids, params, None), drawn(draft, ids, params, steps)) for params in asked)
        return sum(a != b for exact, guessed in pairs for a, b in zip(exact, guessed, strict=True))

    # nothing is tried between the best id and all of them
    coarse = (0.0, 1e30)
    # of 360 draws; with the mass of all that the next tried number adds, not its share, 15
    assert missed(GUESSED_STEPS) <= 360 * 0.02 < missed(coarse)
    params = Params(0.9, seed=1)
    exact = drawn(draft, ids, params, None)
    answer = (ids[0], *exact[:-1])
    agrees = agreement(draft, answer, params, None)
    assert (len(agrees), agrees[:2]) == (len(ids), [False, True])


def test_the_row_says_how_many_tokens_a_step_are_lost() -> None:
    line = row("all", Tally(100, 50, 50), Tally(100, 25, 50))
    assert line == "| all | 0.5000 of 100 | 0.2500 of 100 | 2.000 | 1.500 | +25.00% |"


def test_launches_and_collectives_of_a_filtered_pass_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def above(rows: int, thresholds: int, lnc: int, *_: int) -> float:
        asked.append((rows, thresholds))
        return 10.0

    monkeypatch.setattr(filter_cost, "above_us", above)
    monkeypatch.setattr(filter_cost, "collective_us", lambda chip, ranks, lnc, size: 1.0)
    assert exact_us(32, 1) == 17 * 10 + 18
    assert guessed_us(4, 1) == 2 * 10 + 3
    # counts and masses of four rows are summed as eight
    assert asked == [(32, 15), (32, 1), (8, 16)]
    cost = StepCost(unfiltered=100, target=5, draft_exact=20, draft_guessed=1)
    assert table({1: cost}).endswith("| 1 | 100 | 5 | 20 | 1 | +25.0% | +6.0% |")
