"""`python -m bench.tune.regimes`: what each regime says of a collective, and the table's conclusions."""

from __future__ import annotations

import json

import pytest

from bench.kernels.layer import Shard
from bench.tune import passes, regimes
from bench.tune.passes import Pass, collective_us
from nkisim.timeline.chip import Chip
from nkisim.timeline.trn2 import TRN2


def test_what_a_collective_costs() -> None:
    """The same for every number of ranks, or by hops: none within a chip."""
    for name, us in (("documented", 5.0), ("measured", 44.2)):
        assert [collective_us(regimes.REGIMES[name], ranks, 2, 0) for ranks in (4, 32, 64)] == [us] * 3
    assert regimes.REGIMES["by hops"] == TRN2
    four, many = (collective_us(TRN2, ranks, 2, 0) for ranks in (4, 32))
    assert four < 5 < many < 44.2


def test_what_slices_save_by_hand() -> None:
    """Three ranks' queries of 64 rows in bf16, and their parts of 256 rows of 129 numbers in fp32, at 160 B/ns."""
    bytes_us = (3 * 64 * 128 * 2 + 3 * 256 * 129 * 4) / 160 / 1e3
    chip = regimes.REGIMES["documented"]
    assert regimes.sequence_us(chip, (60.0, 20.0, 8.0)) == pytest.approx(60 - 20 - 8 - 2 * 5 - bytes_us)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of kernels that more ranks shorten, and 57 collectives; attention by length."""

    def stand_in(shard: Shard, lnc: int, chip: Chip = TRN2, *_: object, **__: object) -> Pass:
        size = {"32B": 160_000.0, "1.7B": 40_000.0, "0.6B": 8_000.0}[shard.model]
        return Pass(size / shard.tp, 0.0, 57 * collective_us(chip, shard.tp, lnc, 0), 0.0, 0.0, 0.0)

    monkeypatch.setattr(passes, "simulated_pass", stand_in)
    monkeypatch.setattr(regimes, "guessed_us", lambda rows, lnc, ranks, chip: 3 * collective_us(chip, ranks, lnc, 0))
    monkeypatch.setattr(regimes, "attention_us", lambda length: (length / 128, length / 512, 8.0))


@pytest.mark.usefixtures("stand_ins")
def test_conclusions_turn_with_the_regime(capsys: pytest.CaptureFixture[str]) -> None:
    """With one cost for all ranks the draft wants the most ranks; with hops it wants a chip's own."""
    regimes.main([])
    rows = {cells[1].strip(): [c.strip() for c in cells[2:5]] for cells in
            (line.split("|") for line in capsys.readouterr().out.splitlines())}  # fmt: skip
    assert rows["32B at tp 32, all times simulated"] == ["documented", "by hops", "measured"]
    assert rows["a small collective of 32 ranks, us"] == ["5.0", "24.0", "44.2"]
    assert rows["**ranks of the 0.6B that are fastest**"][0] == "32"
    assert rows["**ranks of the 0.6B that are fastest**"][1] != "32"
    drawn = [
        tuple(map(float, cell.split(", "))) for cell in rows["a draft's head and draw, with filters, us: 1.7B on 8"]
    ]
    assert [round(filtered - alone) for alone, filtered in drawn] == [15, 72, 133]
    assert "c of the 1.7B on 8 with its head" in rows
    saved = [float(cell) for cell in rows["slices of the sequence save at 8192, us a layer"]]
    assert saved[2] < saved[0] < saved[1]
    assert rows["**slices pay from a length of**"] == ["4096", "4096", "none"]


@pytest.mark.usefixtures("stand_ins")
def test_programs_get_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    regimes.main(["--json", "--batch", "1"])
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["documented", "by hops", "measured"]
    assert all(len(regime["drafts"]) == 10 for regime in found.values())
