"""How a server ends: by a mistake, by Ctrl-C while graphs compile, and by one after that, which answers everyone."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.compile.tiny import flip
from tests.serve.server import OWN_SERVER, Server, free_port, starting, vllm_command, wait

pytestmark = OWN_SERVER
# compiling takes ten times as long
_AT_ONCE_S, _START_S, _DRAIN_S = 5, 300, 3


@pytest.fixture
def starting_server(bundle: Path, tmp_path: Path) -> Iterator[Server]:
    with starting(bundle, tmp_path, "--shutdown-timeout", str(_DRAIN_S), "--served-model-name", "m") as server:
        yield server


def test_a_start_that_fails_gives_the_reason_in_its_last_line(bundle: Path, tmp_path: Path) -> None:
    """Status 2 and no traceback before it, although only the engine's process reads the weights."""
    copied = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    shard = next((copied / "weights").iterdir())
    flip(shard)
    command = [*vllm_command(str(copied)), "--port", str(free_port())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    sentence = f"error: {copied} is corrupt: weights/{shard.name} does not match the manifest; build"
    assert done.stderr.splitlines()[-1].startswith(sentence)


def test_a_server_that_starts_ends_at_once(starting_server: Server) -> None:
    # comes with vLLM
    import psutil

    process, file = starting_server.process, starting_server.log
    assert process is not None
    assert file is not None
    end = time.monotonic() + _START_S
    while "compiling" not in (log := file.read_text()) and time.monotonic() < end:
        assert process.poll() is None, log[-2000:]
        time.sleep(0.1)
    processes = psutil.Process(process.pid).children(recursive=True)
    assert processes
    begin = time.monotonic()
    # as a terminal sends it
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(120) == 128 + signal.SIGINT
    assert time.monotonic() - begin < _AT_ONCE_S
    _, alive = psutil.wait_procs(processes, _AT_ONCE_S)
    assert not alive
    log = file.read_text()
    assert "SIGINT came before the server was ready" in log
    assert "Traceback" not in log


@pytest.mark.parametrize(("number", "times"), [(signal.SIGINT, 1), (signal.SIGTERM, 1), (signal.SIGINT, 2)])
def test_more_work_than_a_drain_has_time_for_is_answered_with_an_error(
    starting_server: Server, number: signal.Signals, times: int
) -> None:
    """A terminal sends Ctrl-C to every process, a supervisor SIGTERM to the first; a second signal ends all at once."""
    wait(starting_server)
    process = starting_server.process
    assert process is not None

    def complete(seed: int) -> int:
        body = {"model": "m", "prompt": "a", "max_tokens": 250, "temperature": 1.5, "n": 4, "ignore_eos": True}
        try:
            return starting_server.post("/v1/completions", body | {"seed": seed})[0]
        except OSError:
            return 0

    with ThreadPoolExecutor(40) as pool:
        answers = [pool.submit(complete, seed) for seed in range(40)]
        time.sleep(2)
        begin = time.monotonic()
        for _ in range(times):
            (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
            time.sleep(0.5)
        assert process.wait(30) == (0 if times == 1 else 128 + number)
        assert time.monotonic() - begin < (_DRAIN_S if times == 1 else 1) + _AT_ONCE_S
        statuses = {answer.result(_AT_ONCE_S) for answer in answers}
    # 0, where the connection ends with the process, is no answer
    assert {503 if times == 1 else 0} <= statuses <= {200, 503 if times == 1 else 0}
