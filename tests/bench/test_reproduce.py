"""`python -m bench.reproduce`: verdicts that follow the results, columns that don't mix, and a report made again."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.provenance import write_result
from bench.reproduce import __main__ as reproduce
from bench.reproduce import claims as reproduce_claims
from bench.reproduce import report as reproduce_report
from bench.reproduce import wall as reproduce_wall
from bench.reproduce.claims import CLAIMS, OPEN, STRUCTURED
from bench.tune import acceptance
from model.errors import UserError
from model.serving.request import Request, Result

KS = (3, 7, 15)


def _modelled(draft: str, workload: str, k: int, gain: float) -> dict[str, Any]:
    return {"draft": draft, "workload": workload, "rate": 0.6, "k": k, "ms": 6 / gain, "ms_low": 5 / gain,
            "ms_high": 8 / gain, "gain": gain, "gain_low": 0.9 * gain, "gain_high": 1.1 * gain,
            "source": "simulated"}  # fmt: skip


def _row(draft: str, k: int, entropy: str, number: int) -> dict[str, Any]:
    gain = {"structured": 2.0, "open": 1.0}[entropy] if k else 1.0
    # the second round runs beside other load: it slows every way, and no ratio
    itl = 4.0 * (1 + number) / gain
    return {"draft": draft if k else "none", "k": k, "round": number, "prompt": entropy, "entropy": entropy,
            "source": "wall", "tokens": 11, "identical": True, "ttft_ms": 5.0, "e2e_ms": 5.0 + 10 * itl, "itl_ms": itl,
            "tokens_per_step": 2.0, "steps": [[k, 1, 2], [k, 2, 1]] if k else []}  # fmt: skip


@pytest.fixture
def results() -> dict[str, Any]:
    """Made results in which seven is best, open prompts gain nothing, and everything is identical."""
    loads = ("MT-Bench", "InstructCoder", OPEN, STRUCTURED)
    gains = {0: 1.0, 3: 1.2, 7: 1.5, 15: 1.1}
    head = {"commit": "abc", "machine": "made", "date": "today"}
    slow = [_modelled("1.7B", OPEN, k, 1.1 if k == 15 else 1.0) for k in gains]
    sweep = [_modelled(d, w, k, g) for d in ("1.7B", "0.6B") for w in loads for k, g in gains.items() if w != OPEN]
    best = [_modelled("1.7B", w, 7, 1.0 if w == OPEN else 1.5) for w in loads]
    other = {"workload": "MT-Bench", "needed_rate": 0.7, "rate_60_percent_lower": _modelled("0.6B", "x", 1, 1.01)}
    h100 = {"rate": 0.77, "cost_ratio": 0.11, "cost_ratio_published": 0.1, "worst": 0.02}
    swept = [("none", 0), *((d, k) for d in ("draft", "draft_small") for k in KS)]
    rows = [_row(d, k, e, n) for d, k in swept for e in ("structured", "open") for n in range(2)]
    known = {"drafter": "eagle3", "model": "head", "k": 4, "tokens": 2.39, "assumed": False, "workload": "MT-Bench",
             "source": "said", "step": 1.2, "gain": 1.99, "gain_low": 1.9, "gain_high": 2.05}  # fmt: skip
    model = {"source": "simulated", "sweep": sweep + slow, "best": best, "other_draft": [other], "h100": h100,
             "drafters": [known, known | {"drafter": "medusa", "model": "heads", "assumed": True}],
             "off_below": {"1.7B": 0.28, "0.6B": 0.25}, **head}  # fmt: skip
    wall = {"source": "wall", "quick": True, "rows": rows, "sweep": {"prompts": 1, "tokens": 11, "rounds": 1}, **head}
    return {"model": model, "wall": wall}


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
    assert "not explained: 7.5 times" in _verdict(results, "45 ms")
    other = copy.deepcopy(results)
    other["model"]["best"][2] |= {"k": 2, "gain": 1.4}
    other["model"]["other_draft"][0]["rate_60_percent_lower"]["ms"] = 0.1
    other["wall"]["rows"][0]["identical"] = False
    for row in other["wall"]["rows"]:
        row["ttft_ms"] *= 1.5 if row["k"] else 1.0
        row["itl_ms"] *= 2.0 if row["k"] == 15 and row["entropy"] == "open" else 1.0
    for row in other["model"]["sweep"]:
        row["gain"] *= 0.5 if row["k"] == 15 else 1.0
    assert _verdict(other, "7 is best").startswith("does not hold")
    assert _verdict(other, "no benefit").startswith("does not hold for the model")
    assert _verdict(other, "TTFT").startswith("does not hold here")
    assert _verdict(other, "no loss").startswith("1 runs differ")
    assert _verdict(other, "0.6B").startswith("does not hold")
    assert _verdict(other, "k = 15").startswith("holds in the model;")
    assert _verdict(other, "k = 15").endswith("does not hold on structured prompts, holds on open prompts")


def test_ratios_are_of_runs_side_by_side(results: dict[str, Any]) -> None:
    """The load of a round cancels out; a ratio of medians over unequal rounds would not be 2."""
    assert reproduce_claims.spread(results, "structured", 7) == pytest.approx([2.0, 2.0, 2.0])
    rows = results["wall"]["rows"]
    rows[:] = [r for r in rows if r["k"] != 7 or r["round"]]
    assert reproduce_claims.ratio(results, "structured", 7) == pytest.approx(2.0)
    alone, drafted = (reproduce_claims.wall(results, "itl_ms", k=k, entropy="structured") for k in (0, 7))
    assert alone / drafted != pytest.approx(2.0)
    assert reproduce_claims.ratio(results, "open", 7) == pytest.approx(1.0)
    assert reproduce_claims.ratio(results, "structured", 7, "ttft_ms") == pytest.approx(1.0)
    assert reproduce_claims.swept(results) == list(KS)


def test_every_way_runs_in_every_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt in a round is served by all bundles before the next one is, and each order is drawn anew."""
    served: list[tuple[str, int]] = []
    bundle = SimpleNamespace(path=Path("x"), config=lambda role: SimpleNamespace(eos_token_ids=()))
    monkeypatch.setattr(reproduce_wall, "_bundle", lambda draft, k, folder: (draft, k))
    monkeypatch.setattr(reproduce_wall, "open_bundle", lambda named: named)
    monkeypatch.setattr(reproduce_wall, "Graphs", lambda named: SimpleNamespace(bundle=bundle, named=named))
    monkeypatch.setattr(reproduce_wall, "_prepared", lambda graphs, requests: graphs)
    monkeypatch.setattr(
        reproduce_wall, "_requests", lambda *_: [("a", "open", Request((1,))), ("b", "structured", Request((2,)))]
    )

    def timed(graphs: Any, request: Request) -> reproduce_wall._Timed:
        served.append(graphs.named)
        # one bundle answers otherwise
        return reproduce_wall._Timed(Result([3, 4 + (graphs.named[1] == 7)]), 1.0, 3.0, ())

    monkeypatch.setattr(reproduce_wall, "_timed", timed)
    ways = (reproduce_wall.ALONE, ("draft", 3), ("draft", 7), ("draft", 15))
    rows = list(reproduce_wall.measure(reproduce_wall.Sweep(ways, prompts=1, tokens=2, rounds=3)))
    blocks = [rows[at : at + 4] for at in range(0, len(rows), 4)]
    assert len(blocks) == 6
    for block in blocks:
        assert len({(r["prompt"], r["round"]) for r in block}) == 1
        assert {(r["draft"], r["k"]) for r in block} == set(ways)
    orders = {tuple(r["k"] for r in block) for block in blocks}
    assert len(orders) > 1
    assert not all(r["identical"] for r in rows), "another answer is seen, whichever came first"
    assert rows[0]["itl_ms"] == pytest.approx(2.0)


