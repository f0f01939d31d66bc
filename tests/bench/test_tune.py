"""`python -m bench.tune`: the optimum against brute force, the parts of a pass, the drafters' bills, the outputs."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from bench.kernels.__main__ import simulate
from bench.kernels.layer import Shard, attention_case, layers_case, mlp_case
from bench.provenance import write_result
from bench.tune import __main__ as command
from bench.tune import choose, drafters, passes, regimes
from bench.tune.acceptance import Acceptance, at_rate, from_steps, tokens
from bench.tune.choose import Setup
from bench.tune.drafters import KNOWN, Known
from bench.tune.passes import Pass, collective_us
from model.drafters.registry import DRAFTERS
from model.errors import UserError
from nkisim.timeline.chip import Chip
from nkisim.timeline.schedule import schedule
from nkisim.timeline.trn2 import TRN2

MOST = 7


@dataclass(frozen=True)
class Made:
    """Times by formula, in microseconds: they grow with rows and batch and fall with ranks."""

    scale: float = 1.0
    draft_scale: float = 1.0

    def launch(self) -> float:
        return 700 * self.scale

    def draft(self, setup: Setup) -> float:
        size = {"1.7B": 900.0, "0.6B": 400.0}[setup.draft]
        return self.draft_scale * self.scale * (200 + size * 8 / setup.draft_tp + 5 * setup.batch)

    def target(self, setup: Setup, rows: int) -> float:
        return self.scale * (1000 + 32_000 / setup.tp + 20 * rows * setup.batch)

    def longest(self, setup: Setup) -> int:
        return MOST


SETUPS = choose.setups(("1.7B", "0.6B"), (8, 32), (8, 32), (1, 4))
BAND = {"low": Made(0.5), "nominal": Made(), "high": Made(2.0)}


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
        step = latency.launch() + k * latency.draft(setup) + latency.target(setup, k + 1)
        time = step * len(steps[setup.draft])
        made = sum(min(accepted, k) + 1 for _, accepted in steps[setup.draft])
        replayed[setup, k] = time / made / 1e3
    expected, k = min(replayed, key=lambda key: replayed[key])
    plan = command.Plan(SETUPS, workloads, dict.fromkeys(("low", "nominal", "high"), latency), 99.0)
    fastest, cheapest = command.choices(command.candidates(plan), plan.limit_ms)
    assert (fastest["draft"], fastest["tp"], fastest["draft_tp"], fastest["batch"], fastest["k"]) == (
        expected.draft, expected.tp, expected.draft_tp, expected.batch, k,
    )  # fmt: skip
    assert fastest["ms"] == pytest.approx(replayed[expected, k], rel=1e-12)
    assert cheapest["tokens_per_second_per_chip"] >= fastest["tokens_per_second_per_chip"]


def test_brute_force_tells_a_wrong_optimum() -> None:
    """Negative control: the optimum moves with the costs, so agreement is no accident of the traces."""
    workload = from_steps("w", "1.7B", _synthetic(0)["1.7B"], "test")
    found = {choose.best_k(Made(s), SETUPS[0], workload).k for s in (0.5, 1.0, 2.0)}
    assert len(found) == 1, "a common factor changes no optimum"
    assert choose.best_k(Made(draft_scale=50.0), SETUPS[0], workload).k == 0


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


def test_best_k_as_published() -> None:
    """The optimal k by acceptance rate and c that Leviathan's formula gives."""

    @dataclass
    class Ratio:
        c: float

        def launch(self) -> float:
            return 0.0

        def draft(self, setup: Setup) -> float:
            return self.c

        def target(self, setup: Setup, rows: int) -> float:
            return 1.0

        def longest(self, setup: Setup) -> int:
            return 24

    expected = {0.6: (6, 4, 3, 2), 0.7: (8, 6, 4, 3), 0.8: (11, 8, 6, 4), 0.9: (19, 13, 10, 7)}
    for rate, ks in expected.items():
        found = (choose.best_k(Ratio(c), SETUPS[0], at_rate(rate, 24)).k for c in (0.02, 0.05, 0.1, 0.2))
        assert tuple(found) == ks
    assert choose.best_k(Ratio(0.9), SETUPS[0], at_rate(0.6, 24)).k == 0


