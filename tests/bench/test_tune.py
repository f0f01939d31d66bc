"""`python -m bench.tune`: the best k by brute force, times of passes, the cache of times, traces, the article."""

from __future__ import annotations

import json
import random
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from xml.etree import ElementTree

import pytest

from bench import demo
from bench.demo import Prompt
from bench.kernels.layer import Shard
from bench.tune import __main__ as command
from bench.tune import acceptance, article, choose, drafters, passes, trace
from bench.tune.acceptance import KNOWN, Acceptance, at_rate
from bench.tune.drafters import DRAFTERS, Setup
from model.errors import UserError
from nkisim.timeline.chip import CASES
from nkisim.timeline.trn2 import TRN2
from trnspec.llm import Output


@pytest.fixture
def formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Formulas in place of the simulator: times grow with rows and batch and fall with ranks."""
    scales = {"low": 0.5, "nominal": 1.0, "high": 2.0}

    def us(shard: Shard, end: str = "nominal", lnc: int = 2, count: int = 0) -> float:
        size = {"32B": 1000.0, "1.7B": 300.0, "0.6B": 130.0}.get(shard.model, 50.0)
        return scales[end] * (size * 16 / shard.tp / lnc + 5 * shard.rows) / (64 / count if count else 1)

    monkeypatch.setattr(passes, "layers_us", us)
    monkeypatch.setattr(passes, "kernel_us", lambda case, end="nominal": 2.0 * scales[end])


@pytest.mark.usefixtures("formulas")
@pytest.mark.parametrize("seed", range(6))
def test_the_choice_is_that_of_brute_force(seed: int) -> None:
    """Brute force replays every step of a trace for every setup and k and adds up time and tokens."""
    rng = random.Random(seed)
    rates = [rng.uniform(0.2, 0.98) for _ in range(15)]
    steps = [next((i for i, rate in enumerate(rates) if rng.random() > rate), 15) for _ in range(300)]
    known = Acceptance("w", "", tuple(sum(a > i for a in steps) / 300 for i in range(15)), "test")
    setups = [Setup(*made) for made in product(("chain 1.7B", "chain 0.6B"), (8, 32), (1, 4))]
    replayed = {
        (s, k): 300 * drafters.step_us(s, k) / sum(min(a, k) + 1 for a in steps) / 1e3
        for s, k in product(setups, range(16))
    }
    best, k = min(replayed, key=lambda key: replayed[key])
    fastest, cheapest = choose.choices([choose.row(s, known) for s in setups], 1e6)
    assert (fastest["drafter"], fastest["tp"], fastest["batch"], fastest["k"]) == (best.drafter, best.tp, best.batch, k)
    assert fastest["ms"] == pytest.approx(replayed[best, k])
    highest = max(s.batch * 1e3 / ms / s.chips for (s, _), ms in replayed.items())
    assert cheapest["tokens_per_second_per_chip"] == pytest.approx(highest)


def test_tokens_and_the_best_k_are_leviathan_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Published optima by acceptance rate, where a draft pass takes c target passes."""
    expected = {0.6: (6, 4, 3, 2), 0.7: (8, 6, 4, 3), 0.8: (11, 8, 6, 4), 0.9: (15, 13, 10, 7)}
    for rate, ks in expected.items():
        for c, k in zip((0.02, 0.05, 0.1, 0.2), ks, strict=True):
            monkeypatch.setattr(choose, "step_us", lambda setup, k, end="nominal", c=c: 1 + c * k)
            assert choose.best_k(Setup("n-gram", 32, 1), at_rate(rate)) == k
            # beyond the last position the record's rate continues
            known = at_rate(rate), Acceptance("w", "", at_rate(rate).shares[:3], "")
            assert [one.tokens(k) for one in known] == pytest.approx([(1 - rate ** (k + 1)) / (1 - rate)] * 2)


@pytest.mark.usefixtures("formulas")
def test_a_step_is_a_launch_drafter_passes_and_a_target_pass() -> None:
    launch = (TRN2.host_dispatch_ns.value + TRN2.launch_ns.value) / 1e3
    for setup in map(Setup, DRAFTERS):
        assert drafters.step_us(setup, 0) == pytest.approx(launch + drafters.pass_us(setup, "32B", 1))
        drafts = drafters.step_us(setup, 7) - launch - drafters.pass_us(setup, "32B", 8)
        assert (drafts > 1) == (setup.drafter not in ("n-gram", "none"))
        ends = [drafters.step_us(setup, 7, end) for end in CASES]
        assert ends == sorted(ends)
    shard = Shard("32B", 32, 4, 5)
    embedding = passes.collective_us(32, shard.rows * shard.config.hidden_size * 2)
    between = embedding + passes.layers_us(shard) + passes.head_us(shard)
    assert drafters.pass_us(Setup("n-gram"), "32B", 5) == pytest.approx(between, rel=0.02)
    assert [Setup("chain 1.7B", 32, batch).max_k for batch in (1, 16, 64)] == [15, 7, 1]
    # fc only in the first pass of EAGLE-3
    first, later = (drafters._eagle3_us(Setup("EAGLE-3"), 1, first, "nominal") for first in (True, False))
    assert first - later > passes.read_us(3 * 5120 * 5120 * 2 / 32)


