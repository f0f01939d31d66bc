"""The README's commands: each says how long it takes, and what they write is nothing that git would take."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_COMMAND = re.compile(r"    (?:make|\.venv/bin/python -m) .*")
_DURATION = re.compile(r"#.*\b(?:seconds?|minutes?)\b")
_WRITTEN = re.compile(r"--(?:out|recording) (\S+)")


def _commands() -> list[str]:
    """A command with its continued lines is one line."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("\\\n", "")
    return [line for line in text.splitlines() if _COMMAND.fullmatch(line)]


def test_every_command_states_its_duration() -> None:
    assert len(_commands()) > 15
    assert [line for line in _commands() if not _DURATION.search(line)] == []


def test_what_commands_write_is_ignored() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    commands = "\n".join(line for p in pages for line in p.read_text(encoding="utf-8").splitlines() if " -m " in line)
    written = {name for name in _WRITTEN.findall(commands) if re.fullmatch(r"[a-z][\w./-]*", name)}
    assert {"run.json", "run.html"} <= written
    # results that are committed are written on purpose; what has no ending is a folder
    own = sorted(n if "." in n else f"{n}/" for n in written if not n.startswith("bench/results/"))
    command = ["git", "check-ignore", "--no-index", *own]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.stdout.split() == own
