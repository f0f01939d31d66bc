"""`python -m bench.draft_cost`: the formula against enumeration, the parts of a step, and the table."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import product

import pytest

from bench import draft_cost
from bench.kernels.__main__ import simulate
from bench.kernels.layer import Shard, attention_case, mlp_case
from bench.tune import passes
from bench.tune.__main__ import _options
from bench.tune.acceptance import at_rate, tokens
from bench.tune.choose import Choice, Setup, Simulated, best_k, draft_pass
from bench.tune.passes import Pass, chip_with, collective_us, simulated_pass
from model.errors import UserError
from nkisim.timeline.chip import Chip
from nkisim.timeline.trn2 import TRN2


@pytest.mark.parametrize("rate", [0.0, 0.6, 0.95, 1.0])
@pytest.mark.parametrize("k", [0, 1, 5])
def test_tokens_by_enumeration(rate: float, k: int) -> None:
    """Over all outcomes of k independent acceptances: the accepted run and one token more."""
    mean = 0.0
    for accepted in product((True, False), repeat=k):
        chance, run = 1.0, 0
        for outcome in accepted:
            chance *= rate if outcome else 1 - rate
        while run < k and accepted[run]:
            run += 1
        mean += chance * (run + 1)
    assert tokens(rate, k) == pytest.approx(mean)


@dataclass
class Ratio:
    """A target pass of one unit whatever its rows, and a draft that costs c."""

    c: float

    def draft(self, setup: Setup) -> float:
        return self.c

    def target(self, setup: Setup, rows: int) -> float:
        return 1.0

    def longest(self, setup: Setup) -> int:
        return 24


def leviathan(rate: float, c: float) -> Choice:
    return best_k(Ratio(c), Setup("1.7B", 32, 32, 1), at_rate(rate, 24))


def test_best_k_as_published() -> None:
    """The optimal k by acceptance rate and c that Leviathan's formula gives."""
    expected = {0.6: (6, 4, 3, 2), 0.7: (8, 6, 4, 3), 0.8: (11, 8, 6, 4), 0.9: (19, 13, 10, 7)}
    for rate, ks in expected.items():
        assert tuple(leviathan(rate, c).k for c in (0.02, 0.05, 0.1, 0.2)) == ks
    alone = leviathan(0.6, 0.9)
    assert (alone.k, alone.gain) == (0, 1.0)


def test_a_row_is_made_of_passes() -> None:
    """The pass that bench.tune reads, with its defaults, and all-reduces at an end of their band."""
    shard = Shard("0.6B", 32, 1, 1)
    found = simulated_pass(shard, 2)
    halves = [simulate(make(shard, 2))["us"] for make in (attention_case, mlp_case)]
    assert found.attention == pytest.approx(28 * halves[0])
    assert found.mlp == pytest.approx(28 * halves[1])
    assert found.collectives == pytest.approx(56 * collective_us(TRN2, 32, 2, 1024 * 2))
    assert found.total > 28 * sum(halves) + found.collectives
    low, high = (simulated_pass(shard, 2, chip_with(case, *draft_cost._ALL_REDUCE)) for case in ("low", "high"))
    assert low.collectives < found.collectives < high.collectives
    assert low.mlp == found.mlp == high.mlp


def test_a_draft_whose_head_all_ranks_split_draws_with_the_target_s_noise() -> None:
    """Its head has a 32nd of the bytes and no noise of its own; its winners join 32 ranks. The layers stay the same."""
    everywhere, group = (draft_pass(Setup("0.6B", 32, 8, 1, draft_head=where)) for where in ("all", "group"))
    assert everywhere.head == pytest.approx(group.head / 4)
    for part in ("attention", "mlp", "collectives"):
        assert getattr(everywhere, part) == getattr(group, part)
    alone = simulated_pass(Shard("0.6B", 32, 1, 1), 2, noise=False)
    assert everywhere.sampling == alone.sampling < simulated_pass(Shard("0.6B", 32, 1, 1), 2).sampling
    assert group.sampling == simulated_pass(Shard("0.6B", 8, 1, 1), 2).sampling
    assert Setup("0.6B", 32, 8, 1).head_tp == 32, "as a build has it"


def test_the_table_and_its_rows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With a stand-in for the simulator, whose pass costs a microsecond per model size."""
    sizes, cores = {"32B": 64.0, "1.7B": 8.0, "0.6B": 4.0}, set()

    def stand_in(shard: Shard, lnc: int, chip: Chip, *_: object, **__: object) -> Pass:
        cores.add(lnc)
        return Pass(sizes[shard.model], 0.0, 1.0 / shard.tp, 0.0, 0.0, 0.0)

    for module in (draft_cost, passes):
        monkeypatch.setattr(module, "simulated_pass", stand_in)
    draft_cost.main(["--json"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert cores == {_options([]).lnc}
    assert len(rows) == 2 * (1 + 2 + 3)
    assert all(row["source"] == "simulated" and row["c"] == row["draft_us"] / row["target_us"] for row in rows)
    assert {row["draft_tp"] for row in rows if row["tp"] == 4} == {4}
    # the k and the speed-up that bench.tune chooses for the same setup
    row = next(r for r in rows if (r["draft"], r["draft_tp"], r["tp"]) == ("1.7B", 8, 32))
    tuned = best_k(Simulated(chip_with("nominal")), Setup("1.7B", 32, 8, 4), at_rate(0.8, 15))
    assert (row["best_k"]["0.8"], row["speed_up"]["0.8"]) == (tuned.k, tuned.gain)
    draft_cost.main([])
    out = capsys.readouterr().out
    assert "(simulated)" in out
    *lines, legend = out.splitlines()
    assert len(lines) == 2 + len(rows) + 1
    assert all(f"{column}: " in legend for column in ("c", "a=0.6 4 (1.79)")), "letters and cells are explained"


@pytest.mark.parametrize("batch", ["0", "17"])
def test_a_batch_that_does_not_fit_is_one_sentence(batch: str) -> None:
    with pytest.raises(UserError, match=f"batch is {batch}, 1 to 16"):
        draft_cost.main(["--batch", batch])
