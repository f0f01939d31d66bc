"""kill -9 of builds: over a good bundle, which must stay until the new one is complete, and of new ones."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import compile.build
from compile.build import build
from compile.doctor import findings
from compile.spec import BuildSpec
from model.errors import UserError
from tests.hostile.series import Series
from trnspec.bundle.manifest import MANIFEST
from trnspec.bundle.opening import open_bundle, read_bundle

# the names that a build writes until it is killed, 0 for a moment of the clock; the longest wait for them
_MORE, _LONG_S = (0, 0, 1, 3), 60.0


def _build(spec: BuildSpec, traced: Path) -> None:
    """Build with the graphs of a bundle of the same: while it traces, a build writes nothing."""
    compile.build.lower_graphs = lambda _, graphs: ((g, (traced / g.file).read_bytes()) for g in graphs)
    build(spec)


def _start(spec: BuildSpec, traced: Path) -> multiprocessing.Process:
    """A build in a process of its own; what is killed is the build, not an import."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.hostile.kills"])
    process = context.Process(target=_build, args=(spec, traced))
    process.start()
    return process  # type: ignore[return-value]


def _timed(spec: BuildSpec, traced: Path) -> float:
    """Seconds of a build that nobody kills."""
    # the first process of all waits for the imports of the fork server
    for out in (f"{spec.out}-first", spec.out):
        begin = time.monotonic()
        _start(replace(spec, out=out), traced).join()
    return time.monotonic() - begin


def _killed(process: multiprocessing.Process, after: float, out: Path, more: int) -> bool:
    """Kill a build after so many seconds or, unless 0, once it has written so many `more` names; whether it was met
    before its end.

    Seconds alone meet few places where another process slows the build, or slowed the one that was timed.
    """
    end, names = time.monotonic() + (_LONG_S if more else after), len(_names(out)) + more
    while process.is_alive() and time.monotonic() < end and not (more and len(_names(out)) >= names):
        process.join(0.002)
    process.kill()
    process.join()
    return process.exitcode == -signal.SIGKILL


def _k(out: Path) -> int | str:
    """The k of the bundle in a folder, or what is wrong with it."""
    try:
        bundle = open_bundle(out)
        return "; ".join(findings(bundle)) or bundle.spec.k
    except UserError as error:
        return str(error)


def _names(out: Path) -> frozenset[str]:
    """What is there: two kills that left different names met the build at different places."""
    # a folder that the build renames meanwhile is passed over
    walks = (os.walk(place) for place in (out, out.with_name(f".{out.name}.building")))
    return frozenset(f"{at}/{name}" for walk in walks for at, folders, files in walk for name in (*folders, *files))


def _moments(tried: int, moments: set[frozenset[str]]) -> str:
    return "" if len(moments) >= min(3, tried) else f"{len(moments)} places were met by {tried} kills"


def replacements(spec: BuildSpec, scratch: Path, seed: int, count: int, seconds: float = 1e9) -> Series:
    """Builds of another k over a good bundle, killed at random moments: what is there is the old one or the new."""
    series, rng = Series("kills of a build over a good bundle survived"), random.Random(seed)
    out, begin, moments = scratch / "served", time.monotonic(), set[frozenset[str]]()
    one, other = (replace(spec, out=str(out), k=str(k)) for k in (int(spec.k), int(spec.k) - 1))
    traced = {s.k: build(replace(s, out=str(scratch / f"traced{s.k}"))) for s in (one, other)}
    length = _timed(replace(other, out=str(scratch / "timed")), traced[other.k])
    build(one)
    while series.tried < count and time.monotonic() - begin < seconds:
        old = _k(out)
        new = other if old == int(one.k) else one
        if _killed(_start(new, traced[new.k]), rng.uniform(0.02, 1.0) * length, out, rng.choice(_MORE)):
            moments.add(_names(out))
            series.count(f"k {new.k} over k {old}", "" if (there := _k(out)) in (old, int(new.k)) else str(there))
    series.count("the kills", _moments(series.tried, moments))
    build(one)
    left = sorted(p.name for p in scratch.iterdir() if p.name.startswith("."))
    series.count("the last build", "" if _k(out) == int(one.k) and not left else f"k {_k(out)}, left {left}")
    return series


def beginnings(spec: BuildSpec, scratch: Path, seed: int, count: int, seconds: float = 1e9) -> Series:
    """New builds, killed and started again: no half bundle is accepted, and the end has the digests of a whole one."""
    series, rng = Series("kills of a new build survived"), random.Random(seed)
    out, traced = scratch / "killed", build(replace(spec, out=str(scratch / "undisturbed")))
    begin, moments = time.monotonic(), set[frozenset[str]]()
    length = _timed(replace(spec, out=str(scratch / "timed")), traced)
    while series.tried < count and time.monotonic() - begin < seconds:
        process = _start(replace(spec, out=str(out)), traced)
        # a build that goes on is shorter: moments are drawn from all lengths
        after = rng.uniform(0.02, 0.9) * length * rng.choice((0.2, 0.5, 1.0))
        if _killed(process, after, out, rng.choice(_MORE)):
            moments.add(_names(out))
            half = (out / MANIFEST).exists() and _k(out) != int(spec.k)
            series.count("a new build", "a half bundle is there" if half else "")
        if (out / MANIFEST).exists():
            shutil.rmtree(out)
    series.count("the kills", _moments(series.tried, moments))
    build(replace(spec, out=str(out)))
    same = read_bundle(out).files == read_bundle(traced).files and _k(out) == int(spec.k)
    series.count("the last build", "" if same else "other digests than an undisturbed build's")
    return series
