"""A build that is killed at any moment, or interrupted, leaves no bundle or a whole one, and goes on."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from compile.build import build
from compile.doctor import main as doctor
from model.bundle.manifest import MANIFEST, PREFILL, read_bundle
from model.serving.engine import Engine
from model.serving.ready import shape_of
from model.serving.request import Request
from model.serving.runtime import Graphs
from tests.compile.tiny import spec, write_pair

ROOT = Path(__file__).resolve().parents[2]
KILLS = 20
CHANGES = {"k": 1, "batch": 1, "max_len": 128}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    write_pair(folder)
    return folder


def _start(base: Path, out: str) -> multiprocessing.Process:
    # a fork server that has imported everything: what is killed is the build, not an import
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["compile.build"])
    process = context.Process(target=build, args=(spec(base, out, **CHANGES),))
    process.start()
    return process  # type: ignore[return-value]


def _usable(out: Path) -> bool:
    """Whether there is a manifest; if so the doctor must accept the bundle and its graphs must run."""
    if not (out / MANIFEST).exists():
        return False
    doctor([str(out)])
    bundle = read_bundle(out)
    assert Engine(Graphs(bundle), shape_of(bundle)).run([Request((1, 2, 3), max_new_tokens=4)])[0].ids
    return True


def test_a_build_killed_at_random_moments_is_no_bundle_or_a_whole_one(base: Path) -> None:
    begin = time.monotonic()
    whole = _start(base, "whole")
    whole.join()
    length = time.monotonic() - begin
    assert _usable(base / "whole")
    rng, killed, found, moments = random.Random(0), 0, 0, set()
    while killed < KILLS or (len(moments) < 3 and killed < 3 * KILLS):
        # a resumed build is shorter: moments are drawn from all lengths
        process = _start(base, "killed")
        process.join(rng.uniform(0, length) * rng.choice((0.2, 0.5, 1.0)))
        if process.is_alive():
            os.kill(process.pid or 0, signal.SIGKILL)
            process.join()
            killed += 1
            moments.add(frozenset(p.name for p in (base / "killed").rglob("*")))
        found += _usable(base / "killed")
        if not process.exitcode:
            # finished before its moment: begin anew
            (base / "killed").rename(base / f"finished{killed}-{found}")
    assert len(moments) >= 3, "the kills must have met the build at different places"
    build(spec(base, "killed", **CHANGES))
    assert _usable(base / "killed")
    names = sorted(read_bundle(base / "whole")["files"].items())
    assert sorted(read_bundle(base / "killed")["files"].items()) == names


def test_a_manifest_of_half_a_bundle_would_be_caught(base: Path) -> None:
    build(spec(base, "half", **CHANGES))
    bundle = read_bundle(base / "half")
    (bundle.path / bundle.graph(PREFILL, 128).file).unlink()
    with pytest.raises(SystemExit):
        _usable(base / "half")


@pytest.mark.parametrize("building", [False, True], ids=["importing", "building"])
def test_ctrl_c_is_a_sentence_or_silence_and_the_same_command_goes_on(base: Path, building: bool) -> None:
    target, draft, out = (str(base / name) for name in ("target", "draft", f"stopped{building}"))
    command = [sys.executable, "-m", "compile.build", "--target", target, "--draft", draft, "--tp", "1", "--k", "31",
               "--batch", "1", "--max-len", "512", "--inline", "--out", out]  # fmt: skip
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
        assert said.rstrip().splitlines()[-1].startswith("interrupted: nothing that was complete is lost")
