"""A server of s3://, from an S3 server of this machine and with speculation off: the ids are those of a folder."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from socket import socket
from typing import Any

import pytest

from compile.store import push
from tests.model.demo_bundle import PROMPTS
from tests.serve.server import NO_VLLM, URL_VARIABLE, Server, free_port, sample, served, vllm_command
from trnspec.engine.request import Params
from trnspec.llm import LLM

pytestmark = [
    pytest.mark.skipif(bool(NO_VLLM), reason=NO_VLLM),
    pytest.mark.skipif(URL_VARIABLE in os.environ, reason=f"{URL_VARIABLE} names a server that others use"),
]
ADDRESS = "s3://bucket/team/demo"
KEY, BODY = "a-key", 200 << 20


@pytest.fixture(scope="module")
def store(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder behind an S3 server on loopback that holds the bundle; the environment names it and a new cache."""
    root, port = tmp_path_factory.mktemp("store"), free_port()
    (root / "bucket").mkdir()
    program = [Path(sys.executable).with_name("rclone"), "serve", "s3", "--auth-key", "key,secret"]
    command = [*program, "--addr", f"127.0.0.1:{port}", root]
    environment = os.environ | {"RCLONE_CONFIG": str(root / "none.conf")}
    with pytest.MonkeyPatch.context() as patch, subprocess.Popen(command, env=environment) as process:
        for name, value in {
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{port}",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")),
        }.items():
            patch.setenv(name, value)
        try:
            _wait(port)
            push(bundle, ADDRESS)
            yield root
        finally:
            process.terminate()


def _wait(port: int) -> None:
    for _ in range(100):
        with closing(socket()) as probe:
            if not probe.connect_ex(("127.0.0.1", port)):
                return
        time.sleep(0.1)
    raise AssertionError("the S3 server did not start")


def test_a_damaged_object_starts_no_server(store: Path) -> None:
    object_ = max(store.glob("bucket/team/objects/*"), key=lambda file: file.stat().st_size)
    whole = object_.read_bytes()
    object_.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    try:
        done = subprocess.run([*vllm_command(ADDRESS), "--port", "1"], capture_output=True, timeout=300, check=False)
    finally:
        object_.write_bytes(whole)
    assert done.returncode == 2
    assert b"did not arrive as it was built (its sha256 differs)" in done.stderr


def test_an_address_is_served_and_without_speculation_the_ids_are_the_same(
    store: Path, llm: LLM, tmp_path: Path
) -> None:
    # vendor seam: comes with vLLM
    import openai  # noqa: PLC0415

    options = ["--additional-config", '{"speculation": false}', "--api-key", KEY, "--max-num-seqs", "1"]
    with served(ADDRESS, tmp_path, *options) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=120)
        assert [model.id for model in client.models.list().data] == [ADDRESS]
        for prompt, params in [(PROMPTS[0], Params()), (PROMPTS[1], Params(0.9, 50, 0.95, 0.02, 11))]:
            online = client.completions.create(model=ADDRESS, prompt=prompt, max_tokens=40, **_asked(params))
            offline = llm.generate(prompt, params, max_new_tokens=40)
            assert online.choices[0].token_ids == list(offline.ids)
        assert sample(server, "trnspec_drafted_total") == 0
        assert sample(server, "trnspec_steps_total") == sample(server, "trnspec_tokens_total") == 78
        _keyless_body_is_not_read(server)
        _one_at_a_time(server, client)
    assert "none: the target alone" in (tmp_path / "server.log").read_text()


def _keyless_body_is_not_read(server: Server) -> None:
    """Who has no key cannot fill the server's memory."""
    # vendor seam: comes with vLLM
    import psutil  # noqa: PLC0415

    assert server.process is not None
    process = psutil.Process(server.process.pid)
    before = process.memory_info().rss
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {BODY}\r\n\r\n"
    )
    with closing(socket()) as client:
        client.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
        client.sendall(head.encode())
        # the answer comes before the body
        assert client.recv(12) == b"HTTP/1.1 401"
        with suppress(OSError):
            for _ in range(BODY // (1 << 20)):
                client.sendall(b"a" * (1 << 20))
    assert process.memory_info().rss - before < BODY / 4


def _one_at_a_time(server: Server, client: Any) -> None:
    """--max-num-seqs below the bundle's slots."""
    steps, sequences = (sample(server, f"trnspec_{name}_total") for name in ("steps", "sequence_steps"))
    asked = {"max_tokens": 40, "temperature": 0, "extra_body": {"ignore_eos": True}}
    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(client.completions.create, model=ADDRESS, prompt=p, **asked) for p in PROMPTS[:3]]
    assert [a.result().usage.completion_tokens for a in answers] == [40] * 3
    assert sample(server, "trnspec_steps_total") - steps == sample(server, "trnspec_sequence_steps_total") - sequences


def _asked(params: Params) -> dict[str, Any]:
    extra = {"top_k": params.top_k, "min_p": params.min_p, "return_token_ids": True}
    sampled = {"temperature": params.temperature, "top_p": params.top_p, "seed": params.seed}
    return sampled | {"extra_body": extra}
