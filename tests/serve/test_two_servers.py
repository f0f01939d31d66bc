"""Two servers of one bundle, as a router sees them: the same bytes from either, also when one of them is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import pytest

from tests.serve.server import NO_CLIENTS, URL_VARIABLE, Server, command, free_port, sample, wait

pytestmark = [
    pytest.mark.skipif(bool(NO_CLIENTS), reason=NO_CLIENTS),
    pytest.mark.skipif(URL_VARIABLE in os.environ, reason=f"{URL_VARIABLE} names one server, and one is killed here"),
]


@pytest.fixture(scope="module")
def router(server: Server, again: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """vLLM's router in front of both, which get requests by turns, and the address of its metrics."""
    log, metrics, port = tmp_path_factory.mktemp("router") / "router.log", free_port(), free_port()
    run = [command("vllm-router"), "--port", str(port), "--prometheus-port", str(metrics)]
    run += ["--policy", "round_robin", "--worker-urls", server.url, again.url]
    with log.open("wb") as out, subprocess.Popen(run, stdout=out, stderr=out) as process:
        routing = Server(f"http://127.0.0.1:{port}", process, log)
        wait(routing)
        yield routing, Server(f"http://127.0.0.1:{metrics}")
        process.terminate()


def _ids(server: Server, seed: int) -> list[int]:
    body: dict[str, Any] = {
        "prompt": [5 + seed, 17, 12], "max_tokens": 200, "temperature": 0.8, "seed": seed, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        found: list[int] = json.load(response)["choices"][0]["token_ids"]
        return found


def test_an_answer_does_not_depend_on_the_server_nor_on_the_other_s_death(
    server: Server, again: Server, router: tuple[Server, Server]
) -> None:
    """Half of the requests come from clients that ask the other server when theirs is lost, half through a router that
    does so by itself: all get the text that they would have had."""
    expected = [_ids(server, seed) for seed in range(32)]
    assert [_ids(again, seed) for seed in range(4)] == expected[:4]
    assert again.process is not None
    routing, metrics = router

    def ask(seed: int) -> tuple[list[int], bool]:
        try:
            return _ids(again, seed), False
        except (OSError, ValueError, urllib.error.URLError):
            return _ids(server, seed), True

    with ThreadPoolExecutor(32) as pool:
        moving = [pool.submit(ask, seed) for seed in range(16)]
        routed = [pool.submit(_ids, routing, seed) for seed in range(16, 32)]
        # the others are in its slots and its queue
        next(as_completed(moving))
        os.killpg(again.process.pid, signal.SIGKILL)
        found = [answer.result() for answer in moving]
        assert [ids for ids, _ in found] + [answer.result() for answer in routed] == expected
    moved = sum(moved for _, moved in found)
    assert 4 < moved < len(found), "some were answered by the server that died, and many were in it"
    assert sample(metrics, "vllm_router_retries_total") > 0, "the router lost none"
