"""`python -m bench.reproduce`: verdicts that follow the results, columns that don't mix, no report without results."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from bench.provenance import write_result
from bench.reproduce import __main__ as reproduce
from bench.reproduce import claims
from bench.reproduce.claims import CLAIMS
from bench.reproduce.model import OPEN, STRUCTURED
from bench.reproduce.report import report
from bench.wall.ways import ALONE
from model.errors import UserError

KS = (3, 7, 15)
HEAD = {"commit": "abc", "machine": "made", "date": "today"}


def _modelled(draft: str, workload: str, k: int, gain: float) -> dict[str, Any]:
    return {"draft": draft, "workload": workload, "rate": 0.6, "k": k, "ms": 6 / gain, "ms_low": 5 / gain,
            "ms_high": 8 / gain, "gain": gain, "gain_low": 0.9 * gain, "gain_high": 1.1 * gain,
            "source": "simulated"}  # fmt: skip


def _row(way: str, entropy: str) -> dict[str, Any]:
    gain = {"structured": 2.0, "open": 1.0}[entropy] if way != ALONE else 1.0
    times = {"times": {ALONE: [gain] * 3}, "times_itl": [gain] * 3, "times_first": [1.0] * 3}
    return {"entropy": entropy, "temperature": 0.0, "way": way, "source": "wall", "runs": 2, "same": 2, "compared": 2,
            "tokens": 22, "steps": 10, "ms": [4 / gain] * 3, "itl_ms": 4 / gain, "first_ms": 5.0,
            "tokens_per_step": 2.0} | times  # fmt: skip


@pytest.fixture
def results() -> dict[str, Any]:
    """Made results in which seven is best, open prompts gain nothing, and everything is identical."""
    loads, gains = ("MT-Bench", "InstructCoder", OPEN, STRUCTURED), {0: 1.0, 3: 1.2, 7: 1.5, 15: 1.1}
    sweep = [_modelled(d, w, k, g) for d in ("1.7B", "0.6B") for w in loads for k, g in gains.items() if w != OPEN]
    sweep += [_modelled("1.7B", OPEN, k, 1.1 if k == 15 else 1.0) for k in gains]
    best = [_modelled("1.7B", w, 7, 1.0 if w == OPEN else 1.5) for w in loads]
    other = {"workload": "MT-Bench", "needed_rate": 0.7, "rate_60_percent_lower": _modelled("0.6B", "x", 1, 1.01)}
    known = {"drafter": "eagle3", "model": "head", "k": 4, "tokens": 2.39, "assumed": False, "workload": "MT-Bench",
             "source": "said", "step": 1.2, "gain": 1.99, "gain_low": 1.9, "gain_high": 2.05}  # fmt: skip
    model = {"source": "simulated", "sweep": sweep, "best": best, "other_draft": [other],
             "drafters": [known, known | {"drafter": "dflash", "model": "layers", "assumed": True}],
             "off_below": {"1.7B": 0.28, "0.6B": 0.25}, **HEAD}  # fmt: skip
    ways = [ALONE, *(f"{draft}, k {k}" for draft in ("draft", "draft_small") for k in KS)]
    rows = [_row(way, entropy) for way in ways for entropy in ("structured", "open")]
    return {"model": model, "wall": {"source": "wall", "settings": "11 tokens", "rows": rows, **HEAD}}


def _verdict(results: dict[str, Any], said: str) -> str:
    return next(c for c in CLAIMS if said in c.said).verdict(results)


def test_verdicts_follow_the_results(results: dict[str, Any]) -> None:
    """Each verdict beside the same with results turned round: none is fixed in advance."""
    assert "does not hold" not in _verdict(results, "7 is best")
    assert _verdict(results, "no benefit").startswith("holds")
    assert _verdict(results, "TTFT").startswith("holds within")
    assert _verdict(results, "no loss").startswith("token-identical")
    assert _verdict(results, "0.6B").startswith("holds if")
    assert _verdict(results, "k = 15").startswith("does not hold for every workload"), "open gains less at 7 than at 15"
    assert _verdict(results, "k = 15").endswith("does not hold on structured prompts, does not hold on open prompts")
    assert _verdict(results, "end to end").startswith("contradicts")
    assert "not explained: 7.5 times" in _verdict(results, "45 ms")
    other = copy.deepcopy(results)
    other["model"]["best"][2] |= {"k": 2, "gain": 1.4}
    other["model"]["other_draft"][0]["rate_60_percent_lower"]["ms"] = 0.1
    other["wall"]["rows"][0]["same"] = 1
    for row in other["wall"]["rows"]:
        row["times_first"] = [0.6] * 3
        if row["entropy"] == "open" and row["way"].endswith("k 15"):
            row["times_itl"] = [0.5] * 3
        row["times"] = {ALONE: [1.0] * 3}
    for row in other["model"]["sweep"]:
        row["gain"] *= 0.5 if row["k"] == 15 else 1.0
    assert _verdict(other, "7 is best").startswith("does not hold")
    assert _verdict(other, "no benefit").startswith("does not hold for the model")
    assert _verdict(other, "TTFT").startswith("does not hold here")
    assert _verdict(other, "no loss").startswith("1 runs differ")
    assert _verdict(other, "0.6B").startswith("does not hold")
    assert _verdict(other, "k = 15").startswith("holds in the model;")
    assert _verdict(other, "k = 15").endswith("does not hold on structured prompts, holds on open prompts")
    assert _verdict(other, "end to end").startswith("not shown")


def test_drafts_accepted_are_tokens_beyond_one_a_step(results: dict[str, Any]) -> None:
    """Two classes of 22 tokens, two prompts' first ones among them, in 10 steps of 7 drafts: 10 of 70 kept."""
    assert claims._accepted(results, "draft") == pytest.approx(10 / 70)
    assert claims.swept(results) == list(KS)


