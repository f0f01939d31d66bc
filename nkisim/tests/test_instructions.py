"""The published measurements come out within 10 percent from one chip description, one figure within 20."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nkisim.timeline.schedule import schedule
from nkisim.timeline.trn2 import TRN2
from validation.instruction_models import Measurement
from validation.instructions import MEASUREMENTS, table

DOCUMENT = Path(__file__).parents[1] / "docs" / "time.md"


@pytest.mark.parametrize("row", MEASUREMENTS, ids=lambda row: row.name.strip().replace(" ", "-"))
def test_close_to_the_measurement(row: Measurement) -> None:
    # the figure has no numbers on its axis, and kernels show a transfer every 0.67 us and not every 0.8
    figure = row.name.startswith("one queue")
    assert row.ratio == pytest.approx(1.0, abs=0.20 if figure else 0.10)


def test_wrong_constant_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a slower descriptor rate breaks the rows that depend on it."""
    slow = replace(TRN2, dma_descriptor_ns=replace(TRN2.dma_descriptor_ns, value=20.0))
    monkeypatch.setattr("validation.instruction_models.schedule", lambda events, band: schedule(events, slow, band))
    row = next(r for r in MEASUREMENTS if r.name.startswith("pipelined loads, 512 B"))
    assert row.ratio < 0.9


def test_document_shows_the_current_table() -> None:
    assert table() in DOCUMENT.read_text(encoding="utf-8")


def test_every_constant_has_source_unit_and_kind() -> None:
    for name, constant in TRN2.constants().items():
        assert constant.source, name
        assert constant.unit, name
        assert constant.kind in ("documented", "profile", "measured", "inferred"), name
        bounded = constant.low is not None and constant.high is not None
        assert bounded == (constant.kind != "documented"), name


def test_unknown_case_is_refused() -> None:
    with pytest.raises(ValueError, match="low, nominal, high"):
        TRN2.at("best")
