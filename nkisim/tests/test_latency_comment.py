"""docs/latency_comment.yml: what a pull request can reach."""

from __future__ import annotations

from pathlib import Path

import yaml


def test_nothing_of_a_pull_request_is_pasted_into_a_script() -> None:
    """Branch names and numbers reach a shell as variables only."""
    path = Path(__file__).resolve().parents[1] / "docs/latency_comment.yml"
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    scripts = [step["run"] for step in workflow["jobs"]["latency"]["steps"] if "run" in step]
    assert scripts
    assert all("${{" not in script for script in scripts)
    assert workflow["permissions"] == {"contents": "read", "pull-requests": "write"}
