"""Where a number or a file comes from: the commit, the machine and the date."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

_CPUINFO = Path("/proc/cpuinfo")


def commit(digits: int = 7) -> str | None:
    """This checkout's commit, marked when it has changes; None outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        found = subprocess.run([*command, f"--abbrev={digits}"], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return found.stdout.strip() or None


def header(source: str) -> dict[str, Any]:
    """The beginning of every file of results; `source` is simulated or wall."""
    lines = _CPUINFO.read_text(encoding="utf-8").splitlines() if _CPUINFO.is_file() else []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    processor = named[0] if named else platform.processor() or "unknown processor"
    system = f"{platform.system()} {platform.machine()}"
    machine = f"{system}, {processor}, {os.cpu_count()} threads, Python {platform.python_version()}"
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {"source": source, "commit": commit(), "machine": machine, "date": date}
