"""SIGKILL of builds at random moments: an old bundle stays until the new one is complete."""

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

# names that a build writes before it is killed, 0 for a random time; the longest wait for them
_MORE, _LONG_S = (0, 0, 1, 3), 60.0


def _build(spec: BuildSpec, traced: Path) -> None:
    """Build with the graphs of a bundle of the same spec: a build writes nothing while it traces."""
    compile.build.lower_graphs = lambda _, graphs: ((g, (traced / g.file).read_bytes()) for g in graphs)
    build(spec)


def _start(spec: BuildSpec, traced: Path) -> multiprocessing.Process:
    """Start a build in a process whose imports are done, so that a kill meets the build."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.hostile.kills"])
    process = context.Process(target=_build, args=(spec, traced))
    process.start()
    return process  # type: ignore[return-value]


def _timed(spec: BuildSpec, traced: Path) -> float:
    """Seconds of an undisturbed build."""
    # the first process waits for the imports of the fork server
    for out in (f"{spec.out}-first", spec.out):
        begin = time.monotonic()
        _start(replace(spec, out=out), traced).join()
    return time.monotonic() - begin


def _killed(process: multiprocessing.Process, after: float, out: Path, more: int) -> bool:
    """Kill a build after a time or, unless 0, once it has written `more` names; whether it was still running.

    A time reaches few different places of a build if another process slows it, or slowed the timed one.
    """
    end, names = time.monotonic() + (_LONG_S if more else after), len(_names(out)) + more
    while process.is_alive() and time.monotonic() < end and not (more and len(_names(out)) >= names):
        process.join(0.002)
    process.kill()
    process.join()
    return process.exitcode == -signal.SIGKILL


def _k(out: Path) -> int | str:
    """The k of the bundle in a folder, "" if it has no manifest, or its error."""
    if not (out / MANIFEST).exists():
        return ""
    try:
        bundle = open_bundle(out)
        return "; ".join(findings(bundle)) or bundle.spec.k
    except UserError as error:
        return str(error)


def _names(out: Path) -> frozenset[str]:
    """The names on disk: two kills that leave different names met the build at different places."""
    # a folder that the build renames meanwhile is skipped
    walks = (os.walk(place) for place in (out, out.with_name(f".{out.name}.building")))
    return frozenset(f"{at}/{name}" for walk in walks for at, folders, files in walk for name in (*folders, *files))


def _moments(tried: int, moments: set[frozenset[str]]) -> str:
    return "" if len(moments) >= min(3, tried) else f"{len(moments)} places were met by {tried} kills"


def kills(spec: BuildSpec, scratch: Path, seed: int, count: int, seconds: float = 1e9) -> Series:
    """New builds and builds of another k over a bundle: the folder has the old bundle, the new one, or none yet."""
    series, rng = Series("kills of builds survived"), random.Random(seed)
    out, begin, moments = scratch / "killed", time.monotonic(), set[frozenset[str]]()
    one, other = (replace(spec, out=str(out), k=str(k)) for k in (int(spec.k), int(spec.k) - 1))
    traced = {s.k: build(replace(s, out=str(scratch / f"traced{s.k}"))) for s in (one, other)}
    length = _timed(replace(one, out=str(scratch / "timed")), traced[one.k])
    while series.tried < count and time.monotonic() - begin < seconds:
        if rng.random() < 1 / 3:
            shutil.rmtree(out, ignore_errors=True)
        old = _k(out)
        new = other if old == int(one.k) else one
        # a build that continues a killed new one is shorter
        after = rng.uniform(0.02, 1.2) * length * (1.0 if old else rng.choice((0.2, 0.5, 1.0)))
        if _killed(_start(new, traced[new.k]), after, out, rng.choice(_MORE)):
            moments.add(_names(out))
            series.count(f"k {new.k} over k {old}", "" if (k := _k(out)) in (old, int(new.k)) else str(k))
    series.count("the kills", _moments(series.tried, moments))
    build(one)
    same = read_bundle(out).files == read_bundle(traced[one.k]).files and _k(out) == int(one.k)
    left = sorted(p.name for p in scratch.iterdir() if p.name.startswith("."))
    series.count("the last build", "" if same and not left else f"k {_k(out)}, left {left}, equal files: {same}")
    return series
