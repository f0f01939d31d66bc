"""What the Makefile starts ends with it."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent


def _runs(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_a_server_ends_with_the_make_that_started_it(tmp_path: Path) -> None:
    """SIGTERM to make alone: a shell between the two would leave the server. A script stands for vLLM's command."""
    said = tmp_path / "pid"
    (tmp_path / "bin").mkdir()
    for name, text in (("python", ""), ("vllm", f"echo $$ > {said}.new; mv {said}.new {said}; exec sleep 60\n")):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / ".installed").touch()
    with subprocess.Popen(["make", "serve", f"SERVE={tmp_path}"], cwd=ROOT, start_new_session=True) as make:
        begin = time.monotonic()
        while not said.exists() and time.monotonic() < begin + 30:
            time.sleep(0.05)
        server = int(said.read_text())
        make.terminate()
        make.wait(30)
    try:
        end = time.monotonic() + 10
        while _runs(server) and time.monotonic() < end:
            time.sleep(0.05)
        assert not _runs(server)
    finally:
        if _runs(server):
            os.kill(server, 9)