def test_simulated_times_are_cached_and_a_corrupt_file_is_simulated_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard, file, times = Shard("0.6B", 32, 1, 1), tmp_path / "times", cache(passes._times.__wrapped__)
    monkeypatch.setattr(passes, "cache_file", lambda: file)
    monkeypatch.setattr(passes, "_times", times)
    layers = {end: passes.layers_us(shard, end) for end in CASES}
    assert layers["low"] < layers["nominal"] < layers["high"]
    # 28 layers, 16 per launch
    sevens = {name: [7.0, 0.0] for name in json.loads(file.read_text())}
    for text, expected in ((json.dumps(sevens), 2 * 7.0), ('{"a": 1}', layers["nominal"])):
        file.write_text(text)
        times.cache_clear()
        assert passes.layers_us(shard) == pytest.approx(expected)


def _file(folder: Path, tables: Any) -> str:
    (folder / "trace.json").write_text(tables if isinstance(tables, str) else json.dumps({"tables": tables}))
    return str(folder / "trace.json")


@pytest.mark.usefixtures("formulas")
def test_traces_are_for_their_drafter_or_the_named_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--traces", _file(tmp_path, [{"name": "chat", "draft": "chain", "unconditional": [0.8, 0.7]}])]
    with pytest.raises(UserError, match="name the drafter of the traces by --trace-drafter"):
        command.main(flags)
    assert {known.drafter for known in KNOWN if not known.assumed} == {"chain 1.7B", "EAGLE-3", "DFlash"}
    command.main([*flags, "--trace-drafter", "chain 0.6B", "--batch", "4", "--out", str(tmp_path / "out.md")])
    printed = capsys.readouterr().out
    assert "| chat | trace.json | chain 0.6B | 32 | 2 | 4 | " in printed
    assert (tmp_path / "out.md").read_text() == printed


@pytest.mark.usefixtures("formulas")
def test_the_picture_has_a_curve_for_each_drafter_and_the_article_s_setup(tmp_path: Path) -> None:
    file, price = tmp_path / "tune.svg", 2.5
    command.main(["--picture", str(file), "--price", str(price), "--tp", "4", "8", "32"])
    parts = list(ElementTree.parse(file).iter())
    texts = [part.text or "" for part in parts]
    drafters_of = [t.split(" (")[0] for t in texts if t.split(" (")[0] in DRAFTERS]
    assert drafters_of == ["none", "chain 1.7B", "chain 0.6B", "EAGLE-3", "DFlash"]
    assert sum(part.tag.endswith("polyline") for part in parts) == 5
    assert [t for t in texts if t.startswith("the article")] == ["the article: chain 1.7B, tp 32, batch 4, k 7"]
    assert "MT-Bench" in texts
    # lines fall: a curve has no setup that costs more and is slower
    for part in parts:
        if part.tag.endswith("polyline"):
            points = [tuple(map(float, point.split(","))) for point in part.attrib["points"].split()]
            assert points == sorted(points)
            assert len({y for _, y in points}) == len(points)
    row = choose.row(Setup("EAGLE-3", 4, 8), KNOWN[0], 4, price=price)
    assert row["cost"] == pytest.approx(price * 1e6 * row["ms"] / 8 / 3.6e6)


def test_a_setup_has_room_or_is_left_out() -> None:
    """A core has half of the HBM of two; the target fits a chip of eight ranks only without a draft."""
    fits = {(lnc, tp): Setup("chain 1.7B", tp, 16, lnc).fits for lnc in (1, 2) for tp in (4, 8, 16, 32)}
    assert [key for key, fit in fits.items() if not fit] == [(1, 4), (1, 8)]
    assert [Setup(drafter, 8, 4, 1).fits for drafter in ("none", "EAGLE-3")] == [True, False]


