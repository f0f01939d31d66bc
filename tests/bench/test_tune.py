"""`python -m bench.tune`: the optimum against brute force, the parts of a pass, the command's outputs."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import pytest

from bench.kernels.layer import Shard
from bench.reproduce.__main__ import RESULTS
from bench.tune import __main__ as command
from bench.tune import choose, passes, sensitivity, study, text
from bench.tune.acceptance import Acceptance, at_rate, from_steps
from bench.tune.choose import Setup
from model.errors import UserError
from model.serving.switching import parse_table
from nkisim.timeline.schedule import schedule
from nkisim.timeline.trn2 import TRN2

MOST = 7


@dataclass(frozen=True)
class Made:
    """Times by formula, in microseconds: they grow with rows and batch and fall with ranks."""

    scale: float = 1.0

    def draft(self, setup: Setup) -> float:
        size = {"1.7B": 900.0, "0.6B": 400.0}[setup.draft]
        return self.scale * (200 + size * 8 / setup.draft_tp + 5 * setup.batch)

    def target(self, setup: Setup, rows: int) -> float:
        return self.scale * (1000 + 32_000 / setup.tp + 20 * rows * setup.batch)

    def longest(self, setup: Setup) -> int:
        return MOST


SETUPS = choose.setups(("1.7B", "0.6B"), (8, 32), (8, 32), (1, 4), 2)


def _synthetic(seed: int) -> dict[str, list[tuple[int, int]]]:
    """Steps of both drafts whose rate differs from position to position."""
    rng = random.Random(seed)
    steps = {}
    for draft in ("1.7B", "0.6B"):
        rates = [rng.uniform(0.2, 0.98) for _ in range(MOST)]
        runs = [next((i for i, r in enumerate(rates) if rng.random() > r), MOST) for _ in range(300)]
        steps[draft] = [(MOST, run) for run in runs]
    return steps


@pytest.mark.parametrize("seed", range(8))
def test_the_optimum_is_that_of_brute_force(seed: int) -> None:
    """Brute force replays the whole trace for every draft, k, tp, draft tp and batch, and adds up time and tokens."""
    steps = _synthetic(seed)
    workloads = [from_steps("w", draft, rows, "test") for draft, rows in steps.items()]
    latency, replayed = Made(), {}
    for setup, k in product(SETUPS, range(MOST + 1)):
        time = sum(k * latency.draft(setup) + latency.target(setup, k + 1) for _ in steps[setup.draft])
        made = sum(min(accepted, k) + 1 for _, accepted in steps[setup.draft])
        replayed[setup, k] = time / made / 1e3
    expected = min(replayed, key=lambda key: replayed[key])
    found = min((choose.fastest(latency, SETUPS, w) for w in workloads), key=lambda c: c.ms)
    assert (found.setup, found.k) == expected
    assert found.ms == pytest.approx(replayed[expected], rel=1e-12)
    plan = study.Plan(SETUPS, workloads, dict.fromkeys(("low", "nominal", "high"), latency), 99.0)
    (fastest, _) = study.choices(plan, study.candidates(plan))
    assert (fastest["draft"], fastest["tp"], fastest["batch"], fastest["k"]) == (
        expected[0].draft,
        expected[0].tp,
        expected[0].batch,
        expected[1],
    )


def test_brute_force_tells_a_wrong_optimum() -> None:
    """Negative control: the optimum moves with the costs, so agreement is no accident of the traces."""
    workload = from_steps("w", "1.7B", _synthetic(0)["1.7B"], "test")
    setup = SETUPS[0]
    found = {choose.best_k(replace(Made(), scale=s), setup, workload).k for s in (0.5, 1.0, 2.0)}
    assert len(found) == 1, "a common factor changes no optimum"

    class Dear(Made):
        def draft(self, setup: Setup) -> float:
            return 50 * Made.draft(self, setup)

    assert choose.best_k(Dear(), setup, workload).k == 0


def test_off_exactly_below_the_break_even() -> None:
    """With one rate, k = 1 is the last to lose: it gains when the rate exceeds draft and added row over the target."""
    latency, setup = Made(), SETUPS[0]
    one, two = latency.target(setup, 1), latency.target(setup, 2)
    exact = (latency.draft(setup) + two - one) / one
    found = choose.break_even(latency, setup)
    assert found == pytest.approx(exact, abs=1e-6)
    assert choose.best_k(latency, setup, at_rate(exact - 1e-4, MOST)).k == 0
    assert choose.best_k(latency, setup, at_rate(exact + 1e-3, MOST)).k > 0


def test_cheapest_prefers_a_batch_and_keeps_the_limit() -> None:
    workload = at_rate(0.8, MOST)
    free = choose.cheapest(Made(), SETUPS, workload, 1e9)
    assert free is not None
    assert free.setup.batch == 4
    fast = choose.fastest(Made(), SETUPS, workload)
    assert fast.tokens_per_second_per_chip < free.tokens_per_second_per_chip
    within = choose.cheapest(Made(), SETUPS, workload, fast.ms)
    assert within is not None
    assert within.ms <= fast.ms
    assert choose.cheapest(Made(), SETUPS, workload, fast.ms / 2) is None


def test_a_trace_stays_with_its_draft() -> None:
    small = Acceptance("w", "0.6B", (0.9,), "test")
    assert choose.fastest(Made(), SETUPS, small).setup.draft == "0.6B"
    assert choose.fits(SETUPS[0], at_rate(0.5, 2))


def test_a_pass_is_layers_head_and_sampling() -> None:
    shard = Shard("0.6B", 32, 1, 1)
    found = passes.simulated_pass(shard, 1)
    parts = found.attention + found.mlp + found.collectives + found.head
    assert found.total - found.sampling == pytest.approx(parts)
    assert found.sampling > passes.collective_us(TRN2, 32, 1, 0)
    # 0.44 B parameters of layers and 0.16 B of the head in bf16 over 32 ranks, and the cache's bytes on top
    assert found.hbm_bytes > (0.44e9 + 0.155e9) * 2 / 32
    assert found.hbm_bytes / TRN2.hbm_bytes_per_ns.value / 1e3 < found.total


def test_chips_at_an_end_of_the_band() -> None:
    """A chip moved to an end stays within the timeline's band, which spans orders and what is not modelled too."""
    shard = Shard("0.6B", 32, 1, 1)
    events = passes._events(shard, "mlp", 1)
    whole = schedule(events)
    low, high = (schedule(events, passes.CHIPS[case], band=False).latency_ns for case in ("low", "high"))
    assert whole.low_ns < low < whole.latency_ns < high < whole.high_ns
    ends = [passes.simulated_pass(shard, 1, passes.chip_with(c, "collective_start_ns")) for c in ("low", "high")]
    assert ends[1].collectives - ends[0].collectives == pytest.approx(56 * 9.0)
    assert ends[0].mlp == ends[1].mlp


