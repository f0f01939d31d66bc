"""`python -m tests.hostile`: runs each series with a new seed and prints its failures."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from compile.build import build
from tests.compile.tiny import spec, write_pair
from tests.hostile.corruption import corrupt_files, forge
from tests.hostile.invocations import invocations
from tests.hostile.kills import kills
from tests.hostile.series import Series
from trnspec.bundle.opening import read_bundle


def run(folder: Path, seed: int, seconds: float) -> Iterator[Series]:
    """The series; that of kills takes the rest of the time."""
    write_pair(folder)
    pair = spec(folder, k=2, batch=1)
    bundle, target = build(pair), build(spec(folder, "target-only", k=0))
    for name in ("corrupt", "forge", "words", "kills"):
        (folder / name).mkdir()
    yield corrupt_files(bundle, folder / "corrupt", seed, 200)
    yield forge(bundle, folder / "forge", read_bundle)
    yield invocations(folder / "words", bundle, target)
    yield kills(pair, folder / "kills", seed, 140, seconds / 2)


def main(arguments: list[str]) -> None:
    """Exit code 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32), help="default: random")
    parser.add_argument("--seconds", type=float, default=540, help="twice the time of the kills (default: 540)")
    options = parser.parse_args(arguments)
    print(f"seed {options.seed}", flush=True)
    failures, begin = 0, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for series in run(Path(folder), options.seed, options.seconds):
            failures += len(series.failures)
            print(f"{series}  ({time.monotonic() - begin:.0f} s)", flush=True)
    if failures:
        raise SystemExit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
