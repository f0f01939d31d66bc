"""`python -m bench.tune`: the best k by brute force, tokens of a step, the bills of passes, files of traces, claims."""

from __future__ import annotations

import json
import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from bench.kernels.layer import Shard
from bench.tune import __main__ as command
from bench.tune import acceptance, article, choose, drafters, first_token, passes
from bench.tune.acceptance import KNOWN, Acceptance, at_rate
from bench.tune.drafters import DRAFTERS, Setup
from model.errors import UserError
from nkisim.timeline.chip import CASES
from nkisim.timeline.trn2 import TRN2

CHAIN = Setup("chain 1.7B", 32, 4)


@pytest.fixture
def formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times by formula in place of the simulator: they grow with rows and batch and fall with ranks."""
    scales = {"low": 0.5, "nominal": 1.0, "high": 2.0}

    def made(shard: Shard, end: str = "nominal") -> float:
        size = {"32B": 1000.0, "1.7B": 300.0, "0.6B": 130.0}.get(shard.model, 50.0)
        return scales[end] * (size * 8 / shard.tp + 5 * shard.rows)

    monkeypatch.setattr(passes, "layers_us", made)
    monkeypatch.setattr(passes, "layer_us", lambda shard, end="nominal", attention=(): made(shard, end) / 64)
    monkeypatch.setattr(passes, "kernel_us", lambda case, end="nominal": 2.0 * scales[end])


def _steps(seed: int) -> list[int]:
    """Accepted drafts of 300 steps of 15, whose rate differs from position to position."""
    rng = random.Random(seed)
    rates = [rng.uniform(0.2, 0.98) for _ in range(15)]
    return [next((i for i, rate in enumerate(rates) if rng.random() > rate), 15) for _ in range(300)]


@pytest.mark.usefixtures("formulas")
@pytest.mark.parametrize("seed", range(6))
def test_the_choice_is_that_of_brute_force(seed: int) -> None:
    """Brute force replays every step for every setup and k, and adds up time and tokens."""
    setups = [
        Setup(drafter, tp, batch) for drafter in ("chain 1.7B", "chain 0.6B") for tp in (8, 32) for batch in (1, 4)
    ]
    accepted = {s.drafter: _steps(2 * seed + n) for n, s in enumerate(setups[::4])}
    known = {
        drafter: Acceptance("w", drafter, tuple(sum(a > i for a in steps) / 300 for i in range(15)), "test")
        for drafter, steps in accepted.items()
    }
    replayed = {
        (s, k): 300 * drafters.step_us(s, k) / sum(min(a, k) + 1 for a in accepted[s.drafter]) / 1e3
        for s, k in product(setups, range(16))
    }
    best, k = min(replayed, key=lambda key: replayed[key])
    fastest, cheapest = choose.choices([choose.row(s, known[s.drafter]) for s in setups], 1e6)
    assert (fastest["drafter"], fastest["tp"], fastest["batch"], fastest["k"]) == (best.drafter, best.tp, best.batch, k)
    assert fastest["ms"] == pytest.approx(replayed[best, k])
    best_ms = {s: min(replayed[s, k] for k in range(16)) for s in setups}
    most = max(s.batch * 1e3 / ms / s.chips for s, ms in best_ms.items())
    assert cheapest["tokens_per_second_per_chip"] == pytest.approx(most)


@pytest.mark.parametrize("rate", [0.0, 0.6, 0.95])
@pytest.mark.parametrize("k", [0, 1, 5])
def test_tokens_by_enumeration(rate: float, k: int) -> None:
    """Over all outcomes of k independent acceptances: the accepted run and one token more."""
    mean = 0.0
    for outcomes in product((True, False), repeat=k):
        chance = 1.0
        for outcome in outcomes:
            chance *= rate if outcome else 1 - rate
        mean += chance * ((*outcomes, False).index(False) + 1)
    assert at_rate(rate).tokens(k) == pytest.approx(mean)
    # past the last position the record's rate goes on
    assert Acceptance("w", "", at_rate(rate).shares[:3], "").tokens(k) == pytest.approx(mean)


def test_the_best_k_is_leviathan_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Published optima by acceptance rate, where a draft pass takes c target passes."""
    expected = {0.6: (6, 4, 3, 2), 0.7: (8, 6, 4, 3), 0.8: (11, 8, 6, 4), 0.9: (15, 13, 10, 7)}
    for rate, ks in expected.items():
        for c, k in zip((0.02, 0.05, 0.1, 0.2), ks, strict=True):
            monkeypatch.setattr(choose, "step_us", lambda setup, k, end="nominal", c=c: 1 + c * k)
            assert choose.best_k(Setup("n-gram", 32, 1), at_rate(rate)) == k


