"""SIGTERM or Ctrl-C while the graphs are compiled: every process of the server ends at once, without a traceback."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.serve.server import NO_VLLM, URL_VARIABLE, starting

pytestmark = [
    pytest.mark.skipif(bool(NO_VLLM), reason=NO_VLLM),
    pytest.mark.skipif(URL_VARIABLE in os.environ, reason=f"{URL_VARIABLE} names a server that others use"),
]
# a warm-up takes ten times as long
_AT_ONCE_S, _START_S = 5, 300


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_starts_ends_at_once(bundle: Path, tmp_path: Path, number: signal.Signals) -> None:
    # vendor seam: comes with vLLM
    import psutil  # noqa: PLC0415

    with starting(bundle, tmp_path) as server:
        assert server.process is not None
        assert server.log is not None
        end = time.monotonic() + _START_S
        while "compiling" not in (log := server.log.read_text()) and time.monotonic() < end:
            assert server.process.poll() is None, log[-2000:]
            time.sleep(0.1)
        processes = psutil.Process(server.process.pid).children(recursive=True)
        assert processes
        begin = time.monotonic()
        # as an orchestrator sends the one, and a terminal the other
        (os.killpg if number == signal.SIGINT else os.kill)(server.process.pid, number)
        assert server.process.wait(120) == 128 + number
        assert time.monotonic() - begin < _AT_ONCE_S
        _, alive = psutil.wait_procs(processes, _AT_ONCE_S)
        assert not alive
    log = server.log.read_text()
    assert f"{number.name} came before the server was ready" in log
    assert "Traceback" not in log
