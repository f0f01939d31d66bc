"""A build that is killed at any moment, or interrupted, leaves no bundle or a whole one, and goes on."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.compile.tiny import spec
from tests.hostile import kills
from tests.hostile.kills import beginnings, replacements
from trnspec.bundle.manifest import MANIFEST
from trnspec.bundle.opening import read_bundle
from trnspec.engine.config import engine_config
from trnspec.engine.engine import Engine
from trnspec.engine.request import Request
from trnspec.runtime.xla import XlaRunner

ROOT = Path(__file__).resolve().parents[2]
CHANGES = {"k": 1, "batch": 1, "max_len": 128}


def test_a_new_build_killed_at_random_moments_is_no_bundle_or_a_whole_one(base: Path, tmp_path: Path) -> None:
    series = beginnings(spec(base, **CHANGES), tmp_path, seed=0, count=20)
    assert series.held == series.tried == 22, str(series)
    bundle = read_bundle(tmp_path / "killed")
    assert Engine(XlaRunner(bundle), engine_config(bundle)).run([Request((1, 2, 3), max_new_tokens=4)])[0].ids


def test_a_build_over_a_good_bundle_killed_at_random_moments_leaves_one_whole(base: Path, tmp_path: Path) -> None:
    series = replacements(spec(base, **CHANGES | {"k": 2}), tmp_path, seed=0, count=12)
    assert series.held == series.tried == 14, str(series)


def test_a_half_bundle_would_be_caught(base: Path, tmp_path: Path) -> None:
    bundle = read_bundle(kills.build(spec(base, "half", **CHANGES)))
    assert kills._k(bundle.path) == 1
    (bundle.path / bundle.graphs[0].file).unlink()
    assert "is missing" in str(kills._k(bundle.path))


@pytest.mark.parametrize("building", [False, True], ids=["importing", "building"])
def test_ctrl_c_is_a_sentence_or_silence_and_the_same_command_goes_on(base: Path, building: bool) -> None:
    target, draft, out = (str(base / name) for name in ("target", "draft", f"stopped{building}"))
    command = [sys.executable, "-m", "compile.build", "--target", target, "--draft", draft, "--tp", "1", "--k", "31",
               "--batch", "1", "--max-len", "512", "--out", out]  # fmt: skip
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    time.sleep(0.3)
    deadline = time.monotonic() + 120
    # a build makes its folder when it has imported everything and checked its flags
    while building and not Path(out).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert "Traceback" not in said
    assert process.returncode in (130, -signal.SIGINT)
    assert not (Path(out) / MANIFEST).exists()
    if building:
        assert said.rstrip().splitlines()[-1].startswith("interrupted: finished work is kept")
