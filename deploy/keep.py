"""`python -m deploy.keep FOLDER ADDRESS -- COMMAND...`: run a command, then store the folder it wrote.

What was written is stored whatever the command's exit code, which is passed on: a run that found a
difference is the one whose rows are wanted.
"""

from __future__ import annotations

import argparse
import datetime
import signal
import subprocess
import sys
from pathlib import Path

from compile.bundle.open_remote import open_remote
from model.errors import UserError, run_cli


def keep(folder: Path, address: str) -> list[str]:
    """Store every file below a folder; returns their keys."""
    remote, keys = open_remote(address), []
    for file in sorted(p for p in folder.rglob("*") if p.is_file()):
        keys.append(file.relative_to(folder).as_posix())
        remote.put(file, keys[-1], lambda _: None)
    return keys


def run(command: list[str]) -> int:
    """Run a command to its end; a request to stop reaches it too."""
    with subprocess.Popen(command) as process:
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        return process.wait()


def main(arguments: list[str]) -> None:
    """The last line of stdout is the address of what was kept."""
    parser = argparse.ArgumentParser(prog="python -m deploy.keep", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("address", help="s3://bucket/folder or a folder")
    parser.add_argument("command", nargs="*", help="after --")
    options = parser.parse_args(arguments)
    code = run(options.command) if options.command else 0
    stamp = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    kept = keep(options.folder, f"{options.address}/{stamp}")
    if not kept:
        raise UserError(f"{options.folder} holds no file to keep (the command ended with {code}); read its messages")
    print(f"{options.address}/{stamp}")
    if code:
        raise SystemExit(code if code > 0 else 128 - code)


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
