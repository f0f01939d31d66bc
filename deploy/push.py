"""`python -m deploy.push BUNDLE ADDRESS`: store a bundle that its server will take, or a sentence why not.

The server's fetch makes the same comparison; made here too, nothing that it would refuse takes the name for good.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from compile.store import push
from deploy.expected import Expected, add_arguments, check_config, check_manifest, expected_of
from model.bundle.manifest import read_bundle
from model.errors import run_cli


def push_servable(bundle: Path, address: str, expected: Expected) -> None:
    """Push a bundle that is what was asked for; UserError otherwise, before anything is sent."""
    check_manifest(read_bundle(bundle).manifest, expected, str(bundle))
    check_config(bundle, expected)
    push(bundle, address)


def main(arguments: list[str]) -> None:
    """The last line of stdout is the address."""
    parser = argparse.ArgumentParser(prog="python -m deploy.push", description=__doc__)
    parser.add_argument("bundle", type=Path, help="local folder")
    parser.add_argument("address", help="s3://bucket/folder or a folder")
    add_arguments(parser)
    options = parser.parse_args(arguments)
    push_servable(options.bundle, options.address, expected_of(options))
    print(options.address)


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
