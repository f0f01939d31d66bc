"""A start that fails: one sentence last on stderr, status 2, and no traceback before it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tests.serve.server import OWN_SERVER, free_port, vllm_command

pytestmark = OWN_SERVER


def ended(bundle: Path | str, *options: str, **environment: str) -> str:
    """The last line of the stderr of a server that does not start."""
    command = [*vllm_command(str(bundle)), "--port", str(free_port()), *options]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, timeout=300, check=False)
    errors = done.stderr.decode()
    assert done.returncode == 2, errors
    assert "Traceback" not in errors + done.stdout.decode()
    return errors.splitlines()[-1]


def damaged_weights(bundle: Path, tmp_path: Path) -> tuple[str, str]:
    """Only the engine's process reads them."""
    copied = shutil.copytree(bundle, tmp_path / "bundle")
    shard = next((copied / "weights").iterdir())
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    return ended(copied), f"{copied} is damaged: weights/{shard.name} does not match the manifest; build"


def few_blocks(bundle: Path, tmp_path: Path) -> tuple[str, str]:
    return ended(bundle, "--num-gpu-blocks-override", "2"), "num-gpu-blocks-override is 2; this bundle takes 3 to 9"


def port(bundle: Path, tmp_path: Path) -> tuple[str, str]:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        return ended(bundle, "--port", str(taken.getsockname()[1])), "the port is in use; end the server"


Case = Callable[[Path, Path], tuple[str, str]]
CASES: list[Case] = [damaged_weights, few_blocks, port]


@pytest.mark.parametrize("case", CASES, ids=[case.__name__ for case in CASES])
def test_a_start_that_fails_says_why_in_its_last_line(bundle: Path, tmp_path: Path, case: Case) -> None:
    last, sentence = case(bundle, tmp_path)
    assert last.startswith(f"error: {sentence}")