@pytest.mark.usefixtures("formulas")
def test_times_between_simulated_sizes_are_on_lines() -> None:
    at = {batch: drafters.pass_us(Setup("none", 4, batch), "32B", 8) for batch in (4, 8, 16)}
    assert at[8] == pytest.approx(at[4] + (at[16] - at[4]) / 3)
    # 8 sequences of 16 rows are simulated: of 16 sequences the kernels take 8 rows
    seen = set[tuple[int, int]]()
    drafters._at(Setup("none", 4, 8), 16, lambda batch, rows: float(bool(seen.add((batch, rows)))))
    assert seen == {(8, 16)}


@pytest.mark.parametrize("tables", ["", "[1]", 1, [{"name": "x"}], ["a"], [0.5, 0.8], [float("nan")]])
def test_a_file_of_another_form_is_refused(tmp_path: Path, tables: Any) -> None:
    if isinstance(tables, list) and not isinstance(tables[0], dict):
        tables = [{"name": "x", "draft": "", "unconditional": tables}]
    with pytest.raises(UserError, match=r"trace.json is not .* as bench.tune.trace and bench.serving write it"):
        acceptance.read(Path(_file(tmp_path, tables)))


WRONG = """--limit-ms nan, --limit-ms -1, --price 0, --weights int4, --lnc 3, --batch 0, --batch 65, --tp 5,
--tp nan, --k 16, --drafter x, --traces /dev/null, --out /proc/x, --picture /proc/x"""


@pytest.mark.parametrize("words", WRONG.replace("\n", " ").split(", "))
def test_wrong_options_are_refused_at_the_start(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(words.split())
    assert f"argument {words.split(maxsplit=1)[0]}: " in capsys.readouterr().err


@pytest.mark.usefixtures("formulas")
def test_k_that_no_setup_can_run() -> None:
    with pytest.raises(UserError, match=r"no drafter has a known acceptance and kernels for k \[15\] here; lower --k"):
        command.main(["--k", "15", "--batch", "64"])


@pytest.mark.usefixtures("formulas")
def test_verdicts_on_the_article(monkeypatch: pytest.MonkeyPatch) -> None:
    def verdict(claim: str) -> str:
        return next(verdict for text, _, verdict in article.compare() if text.startswith(claim))

    assert verdict("about 45 ms").startswith("not explained")
    assert verdict("no benefit").startswith("does not hold")
    # if a draft costs as much as the target, speculation gains nothing and few drafts are best
    monkeypatch.setattr(choose, "step_us", lambda setup, k, end="nominal": 45_000.0 * (1 + k))
    assert [verdict(c) for c in ("about 45 ms", "no benefit", "k = 15")] == ["inside the band", "holds", "holds"]


PROMPTS = [Prompt("a", "structured", "x"), Prompt("b", "structured", "y"), Prompt("c", "open", "z")]
# accepted drafts by position and steps of each prompt
ACCEPTED = {"x": ((2, 1), 2), "y": ((1,), 2), "z": ((0, 0), 3)}


def _generate(texts: list[str], params: list[Any], max_new_tokens: int) -> list[Output]:
    assert [p.seed for p in params] == list(range(len(texts)))
    return [Output([1] * max_new_tokens, steps=ACCEPTED[t][1], accepted=[*ACCEPTED[t][0]]) for t in texts]


def test_shares_are_of_all_steps_and_the_tuner_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = mock.MagicMock()
    monkeypatch.setattr(trace, "LLM", llm)
    monkeypatch.setattr(demo, "prompts", lambda: PROMPTS)
    opened = llm.return_value.__enter__.return_value
    opened.bundle.spec, opened.generate = SimpleNamespace(k=2, drafter="chain"), _generate
    flags = ["--bundle", "pair", "--out", str(tmp_path / "a.json")]
    trace.main(flags)
    read = {known.workload: known.shares for known in acceptance.read(tmp_path / "a.json")}
    of_each = {"structured": (0.75, 0.25), "open": (0.0, 0.0)}
    assert read == {f"{entropy}, T {t}": of_each[entropy] for t in ("0", "0.6", "1") for entropy in of_each}
    opened.bundle.spec.k = 0
    with pytest.raises(UserError, match="give the bundle of a pair"):
        trace.main(flags)


def test_prompts_of_a_file(tmp_path: Path) -> None:
    (file := tmp_path / "mine.txt").write_text("one\n\ntwo\n")
    assert [(p.entropy, p.text) for p in demo.prompts_of(file)] == [("mine", "one"), ("mine", "two")]
    file.write_bytes(b"\n")
    with pytest.raises(UserError, match="holds no prompt"):
        demo.prompts_of(file)
