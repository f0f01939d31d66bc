"""Processes that the Makefile starts, and what it installs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import time
from pathlib import Path

import tomllib

from tests.ended import check_end, runs

ROOT = Path(__file__).parent.parent


def test_a_server_ends_with_the_make_that_started_it(tmp_path: Path) -> None:
    """SIGTERM to make only: a shell in between would leave the server running. A script replaces vLLM's command."""
    pid = tmp_path / "pid"
    (tmp_path / "bin").mkdir()
    for name, text in (("python", ""), ("vllm", f"echo $$ > {pid}.new; mv {pid}.new {pid}; exec sleep 60\n")):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / ".installed").touch()
    with subprocess.Popen(["make", "serve", f"SERVE={tmp_path}"], cwd=ROOT) as make:
        limit = time.monotonic() + 30
        while not pid.exists():
            assert time.monotonic() < limit
            time.sleep(0.05)
        make.terminate()
    server = int(pid.read_text())
    try:
        check_end(server, 10)
    finally:
        if runs(server):
            os.kill(server, 9)


def test_the_device_s_serving_environment_has_the_extras_of_the_package() -> None:
    """nrtpy comes from the vendor's index only, and nki, which excludes it, not at all."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    command = ["make", "-n", "--no-print-directory", "device-serve-environment", "DEVICE_SERVE=none"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [shlex.split(line)[3:] for line in lines[1:-1]] == [
        ["-e", "./nkisim", "-e", ".[serve]"],
        ["install", "-q", "--index-url", "https://pip.repos.neuron.amazonaws.com", *extras["nrtpy"]],
    ]


def test_the_project_requires_the_version_of_nkisim_in_the_tree() -> None:
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    package = (ROOT / "nkisim/src/nkisim/__init__.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "(.*)"$', package, re.M)
    assert f"nkisim=={version}" in requirements