def test_off_exactly_below_the_break_even() -> None:
    """With one rate, k = 1 is the last to lose: it gains when the rate exceeds both costs over a step."""
    latency, setup = Made(), SETUPS[0]
    one, two = latency.target(setup, 1), latency.target(setup, 2)
    exact = (latency.draft(setup) + two - one) / (latency.launch() + one)
    assert choose.break_even(latency, setup) == pytest.approx(exact, abs=1e-6)
    assert choose.best_k(latency, setup, at_rate(exact - 1e-4, MOST)).k == 0
    assert choose.best_k(latency, setup, at_rate(exact + 1e-3, MOST)).k > 0


def test_a_trace_stays_with_its_draft() -> None:
    small = Acceptance("w", "0.6B", (0.9,), "test")
    rows = command.candidates(command.Plan(SETUPS, [small], dict(BAND), 99.0))
    assert {row["draft"] for row in rows} == {"0.6B"}
    assert choose.fits(SETUPS[0], at_rate(0.5, 2))


def test_a_pass_is_layers_collectives_head_and_sampling() -> None:
    shard = Shard("0.6B", 32, 1, 1)
    found = passes.simulated_pass(shard, 2)
    halves = [simulate(make(shard, 2))["us"] for make in (attention_case, mlp_case)]
    assert [found.attention, found.mlp] == pytest.approx([28 * us for us in halves])
    assert found.collectives == pytest.approx(56 * collective_us(TRN2, 32, 2, 1024 * 2))
    assert found.sampling > collective_us(TRN2, 32, 2, 0)
    # 0.44 B parameters of layers and 0.16 B of the head in bf16 over 32 ranks, and the cache's bytes on top
    assert found.hbm_bytes > (0.44e9 + 0.155e9) * 2 / 32
    # a draft draws with the target's noise, and all ranks split its head
    draft = choose.draft_pass(Setup("0.6B", 32, 8, 1))
    assert draft.head == pytest.approx(found.head)
    assert draft.sampling < found.sampling


def test_halves_join_their_cores_and_launches_of_several_layers_follow_a_line() -> None:
    """Two cores that both store join before a sum; a core that makes the MLP alone does not wait."""
    shard = Shard("1.7B", 32, 4, 1)
    found = passes.simulated_pass(shard, 2)
    plain = [28 * simulate(make(shard, 2))["us"] for make in (attention_case, mlp_case)]
    assert found.attention > plain[0] + 28 * TRN2.core_barrier_ns.value / 1e3
    assert found.mlp == pytest.approx(plain[1])
    four, eight = (passes.kernel_us(shard, part, 2, TRN2) for part in passes._SEVERAL)
    assert 2 * eight - four == pytest.approx(simulate(layers_case(shard, 12))["us"], rel=0.01)
    launches = passes.launches_us(shard, 2, TRN2)
    assert found.total - found.head - found.sampling == pytest.approx(launches)
    assert found.saved > 0
    # a build launches its draft's layers as the target's, faster or not
    assert passes.simulated_pass(Shard("0.6B", 32, 4, 1), 2).saved < 0


@pytest.mark.usefixtures("billed")
def test_every_step_pays_the_launch_of_its_graph() -> None:
    """In passes of 111 us: the target alone pays a launch for each token, a step of k drafts one for all of its."""
    launch = (TRN2.host_dispatch_ns.value + TRN2.launch_ns.value) / 1e3
    assert launch >= 800
    setup, latency, always = Setup("1.7B", 32, 32, 1), choose.Simulated(), Acceptance("w", "", (1.0,) * 3, "test")
    alone, three = (choose.ms_per_token(latency, setup, always, k) for k in (0, 3))
    assert alone == pytest.approx((launch + 111) / 1e3)
    assert three == pytest.approx((launch + 4 * 111) / 4 / 1e3)
    look_up = Known("ngram", "", 3, 2.0, "", True, "")
    assert drafters.gain(look_up, setup, TRN2) == pytest.approx((1.0, 2.0))
    chain, one = replace(look_up, drafter="chain", model="1.7B"), launch + 111
    assert drafters.gain(chain, setup, TRN2)[0] == pytest.approx((one + 333) / one)


