"""`python -m deploy.fetch STORED OUT`: a server's bundle onto local disk, or a sentence why not.

It runs before the server. The manifest is read first, so a missing or wrong bundle ends the pod's
start within a second; then every file is copied and its digest checked.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from compile.store import pull
from deploy.expected import Expected, add_arguments, check_config, check_manifest, expected_of
from model.bundle.manifest import read_bundle
from model.errors import run_cli


def fetch(stored: Path, out: Path, expected: Expected) -> Path:
    """Copy a stored bundle that is what was asked for; UserError otherwise."""
    check_manifest(read_bundle(stored).manifest, expected, str(stored))
    pull(str(stored), out)
    check_config(out, expected)
    return out


def main(arguments: list[str]) -> None:
    """The last line of stdout is the local folder."""
    parser = argparse.ArgumentParser(prog="python -m deploy.fetch", description=__doc__)
    parser.add_argument("stored", type=Path, help="the bundle on the mounted bucket")
    parser.add_argument("out", type=Path, help="local folder")
    add_arguments(parser)
    options = parser.parse_args(arguments)
    print(fetch(options.stored, options.out, expected_of(options)))


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