def test_acceptance_is_of_the_steps_that_were_counted() -> None:
    rows = [{"draft": "draft", "k": k, "entropy": "open", "steps": [[k, 0, 1], [k, 1, 3]]} for k in (0, 1, 2)]
    (table,) = reproduce_wall.acceptance_tables(rows)
    assert (table["k"], table["steps"], table["unconditional"]) == (2, 4, (0.75, 0.0))


def _tables(text: str) -> list[list[list[str]]]:
    tables: list[list[list[str]]] = []
    for block in text.split("\n\n"):
        lines = [line for line in block.splitlines() if line.startswith("| ")]
        if lines:
            tables.append([[cell.strip() for cell in line.strip("|").split("|")] for line in lines])
    return tables


def test_modelled_and_measured_never_share_a_column(results: dict[str, Any]) -> None:
    tables = _tables(reproduce_report.report(results))
    assert len(tables) == 4
    for heads, *rows in tables:
        assert rows
        assert not [h for h in heads if "simulated" in h and "wall" in h]
    heads, *rows = tables[0]
    assert len(rows) == len(CLAIMS)
    measured = heads.index("demo pair here (wall)")
    for row in rows:
        assert "ms [" not in row[measured], "a band belongs to a simulated figure"


def test_the_report_is_made_again_from_the_files(
    results: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, file in (("model", reproduce.MODEL), ("wall", reproduce.WALL)):
        write_result(tmp_path / file, results[name])
    reproduce.main(["--report", "--results", str(tmp_path)])
    assert capsys.readouterr().out.strip() == str(tmp_path / reproduce.REPORT)
    assert reproduce.read(tmp_path) == results
    text = (tmp_path / reproduce.REPORT).read_text()
    assert text == reproduce_report.report(results)
    assert "a quick sweep (`--quick`)" in text
    results["wall"]["rows"][0]["itl_ms"] *= 10
    assert text != reproduce_report.report(results)


def test_no_results_no_report(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="run without --report first"):
        reproduce.main(["--report", "--results", str(tmp_path)])


def test_the_committed_report_is_that_of_the_committed_results() -> None:
    """And every result says where it comes from."""
    found = reproduce.read(reproduce.RESULTS)
    assert (reproduce.RESULTS / reproduce.REPORT).read_text("utf-8") == reproduce_report.report(found)
    assert (found["model"]["source"], found["wall"]["source"]) == ("simulated", "wall")
    for part in found.values():
        assert part["commit"]
        assert part["machine"]
        assert part["date"]
    assert all(row["source"] == "wall" and row["identical"] for row in found["wall"]["rows"])
    assert found["model"]["h100"]["worst"] < 0.03
    for table in acceptance.read(reproduce.RESULTS / reproduce.ACCEPTANCE):
        assert 0 < table.rate <= 1


def test_results_are_json_by_line(results: dict[str, Any], tmp_path: Path) -> None:
    write_result(tmp_path / "x.json", results["wall"])
    text = (tmp_path / "x.json").read_text()
    assert json.loads(text) == results["wall"]
    assert len(text.splitlines()) > len(results["wall"]["rows"])


def test_other_drafters_stand_beside_the_articles(results: dict[str, Any]) -> None:
    shown = reproduce_report.report(results)
    assert "| eagle3 head | 4 | 1.20 | 2.39 | 1.99x [1.90, 2.05] | MT-Bench: said |" in shown
    assert "| medusa heads | 4 | 1.20 | 2.39 (assumed) |" in shown
