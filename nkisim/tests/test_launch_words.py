"""Everything that prints a simulated time says that no launch is in it, and JSON has the likely band and the order."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from nkisim.__main__ import main
from nkisim.cli.launches import function
from nkisim.inputs import read
from nkisim.launch import run
from nkisim.policy import Policy
from nkisim.pytest_plugin import too_slow
from nkisim.timeline.schedule import schedule

KERNEL = str(Path(__file__).parents[1] / "examples/matmul.py") + ":matmul"
WORDS = [KERNEL, "bfloat16:128x128", "bfloat16:128x512", "--no-numerics"]
LAUNCH = [word for word in WORDS if word != "--no-numerics"]


@pytest.fixture
def output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What a command prints, or the file that it writes."""

    def call(*words: str, out: str = "") -> str:
        assert main([*words, *(["--out", str(tmp_path / out)] if out else [])]) == 0
        printed = capsys.readouterr().out
        return (tmp_path / out).read_text(encoding="utf-8") if out else printed

    return call


def test_commands_say_that_no_launch_is_in_a_time(output: Callable[..., str], tmp_path: Path) -> None:
    assert "us simulated on trn2 (in the kernel's order), without a launch: likely" in output("time", *WORDS)
    base = tmp_path / "base.json"
    base.write_text(output("time", *WORDS, "--json"), encoding="utf-8")
    compare = ("report", *LAUNCH, "--against", str(base))
    assert output(*compare).endswith("\nsimulated on trn2, without a launch\n")
    assert "for trn2, not measured, without a launch." in output(*compare, "--format", "markdown")
    assert "simulated latency, without a launch" in output("report", *LAUNCH, out="page.html")
    assert "simulated, no launch" in output("report", *LAUNCH, out="page.svg")


def test_json_has_the_same_and_the_launch_the_likely_band_and_the_order(output: Callable[..., str]) -> None:
    times = json.loads(output("time", *WORDS, "--json"))
    assert times["launch"] == "not included"
    (row,) = times["times"]
    assert row["likely_low_ns"] < row["latency_ns"] < row["likely_high_ns"]
    assert row["order"] in ("program", "reordered")
    assert min(row[f"{launch}_ns"] for launch in ("launch", "profiled_launch", "host_dispatch")) > 0
    arrays = tuple(read(word)[1].array() for word in LAUNCH[1:])
    events = run(function(KERNEL), arrays, policy=Policy(recording=True)).recording.events
    assert "without a launch" in too_slow("matmul", schedule(events), 0.001)
