"""`python -m deploy.bundle push|fetch FROM TO`: copy a bundle if it has the shape that its server needs.

The compile Job pushes; a server's init container fetches, with TRNSPEC_PUBLIC_KEY set if the bundle must be signed.
Both refuse the same bundles, so that none takes a name in the store that no server will load.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

from compile.serve_command import MODEL, check_loadable
from compile.store import pull, push
from model.drafters.registry import DRAFTERS
from model.errors import UserError, run_cli
from trnspec.bundle.opening import Bundle, read_bundle


class Expected(NamedTuple):
    """The shape that a server's flags need; a server without speculation has k 0 and the drafter none."""

    tp: int
    batch: int
    max_len: int
    k: int
    lnc: int
    drafter: str


def check_shape(bundle: Bundle, expected: Expected) -> None:
    """Raise UserError unless a bundle's manifest has the expected shape, a model.pt and weights."""
    for name in ("tp", "batch", "max_len", "k", "drafter"):
        value = getattr(bundle.spec, name)
        if value != getattr(expected, name):
            raise UserError(
                f"{bundle.path} was built for {name} {value} and the server needs {getattr(expected, name)}; "
                "render again from the values that it was built with, or build it again"
            )
    if MODEL not in bundle.files:
        raise UserError(f"{bundle.path} was built without the Neuron SDK and has no {MODEL}; build it where the SDK is")
    if not bundle.manifest.has_weights:
        raise UserError(f"{bundle.path} has no weights; build it from checkpoint folders that hold them")


def check_engine(bundle: Bundle, expected: Expected) -> None:
    """Raise UserError unless the vendor's engine can load a local bundle; the drafters that only our plugin loads
    are not checked here."""
    if expected.drafter in ("none", "chain") and (lnc := check_loadable(bundle, "v0")) != expected.lnc:
        raise UserError(f"{bundle.path} was built for lnc {lnc} and the server needs {expected.lnc}; build it again")


def push_checked(folder: Path, address: str, expected: Expected) -> None:
    """Push a bundle; UserError before anything is sent if its server would refuse it."""
    bundle = read_bundle(folder)
    check_shape(bundle, expected)
    check_engine(bundle, expected)
    push(folder, address)


def fetch(stored: Path, folder: Path, expected: Expected) -> None:
    """Copy a stored bundle; the manifest is checked before a byte is copied, every digest before it is complete."""
    check_shape(read_bundle(stored), expected)
    pull(str(stored), folder)
    check_engine(read_bundle(folder), expected)


def main(arguments: list[str]) -> None:
    """The last line of stdout is the copy's address."""
    parser = argparse.ArgumentParser(prog="python -m deploy.bundle", description=__doc__)
    parser.add_argument("action", choices=("push", "fetch"))
    parser.add_argument("source", type=Path, metavar="FROM", help="folder of the bundle")
    parser.add_argument("target", metavar="TO", help="push: s3://bucket/folder or a folder; fetch: a local folder")
    for name in ("tp", "batch", "max-len", "k", "lnc"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--drafter", choices=DRAFTERS, required=True)
    options = parser.parse_args(arguments)
    expected = Expected(*(getattr(options, name) for name in Expected._fields))
    if options.action == "push":
        push_checked(options.source, options.target, expected)
    else:
        fetch(options.source, Path(options.target), expected)
    print(options.target)


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