def test_chips_at_an_end_of_the_band_and_rows_between_two_sizes() -> None:
    """A chip moved to an end stays within the timeline's band, which spans orders and what is not modelled too."""
    shard = Shard("0.6B", 32, 1, 1)
    events = passes._events(shard, "mlp", 1)
    whole = schedule(events)
    low, high = (schedule(events, passes.CHIPS[case], band=False).latency_ns for case in ("low", "high"))
    assert whole.low_ns < low < whole.latency_ns < high < whole.high_ns
    five = replace(shard, candidates=5)
    assert passes.target_us(five, 1) == pytest.approx(passes.simulated_pass(five, 1).total, rel=0.03)
    assert (passes.longest(1), passes.longest(16)) == (15, 7)


def test_what_a_collective_costs_in_each_regime() -> None:
    """The same for every number of ranks, or nearly flat, or with waiting wherever ranks leave a chip."""
    documented, best, median = (
        [collective_us(regimes.REGIMES[name], ranks, 2, 0) for ranks in (4, 32, 64)]
        for name in ("documented", "measured best", "measured median")
    )
    assert documented == [5.0] * 3
    assert best == pytest.approx([13.0, 15.1, 17.5])
    assert median == pytest.approx([13.0, 15.1 + 26.7, 44.2])


def test_the_ranks_of_a_draft_turn_with_the_regime(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where collectives are nearly flat the draft wants the most ranks; where chips wait, a chip's own."""

    def stand_in(shard: Shard, lnc: int, chip: Chip = TRN2, *_: object, **__: object) -> Pass:
        size = {"32B": 160_000.0, "1.7B": 40_000.0, "0.6B": 4_000.0}[shard.model]
        return Pass(size / shard.tp, 0.0, 57 * collective_us(chip, shard.tp, lnc, 0), 0.0, 0.0, 0.0)

    monkeypatch.setattr(passes, "simulated_pass", stand_in)
    found = regimes.rows(("0.6B",), (4, 32))
    fastest = {
        name: min((r for r in found if r["regime"] == name), key=lambda r: r["ms"])["draft_tp"]
        for name in regimes.REGIMES
    }
    assert fastest == {"documented": 32, "measured best": 32, "measured median": 4}
    assert regimes.table(found).count("**") == 2 * len(regimes.REGIMES)
    assert all(r["assumed"] and r["source"] == "simulated" for r in found)


REFERENCE = Setup("", 32, 32, 4)


@pytest.fixture
def billed(monkeypatch: pytest.MonkeyPatch) -> list[Shard]:
    """The passes that are billed, each of 100 us of layers, 10 of a head and 1 of drawing."""
    shards: list[Shard] = []

    def simulated(shard: Shard, *_: Any, **__: Any) -> Pass:
        shards.append(shard)
        return Pass(60, 20, 20, 10, 1, 0)

    monkeypatch.setattr(passes, "simulated_pass", simulated)
    return shards


def _bill(drafter: str, model: str, k: int) -> float:
    return drafters.draft_us(Known(drafter, model, k, 2.0, "", True, ""), REFERENCE, TRN2)


@pytest.mark.parametrize(
    ("drafter", "model", "k", "us", "rows"),
    [("chain", "1.7B", 3, 333, [2, 1, 1]), ("parallel", "0.6B", 7, 111, [14]), ("ngram", "", 7, 0, [])],
)
def test_a_step_is_billed_for_the_passes_of_its_drafter(
    billed: list[Shard], drafter: str, model: str, k: int, us: float, rows: list[int]
) -> None:
    assert _bill(drafter, model, k) == us
    assert [s.candidates for s in billed] == rows


def test_heads_are_billed_for_each_matrix_once(billed: list[Shard]) -> None:
    """EAGLE-3: a 64th of the target's layers, its ids and a draw, `fc` in the first pass."""
    one, first = (drafters.eagle3_us(REFERENCE, TRN2, rows, first=rows > 1) for rows in (1, 4))
    assert _bill("eagle3", "head", 3) == pytest.approx(first + 2 * one)
    fc = passes.read_us(TRN2, 2, 3 * 5120 * 5120 * 2 / 32)
    assert fc < first - one < fc + 40
    assert 100 / 64 + 1 < one < 60


def test_a_block_is_billed_for_its_kernels_and_its_context(
    billed: list[Shard], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "kernel_us", lambda *_: 2.0)
    plain, with_head = (_bill("dflash", model, 7) for model in (drafters.LAYERS, drafters.MARKOV))
    fc = passes.read_us(TRN2, 2, 5 * 5120 * 5120 * 2 / 32)
    assert [s.candidates for s in billed] == [8, 8]
    assert plain == pytest.approx(111 + 5 * 2 + fc + collective_us(TRN2, 32, 2, 4 * 8 * 5120 * 2))
    assert 0 < with_head - plain < 40


def test_the_answer_is_the_largest_gain_of_each_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    def gains(known: Known, setup: Setup, chip: Any) -> tuple[float, float]:
        return 1.0, known.k + (0.5 if setup.draft_tp == 8 else 0) + (90 if known.drafter == "parallel" else 0)

    monkeypatch.setattr(drafters, "gain", gains)
    found = {(r["workload"], r["evidence"], r["regime"]): r for r in drafters.answers(REFERENCE, (8, 32), (1, 4))
             if r["batch"] == 4}  # fmt: skip
    assert found["MT-Bench", "with assumptions", "measured median"]["drafter"] == "parallel"
    published = found["MT-Bench", "published", "measured best"]
    assert (published["assumed"], published["k"], published["draft_tp"]) == (False, 6, 8)
    assert ("edits", "published", "measured best") not in found
    # nothing gains: no drafts
    monkeypatch.setattr(drafters, "gain", lambda known, *_: (1.0, 1.0 if known.drafter == "none" else 0.9))
    assert {(r["drafter"], r["k"]) for r in drafters.answers(REFERENCE, (32,), (4,))} == {("none", 0)}


def test_acceptance_of_the_demo_is_billed_at_the_sizes_of_the_32b(tmp_path: Path) -> None:
    tables = [{"draft": d, "name": "demo open", "tokens_per_step": {"3": 2.0, "7": 2.5}} for d in ("dspark", "other")]
    write_result(tmp_path / "a.json", {"source": "wall", "commit": "", "machine": "", "date": "", "tables": tables})
    known = drafters.of_demo(tmp_path / "a.json")
    assert [(n.drafter, n.model, n.k, n.tokens, n.assumed) for n in known] == [
        ("dflash", drafters.MARKOV, 3, 2.0, True), ("dflash", drafters.MARKOV, 7, 2.5, True),
    ]  # fmt: skip
    # the kernels hold 128 rows: a parallel draft of seven has 14 of each sequence
    parallel = replace(known[1], drafter="parallel")
    assert [drafters.possible(replace(REFERENCE, batch=b), [parallel]) for b in (4, 16)] == [[parallel], []]
    write_result(tmp_path / "b.json", {"source": "wall", "commit": "", "machine": "", "date": "", "tables": tables[1:]})
    with pytest.raises(UserError, match="has no table of chain"):
        drafters.of_demo(tmp_path / "b.json")


def test_what_is_assumed_says_so() -> None:
    assert {k.drafter for k in KNOWN if not k.assumed} == {"chain", "eagle3", "dflash"}
    assert all(k.source and 1 < k.tokens <= k.k + 1 and k.drafter in DRAFTERS for k in KNOWN)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command with times by formula in place of the simulator."""
    monkeypatch.setattr(choose, "band", lambda: dict(BAND))
    for module, name in ((regimes, "rows"), (drafters, "answers")):
        monkeypatch.setattr(module, name, lambda *_: [])
    monkeypatch.setattr(drafters, "row", lambda known, setup: {"drafter": known.drafter})


@pytest.mark.usefixtures("made")
def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    command.main(["--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["source"] == "simulated"
    assert {row["workload"] for row in found["choices"]} == {"MT-Bench", "InstructCoder"}
    assert all(row["ms_low"] < row["ms"] < row["ms_high"] for row in found["candidates"])


@pytest.mark.usefixtures("made")
def test_traces_of_a_stand_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A trace of another draft is refused, unless the user says for whom it stands."""
    trace = tmp_path / "chat.jsonl"
    trace.write_text("\n".join(json.dumps({"drafted": 7, "accepted": a, "draft": "demo/draft"}) for a in (0, 3, 7)))
    with pytest.raises(UserError, match="--trace-draft"):
        command.main(["--traces", str(trace)])
    command.main(["--traces", str(trace), "--trace-draft", "0.6B", "--json"])
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
