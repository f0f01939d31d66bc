"""A server of the demo pair on loopback, its client, and the same requests served offline."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from model.serving.engine import Engine
from model.serving.request import Params, Request
from tests.model.demo_bundle import graphs, shape_of

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make serve-test")
openai = pytest.importorskip("openai", reason="comes with vLLM: make serve-test")

LENGTH, BATCH, K = 256, 4, 7


@dataclass
class Server:
    """A running `vllm serve`; its log is a file."""

    process: subprocess.Popen[bytes]
    address: str
    model: str
    log: Path

    @property
    def client(self) -> Any:
        return openai.OpenAI(base_url=f"{self.address}/v1", api_key="none", max_retries=0, timeout=300)

    def metrics(self, name: str) -> float:
        """The sum of a metric's samples."""
        with urllib.request.urlopen(f"{self.address}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


def start(bundle: Path, log: Path) -> Server:
    """Start a server of a bundle and wait until it is ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    vllm = Path(sys.executable).parent / "vllm"
    # Ninja and the compiler's wrappers of this environment, whatever the shell's is
    environment = os.environ | {"PATH": f"{vllm.parent}:{os.environ['PATH']}"}
    command = [str(vllm), "serve", str(bundle), "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(command, env=environment, stdout=log.open("w"), stderr=subprocess.STDOUT)
    server = Server(process, f"http://127.0.0.1:{port}", str(bundle), log)
    for _ in range(600):
        if process.poll() is not None:
            pytest.fail(f"the server ended while it started:\n{log.read_text()[-3000:]}")
        try:
            urllib.request.urlopen(f"{server.address}/health", timeout=5).close()
            return server
        except (urllib.error.URLError, TimeoutError):
            time.sleep(1)
    process.kill()
    pytest.fail("the server did not become ready")


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bundles")


@pytest.fixture(scope="session")
def server(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    bundle = graphs(base, k=K, batch=BATCH, max_len=LENGTH).bundle.path
    running = start(bundle, tmp_path_factory.mktemp("log") / "server.log")
    yield running
    running.process.terminate()
    assert running.process.wait(timeout=120) == 0


@pytest.fixture(scope="session")
def offline(base: Path) -> Callable[..., list[int]]:
    """The ids that our engine gives without a server, the target alone; the same parameters as over HTTP."""
    g = graphs(base, k=K, batch=BATCH, max_len=LENGTH)
    engine = Engine(g, shape_of(g.bundle), speculative=False)

    def serve(ids: list[int], count: int, stops: tuple[int, ...] = (0,), **params: Any) -> list[int]:
        return engine.run([Request(tuple(ids), Params(**params), count, stops)])[0].ids

    return serve