def test_rows_between_two_simulated_sizes() -> None:
    """A straight line between simulated sizes, against the size itself."""
    shard = Shard("0.6B", 32, 1, 5)
    assert passes.target_us(shard, 1) == pytest.approx(passes.simulated_pass(shard, 1).total, rel=0.03)
    assert passes.longest(1) == 15
    assert passes.longest(16) == 7


def test_the_collective_dominates_what_is_uncertain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each inferred constant moves the result alone; one that no kernel uses moves nothing."""
    assert {"collective_hop_ns", "hbm_bytes_per_ns"} <= set(sensitivity.inferred())
    assert "tensor_ghz" not in sensitivity.inferred()
    monkeypatch.setattr(sensitivity, "inferred", lambda: ["collective_hop_ns", "gpsimd_topk_cycles"])
    monkeypatch.setattr(choose, "TARGET", "1.7B")
    setup = Setup("0.6B", 32, 32, 1, 1)
    rows = study.moved(setup, at_rate(0.8, 15), lambda jobs: jobs)
    by = {row["assumption"]: row for row in rows}
    assert len(rows) == 4
    assert by["gpsimd_topk_cycles"]["swing_ms"] == 0
    assert rows[0]["swing_ms"] >= by["collective_hop_ns"]["swing_ms"] > 0.1
    assert rows == sorted(rows, key=lambda r: -r["swing_ms"])


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command with times by formula in place of the simulator."""
    scales = {"low": 0.5, "nominal": 1.0, "high": 2.0}
    monkeypatch.setattr(choose, "band", lambda host_us: {case: Made(s) for case, s in scales.items()})


