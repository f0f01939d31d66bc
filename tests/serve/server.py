"""A server of a demo bundle on loopback for the tests and the soak, or one that the environment names."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

# a server that runs already, such as one on a Trainium machine
URL_VARIABLE = "TRNSPEC_TEST_URL"
NO_VLLM = "vLLM is not installed here; make serve-test runs this"
# marks of tests with a server, and of those that start one of their own
OVER_HTTP = [pytest.mark.slow, pytest.mark.skipif(not find_spec("vllm"), reason=NO_VLLM)]
OWN_SERVER = [*OVER_HTTP, pytest.mark.skipif(URL_VARIABLE in os.environ, reason=f"{URL_VARIABLE} names one")]
_START_S = 900


@dataclass(frozen=True)
class Server:
    """Where a server answers; the process and the file of its output, if it is ours."""

    url: str
    process: subprocess.Popen[bytes] | None = None
    log: Path | None = None

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=10) as response:
            return response.read().decode()

    def status(self, path: str) -> int:
        try:
            self.get(path)
        except urllib.error.HTTPError as error:
            return error.code
        return 200

    def post(self, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        """The status and the JSON of an answer."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, content, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def stop(self, within_s: float = 120) -> int:
        """Ask it to end as an orchestrator does, and wait; its exit status."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(within_s)


def sample(server: Server, metric: str) -> float:
    """The sum of a metric over its labels."""
    lines = [li for li in server.get("/metrics").splitlines() if li.split("{")[0].split(" ")[0] == metric]
    assert lines, f"{metric} is not shown"
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def model_name(server: Server) -> str:
    """The served model's name, which is the only one."""
    (model,) = json.loads(server.get("/v1/models"))["data"]
    return str(model["id"])


def vllm_command(bundle: str) -> list[str]:
    """This environment's `vllm serve` of a folder, on loopback."""
    return [str(Path(sys.executable).with_name("vllm")), "serve", bundle, "--host", "127.0.0.1"]


@contextmanager
def served(bundle: Path | str, folder: Path, *options: str) -> Iterator[Server]:
    """`vllm serve` of a bundle on a free port of loopback, until the block ends."""
    if known := os.environ.get(URL_VARIABLE):
        yield Server(known)
        return
    with starting(bundle, folder, *options) as server:
        wait(server)
        yield server


@contextmanager
def starting(bundle: Path | str, folder: Path, *options: str) -> Iterator[Server]:
    """The same before it is ready."""
    log, port = folder / "server.log", free_port()
    command = [*vllm_command(str(bundle)), "--port", str(port)]
    # ninja and the compiler's wrappers of this environment, whatever the shell's is
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with log.open("wb") as out:
        # a process group of its own, as a terminal's command has
        process = subprocess.Popen(
            [*command, *options], env=environment, stdout=out, stderr=out, start_new_session=True
        )
    server = Server(f"http://127.0.0.1:{port}", process, log)
    try:
        yield server
    finally:
        if process.poll() is None:
            server.stop()


def wait(server: Server) -> None:
    """Return once it answers; AssertionError if it ends before, or takes too long."""
    assert server.process is not None
    assert server.log is not None
    end = time.monotonic() + _START_S
    while time.monotonic() < end and server.process.poll() is None:
        try:
            server.get("/health")
            return
        except OSError:
            time.sleep(1)
    raise AssertionError(f"the server did not start: {server.log.read_text()[-2000:]}")


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