def test_a_setup_drafts_what_its_kernels_take() -> None:
    assert [Setup("chain 1.7B", 32, batch).max_k for batch in (1, 8, 16, 64)] == [15, 15, 7, 1]
    # 2k rows in one pass
    assert [Setup("parallel 0.6B", 32, batch).max_k for batch in (4, 16)] == [15, 4]
    assert drafters.pass_rows("chain 1.7B", 3) == [2, 1, 1]
    assert drafters.pass_rows("parallel 0.6B", 7) == [14]
    assert drafters.pass_rows("EAGLE-3", 3) == [4, 1, 1]
    assert drafters.pass_rows("n-gram", 7) == []


@pytest.mark.usefixtures("formulas")
def test_a_step_is_a_launch_its_drafts_and_a_pass_over_their_rows() -> None:
    launch = (TRN2.host_dispatch_ns.value + TRN2.launch_ns.value) / 1e3
    for drafter in DRAFTERS:
        setup = Setup(drafter)
        alone, step = drafters.step_us(setup, 0), drafters.step_us(setup, 7)
        assert alone == pytest.approx(launch + drafters.pass_us(setup, "32B", 1))
        drafts = step - launch - drafters.pass_us(setup, "32B", 8)
        assert drafts == pytest.approx(drafters.draft_us(setup, 7))
        assert (drafts > 0) == (drafter != "n-gram")
        ends = [drafters.step_us(setup, 7, end) for end in CASES]
        assert ends == sorted(ends)
    # between simulated numbers of rows the formula's line goes on
    assert drafters.pass_us(CHAIN, "32B", 5) == pytest.approx(
        passes.layers_us(Shard("32B", 32, 4, 5)) + passes.head_us(Shard("32B", 32, 4, 5)), rel=0.02
    )
    markov = drafters.draft_us(Setup("DFlash with a Markov head"), 7) - drafters.draft_us(Setup("DFlash"), 7)
    assert 0 < markov < 40
    # fc in the first pass of EAGLE-3 alone
    first, later = (drafters._eagle3_us(Setup("EAGLE-3"), 1, first, "nominal") for first in (True, False))
    assert first - later > passes.read_us(3 * 5120 * 5120 * 2 / 32)