@pytest.mark.usefixtures("made")
def test_the_command_its_page_and_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, table = tmp_path / "page.html", tmp_path / "table.json"
    command.main(["--no-sensitivity", "--html", str(page), "--table", str(table), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["source"] == "simulated"
    assert {row["workload"] for row in found["choices"]} == {"MT-Bench", "InstructCoder"}
    assert all(row["ms_low"] < row["ms"] < row["ms_high"] for row in found["candidates"])
    assert {row["draft"] for row in found["other_drafts"]} == {"0.6B"}
    made = json.loads(table.read_text())
    assert set(made) == {"format", "source", "commit", "machine", "date", "setup", "rows"}
    assert made["commit"] == found["commit"]
    assert parse_table(table.read_bytes(), "table").source == "simulated"
    assert (made["format"], made["source"]) == (1, "simulated")
    assert len(made["rows"]) == 3 * len(study.RATES) * MOST
    setup = command.reference_setup(command._plan(command._options([])))
    for batch, rate in product((1, 4, 16), study.RATES):
        rows = [r for r in made["rows"] if (r["batch"], r["alpha"]) == (batch, rate)]
        largest = max(rows, key=lambda r: r["gain"])
        best = choose.best_k(Made(), replace(setup, batch=batch), at_rate(rate, MOST))
        if best.k:
            assert (largest["k"], largest["gain"]) == (best.k, round(best.gain, 4))
        else:
            assert largest["gain"] <= 1.0
    shown = page.read_text()
    assert shown.count("<svg") == 4
    assert "nothing here was measured" in shown
    assert f"commit {found['commit']}, " in shown


def test_an_assumption_is_shown_with_its_unit() -> None:
    """No exponents: a latency of 15000 ns is 15 us, as a person says it."""
    ends = [
        ("collective_start_ns", "ns", (1000, 15000)),
        ("register_ns", "ns", (10, 200)),
        ("rate", "", (0.81, 0.71)),
        ("vector_strided_bytes", "bytes", (1e9, 16)),
        ("gather", "ns of the issuing engine", (1, 2)),
    ]
    assert [text.span({"assumption": n, "unit": u, "ends": e}) for n, u, e in ends] == [
        "collective start, 1 to 15 us",
        "register, 10 to 200 ns",
        "rate, 0.81 to 0.71",
        "vector strided, 1,000,000,000 to 16 bytes",
        "gather, 1 to 2",
    ]


@pytest.mark.usefixtures("made")
def test_tables_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    command.main(["--no-sensitivity"])
    out = capsys.readouterr().out
    assert "## When speculation should be off" in out
    assert "(simulated)" in out
    assert "fit all twelve published points within" in out


@pytest.mark.usefixtures("made")
def test_traces_of_a_stand_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A trace of another draft is refused, unless the user says for whom it stands."""
    trace = tmp_path / "chat.jsonl"
    trace.write_text("\n".join(json.dumps({"drafted": 7, "accepted": a, "draft": "demo/draft"}) for a in (0, 3, 7)))
    with pytest.raises(UserError, match="--trace-draft"):
        command.main(["--traces", str(trace)])
    command.main(["--traces", str(trace), "--trace-draft", "0.6B", "--no-sensitivity", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert {(row["workload"], row["draft"]) for row in found["candidates"]} == {("chat", "0.6B")}


@pytest.mark.usefixtures("made")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--batch", "0"], "--batch is 0"),
        (["--tp", "8", "--draft-tp", "32"], "exceeds --tp"),
        (["--draft", "0.6B"], "give traces of one of these"),
    ],
)
def test_refusals(arguments: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        command.main(arguments)


def test_the_committed_study_says_where_it_comes_from() -> None:
    """And its page shows no exponents, which a person would have to decode."""
    table = json.loads((RESULTS / "switching_table.json").read_text(encoding="utf-8"))
    shown = (RESULTS / "tune.html").read_text(encoding="utf-8")
    assert table["source"] == "simulated"
    assert not table["commit"].endswith("-dirty")
    assert f"commit {table['commit']}, {table['machine']}, {table['date']}" in shown
    assert not re.search(r"\de[+-]\d", shown)
