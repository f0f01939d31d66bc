"""kill -9 of builds: over a good bundle, which must stay whole until the new one is, and of new ones."""

from __future__ import annotations

import multiprocessing
import random
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

from compile.build import build
from compile.spec import BuildSpec
from model.bundle.manifest import MANIFEST, read_bundle
from model.bundle.opening import open_bundle
from model.errors import UserError
from tests.hostile.series import Series


def _start(spec: BuildSpec) -> multiprocessing.Process:
    # a fork server that has imported everything: what is killed is the build, not an import
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["compile.build"])
    process = context.Process(target=build, args=(spec,))
    process.start()
    return process  # type: ignore[return-value]


def _killed(process: multiprocessing.Process) -> bool:
    """Kill a build; whether it was met before its end."""
    process.kill()
    process.join()
    return process.exitcode == -signal.SIGKILL


def _k(out: Path) -> int | str:
    try:
        return int(open_bundle(out)["k"])
    except UserError as error:
        return str(error)


def replacements(spec: BuildSpec, scratch: Path, seed: int, count: int, seconds: float = 1e9) -> Series:
    """Builds of another k over a good bundle, killed at random moments: what is served is the old one or the new."""
    series, rng = Series("kills of a build over a good bundle survived"), random.Random(seed)
    out = scratch / "served"
    one = replace(spec, out=str(out))
    other = replace(one, k=spec.k - 1)
    build(one)
    begin = time.monotonic()
    process = _start(replace(other, out=str(scratch / "timed")))
    process.join()
    length = time.monotonic() - begin
    while series.tried < count and time.monotonic() - begin < seconds:
        old = _k(out)
        new = other if old == one.k else one
        process = _start(new)
        process.join(rng.uniform(0.02, 1.0) * length)
        if _killed(process):
            there = _k(out)
            series.count(f"k {new.k} over k {old}", "" if there in (old, new.k) else str(there))
    build(one)
    left = sorted(p.name for p in scratch.iterdir() if p.name.startswith("."))
    series.count("the last build", "" if _k(out) == one.k and not left else f"k {_k(out)}, left {left}")
    return series


def beginnings(spec: BuildSpec, scratch: Path, seed: int, count: int, seconds: float = 1e9) -> Series:
    """New builds, killed and started again: no half bundle is accepted, and the end is the whole one's digests."""
    series, rng = Series("kills of a new build survived"), random.Random(seed)
    whole = replace(spec, out=str(scratch / "whole"))
    begin = time.monotonic()
    build(whole)
    length, out = time.monotonic() - begin, scratch / "killed"
    digests = {n: e["sha256"] for n, e in read_bundle(Path(whole.out))["files"].items()}
    while series.tried < count and time.monotonic() - begin < seconds:
        process = _start(replace(spec, out=str(out)))
        process.join(rng.uniform(0.02, 0.9) * length)
        if _killed(process):
            half = (out / MANIFEST).exists() and _k(out) != spec.k
            series.count("a new build", "a half bundle is there" if half else "")
        if (out / MANIFEST).exists():
            shutil.rmtree(out)
    build(replace(spec, out=str(out)))
    same = {n: e["sha256"] for n, e in read_bundle(out)["files"].items()} == digests
    series.count("the last build", "" if same else "other digests than an undisturbed build's")
    return series
