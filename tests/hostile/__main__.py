"""`python -m tests.hostile`: each hostile series with a new seed, bounded in time, and what fell short."""

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
from tests.hostile.damage import damage_files, forge
from tests.hostile.invocations import invocations
from tests.hostile.kills import beginnings, replacements
from tests.hostile.network import faults
from tests.hostile.series import Series
from trnspec.bundle.opening import read_bundle


def run(folder: Path, seed: int, seconds: float) -> Iterator[Series]:
    """The series; those of kills and faults end when their share of the time does."""
    write_pair(folder)
    pair = spec(folder, k=2, batch=1)
    bundle, alone = build(pair), build(spec(folder, "alone", k=0))
    for name in ("damage", "forge", "words", "over", "new", "s3"):
        (folder / name).mkdir()
    yield damage_files(bundle, folder / "damage", seed, 200)
    yield forge(bundle, folder / "forge", read_bundle)
    yield invocations(folder / "words", bundle, alone)
    yield faults(bundle, folder / "s3", seed, 60, seconds / 4)
    yield replacements(pair, folder / "over", seed, 60, seconds / 4)
    yield beginnings(pair, folder / "new", seed, 80, seconds / 4)


def main(arguments: list[str]) -> None:
    """Exit code 1 if anything fell short."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32), help="default: a new one")
    parser.add_argument("--seconds", type=float, default=540, help="bound of the whole (default: 540)")
    options = parser.parse_args(arguments)
    print(f"seed {options.seed}", flush=True)
    short, begin = 0, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for series in run(Path(folder), options.seed, options.seconds):
            short += len(series.short)
            print(f"{series}  ({time.monotonic() - begin:.0f} s)", flush=True)
    if short:
        raise SystemExit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