def test_simulated_times_are_remembered_by_the_digest_of_their_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = Shard("0.6B", 32, 1, 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    passes.cache_file.cache_clear()
    passes._times.cache_clear()
    try:
        layers = {end: passes.layers_us(shard, end) for end in CASES}
        assert layers["low"] < layers["nominal"] < layers["high"]
        file = passes.cache_file()
        stored = json.loads(file.read_text())
        assert len(stored) == len(passes._LINE)
        assert all(set(times) == set(CASES) for times in stored.values())
        # 28 layers, of which a launch takes 16
        us = [times["nominal"] for times in stored.values()]
        layer = (us[1] - us[0]) / (passes._LINE[1] - passes._LINE[0])
        assert layers["nominal"] == pytest.approx(28 * layer + 2 * (us[0] - passes._LINE[0] * layer))
        # a second run reads the file, whatever a simulation would say now; a damaged file is simulated again
        file.write_text(json.dumps({name: dict.fromkeys(CASES, 7.0) for name in stored}))
        passes._times.cache_clear()
        assert passes.layers_us(shard) == pytest.approx(2 * 7.0)
        file.write_text('{"a": 1}')
        passes._times.cache_clear()
        assert passes.layers_us(shard) == pytest.approx(layers["nominal"])
    finally:
        passes.cache_file.cache_clear()
        passes._times.cache_clear()


def test_known_records_name_their_source() -> None:
    assert {known.drafter for known in KNOWN if not known.assumed} == {"chain 1.7B", "EAGLE-3", "DFlash"}
    assert all(known.source and known.drafter in DRAFTERS for known in KNOWN)
    assert acceptance.MT_BENCH.tokens(3) == pytest.approx(2.80)
    one = next(known for known in KNOWN if known.only_k == 15)
    assert one.tokens(15) == pytest.approx(4.02)


def _file(folder: Path, text: Any) -> Path:
    file = folder / "trace.json"
    file.write_text(text if isinstance(text, str) else json.dumps(text), encoding="utf-8")
    return file


@pytest.mark.usefixtures("formulas")
def test_traces_are_of_their_drafter_or_of_the_named_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tables = [
        {"name": "chat", "draft": "chain", "unconditional": [0.8, 0.7]},
        {"name": "x", "draft": "", "unconditional": [0.1]},
    ]
    file = str(_file(tmp_path, {"tables": tables[:1]}))
    with pytest.raises(UserError, match="name the drafter of the traces by --trace-drafter"):
        command.main(["--traces", file])
    command.main(["--traces", file, "--trace-drafter", "chain 0.6B"])
    assert "| chat | trace.json | chain 0.6B | 32 | 4 | " in capsys.readouterr().out
    command.main(["--traces", str(_file(tmp_path, {"tables": tables[1:]})), "--out", str(tmp_path / "out.md")])
    assert (tmp_path / "out.md").read_text() == capsys.readouterr().out
    assert "| x | trace.json | n-gram | 32 | 4 | " in (tmp_path / "out.md").read_text()


@pytest.mark.parametrize(
    "text",
    [
        "", "[1]", {"tables": 1}, {"tables": [{"name": "x"}]},
        {"tables": [{"name": "x", "draft": "", "unconditional": ["a"]}]},
        {"tables": [{"name": "x", "draft": "", "unconditional": [0.5, 0.8]}]},
        {"tables": [{"name": "x", "draft": "", "unconditional": [float("nan")]}]},
    ],
)  # fmt: skip
def test_a_file_of_another_form_is_refused(tmp_path: Path, text: Any) -> None:
    with pytest.raises(UserError, match=r"trace.json is not .* as bench.tune.trace and bench.serving write it"):
        acceptance.read(_file(tmp_path, text))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--limit-ms", "nan"], "number of milliseconds above 0"),
        (["--limit-ms", "-1"], "number of milliseconds above 0"),
        (["--batch", "0"], "a number from 1 to 64"),
        (["--traces", "/dev/null"], "not a regular file"),
        (["--out", "/proc/x"], "cannot be written"),
    ],
)
def test_wrong_options_are_refused_at_the_start(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(arguments)
    assert said in capsys.readouterr().err


@pytest.mark.usefixtures("formulas")
def test_the_article_s_verdicts_follow_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    def verdict(claim: str) -> str:
        return next(verdict for said, _, verdict in article.claims() if said.startswith(claim))

    assert verdict("about 45 ms").startswith("not explained")
    assert verdict("no benefit").startswith("does not hold")
    assert verdict("k = 15") == "does not hold for every workload"
    # where a draft costs as much as the target nothing gains, and few drafts are best
    monkeypatch.setattr(choose, "step_us", lambda setup, k, end="nominal": 45_000.0 * (1 + k))
    assert verdict("about 45 ms") == "inside the band"
    assert (verdict("no benefit"), verdict("k = 15")) == ("holds", "holds")
    assert "| output identical | not modelled |" in article.page(dict.fromkeys(("source", "commit", "machine", "date")))


@pytest.mark.usefixtures("formulas")
def test_the_parts_and_the_bound_of_the_first_token() -> None:
    parts, bound = first_token.first_token(4096)
    assert min(parts.values()) > 0
    # 64 layers of 4.153 GFLOP for 128 rows at 2 x 78.6 TFLOP/s, and scores
    assert 32 * 64 * 4.153 / 157.2 < bound < 1.1 * 32 * 64 * 4.153 / 157.2
    with pytest.raises(UserError, match="there are no options"):
        first_token.main(["3072"])
