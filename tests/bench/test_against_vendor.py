"""The comparison with the vendor's kernel: what it attends is the law's, and the recorded table is the page's.

The vendor's half needs a checkout: TRNSPEC_NKI_LIBRARY names its src folder.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from bench.kernels import against_vendor
from bench.kernels.against_vendor import Operands, main, ours
from model.errors import UserError

ROOT = Path(__file__).parents[2]
SOURCE = os.environ.get("TRNSPEC_NKI_LIBRARY", "")


def test_ours_attends_the_operands_by_the_law() -> None:
    operands = Operands.of(1024)
    out, schedule, _ = ours(operands, 2)
    assert np.abs(np.asarray(out).astype(np.float64) - operands.expected()).max() < 2e-2
    assert schedule.low_ns <= schedule.latency_ns <= schedule.high_ns


def test_a_folder_without_the_library_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no nkilib_src; name the src folder of a checkout of nki-library"):
        main([str(tmp_path)])


def test_the_page_shows_the_recorded_rows() -> None:
    rows = json.loads((ROOT / "bench/results/against_vendor.json").read_text(encoding="utf-8"))["rows"]
    page = (ROOT / "docs/verify_attention.md").read_text(encoding="utf-8")
    for row in rows:
        cells = [f"| {row['slots']} | {row['lnc']} | {row['ours']['us']:.2f} |", f"| {row['times_as_fast']:.2f} |"]
        assert any(all(cell in line for cell in cells) for line in page.splitlines())


@pytest.mark.skipif(not SOURCE, reason="TRNSPEC_NKI_LIBRARY does not name a checkout of nki-library")
def test_the_vendors_kernel_gives_the_recorded_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(against_vendor, "SLOTS", (1024,))
    main([SOURCE, "--out", str(tmp_path / "rows.json")])
    here = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))["rows"]
    recorded = json.loads((ROOT / "bench/results/against_vendor.json").read_text(encoding="utf-8"))["rows"]
    assert [r for r in recorded if r["slots"] == 1024] == here
