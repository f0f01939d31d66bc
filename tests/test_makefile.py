"""What the Makefile starts ends with it."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from tests.ended import check_end, runs

ROOT = Path(__file__).parent.parent


def test_a_server_ends_with_the_make_that_started_it(tmp_path: Path) -> None:
    """SIGTERM to make alone: a shell between the two would leave the server. A script stands for vLLM's command."""
    said = tmp_path / "pid"
    (tmp_path / "bin").mkdir()
    for name, text in (("python", ""), ("vllm", f"echo $$ > {said}.new; mv {said}.new {said}; exec sleep 60\n")):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / ".installed").touch()
    with subprocess.Popen(["make", "serve", f"SERVE={tmp_path}"], cwd=ROOT) as make:
        limit = time.monotonic() + 30
        while not said.exists():
            assert time.monotonic() < limit
            time.sleep(0.05)
        make.terminate()
    server = int(said.read_text())
    try:
        check_end(server, 10)
    finally:
        if runs(server):
            os.kill(server, 9)