def test_modelled_and_measured_never_share_a_column(results: dict[str, Any]) -> None:
    tables = [
        [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        for block in report(results, "p.svg").split("\n\n") if block.startswith("| ")
    ]  # fmt: skip
    assert len(tables) == 4
    for heads, *rows in tables:
        assert rows
        assert not [h for h in heads if "simulated" in h and "wall" in h]
    heads, _, *rows = tables[0]
    assert len(rows) == len(CLAIMS)
    measured = heads.index("demo pair here (wall)")
    assert not [row for row in rows if "ms [" in row[measured]], "a band belongs to a simulated figure"


def test_the_report_is_made_again_from_the_files(results: dict[str, Any], tmp_path: Path) -> None:
    for name, file in (("model", reproduce.MODEL), ("wall", reproduce.WALL)):
        write_result(tmp_path / file, results[name])
    reproduce.main(["--report", "--results", str(tmp_path)])
    assert (tmp_path / reproduce.REPORT).read_text() == report(results, reproduce.PICTURE)
    first = (tmp_path / reproduce.PICTURE).read_bytes()
    reproduce.main(["--report", "--results", str(tmp_path)])
    assert (tmp_path / reproduce.PICTURE).read_bytes() == first, "equal results give equal files"


def test_no_results_no_report(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        reproduce.main(["--report", "--results", str(tmp_path)])
    with pytest.raises(UserError, match="is no folder"):
        reproduce.main(["--report", "--results", str(tmp_path / "typo")])


def test_every_committed_result_has_a_header() -> None:
    files = list(reproduce.RESULTS.glob("*.json"))
    assert len(files) > 5
    for file in files:
        value = json.loads(file.read_text(encoding="utf-8"))
        for run in value.get("runs", [value]):
            assert {"source", "commit", "machine", "date"} <= run.keys(), file.name
            assert not run["commit"].endswith("-dirty"), file.name
