"""Two servers of one bundle, as a router sees them: the same bytes from either, also when one of them is killed."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import Any

import pytest

from tests.serve.server import NO_VLLM, URL_VARIABLE, Server

pytestmark = [
    pytest.mark.skipif(bool(NO_VLLM), reason=NO_VLLM),
    pytest.mark.skipif(URL_VARIABLE in os.environ, reason=f"{URL_VARIABLE} names one server, and one is killed here"),
]


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


def test_an_answer_does_not_depend_on_the_server_nor_on_the_other_s_death(server: Server, again: Server) -> None:
    """A client that loses its server asks the other one and gets the text that it would have had."""
    expected = [_ids(server, seed) for seed in range(32)]
    assert [_ids(again, seed) for seed in range(4)] == expected[:4]
    assert again.process is not None

    def ask(seed: int) -> tuple[list[int], bool]:
        try:
            return _ids(again, seed), False
        except (OSError, ValueError, urllib.error.URLError):
            return _ids(server, seed), True

    with ThreadPoolExecutor(32) as pool:
        answers = [pool.submit(ask, seed) for seed in range(32)]
        # the others are in its slots and its queue
        wait(answers, return_when=FIRST_COMPLETED)
        os.killpg(again.process.pid, signal.SIGKILL)
        found = [answer.result() for answer in answers]
    assert [ids for ids, _ in found] == expected
    moved = sum(moved for _, moved in found)
    assert 8 < moved < len(found), "some were answered by the server that died, and many were in it"
