"""docs/examples/latency_comment.yml: its steps, run on two commits of a repository, render the comment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOW: dict[str, Any] = yaml.safe_load((ROOT / "docs/examples/latency_comment.yml").read_text(encoding="utf-8"))
STEPS = {step["name"]: step for step in WORKFLOW["jobs"]["latency"]["steps"] if "run" in step}
KERNEL = """
import nki, nki.isa as nisa, nki.language as nl

@nki.jit
def scale(a):
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    x = nl.load(a)
    for _ in range(TIMES):
        nisa.tensor_scalar(dst=x, data=x, op0=nl.multiply, operand0=2.0)
    nisa.dma_copy(dst=out, src=x)
    return out
"""


@pytest.fixture
def shell(tmp_path: Path) -> Any:
    """Runs a script in the repository, with nkisim on the path."""
    programs, repository = tmp_path / "programs", tmp_path / "repository"
    programs.mkdir()
    repository.mkdir()
    (programs / "nkisim").write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m nkisim "$@"\n')
    (programs / "nkisim").chmod(0o755)
    identity = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}

    def run(script: str, **environment: str) -> str:
        path = {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(tmp_path)}
        # as the runner does
        command = ["bash", "-e", "-o", "pipefail", "-c", script]
        done = subprocess.run(
            command, cwd=repository, env={**path, **identity, **environment}, capture_output=True, text=True, check=True
        )
        return done.stdout

    return run


def commit(shell: Any, repository: Path, times: int, launches: list[str]) -> str:
    (repository / "k.py").write_text(KERNEL.replace("TIMES", str(times)), encoding="utf-8")
    (repository / "kernels.txt").write_text("\n".join(["# launches", *launches, ""]), encoding="utf-8")
    return str(shell("git add -A && git commit -qm change && git rev-parse HEAD")).strip()


def test_the_steps_render_the_comment(shell: Any, tmp_path: Path) -> None:
    shell("git init -q")
    repository = tmp_path / "repository"
    kept, gone, new = (f"k.py:scale float32:128x{columns}" for columns in (512, 64, 32))
    base = commit(shell, repository, 1, [kept, gone])
    commit(shell, repository, 9, [kept, f"{kept} --lnc 2", new])
    shell(STEPS["base"]["run"], BASE=base)
    shell(STEPS["difference"]["run"])
    heading, _, *table, _, note = (repository / "comment.md").read_text(encoding="utf-8").splitlines()
    assert heading == "### Kernel latency: 4 of 4 changed"
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert cells[0] == ["kernel", "base", "head", "change"]
    rows = {name: rest for name, *rest in cells[2:]}
    assert set(rows) == {f"`{name}`" for name in (kept, gone, f"{kept} --lnc 2", new)}
    before, after, verdict = rows[f"`{kept}`"]
    assert float(after.removesuffix(" us")) > float(before.removesuffix(" us"))
    assert verdict.startswith("+")
    assert verdict.endswith("%, slower")
    assert [rows[f"`{name}`"][2] for name in (gone, new)] == ["gone", "new"]
    assert note.startswith("Simulated by nkisim 0.6.0 for trn2, not measured.")


def test_a_base_that_cannot_be_timed_stops_the_job(shell: Any, tmp_path: Path) -> None:
    shell("git init -q")
    base = commit(shell, tmp_path / "repository", 1, ["k.py:nothing float32:128x64"])
    with pytest.raises(subprocess.CalledProcessError) as stopped:
        shell(STEPS["base"]["run"], BASE=base)
    assert "k.py has no function 'nothing'" in stopped.value.stderr


def test_nothing_of_a_pull_request_is_pasted_into_a_script() -> None:
    """Branch names and numbers reach a shell as variables only."""
    assert all("${{" not in step["run"] for step in STEPS.values())
    assert WORKFLOW["permissions"] == {"contents": "read", "pull-requests": "write"}
