"""A bundle is whole or not there: reuse, damage, crashes at every write."""

import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compile.build import build
from compile.doctor import main as doctor
from model.errors import UserError
from tests.compile.tiny import spec
from trnspec.bundle.manifest import MANIFEST
from trnspec.bundle.opening import damage, read_bundle


@pytest.fixture(scope="module")
def base(base: Path) -> Path:
    """A folder with the pair and its bundle."""
    build(spec(base))
    return base


def _times(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}


def test_a_second_build_changes_no_file(base: Path) -> None:
    before = _times(base / "bundle")
    build(spec(base))
    assert _times(base / "bundle") == before


def test_a_lost_file_is_made_again_alone(base: Path) -> None:
    bundle = base / "bundle"
    before = _times(bundle)
    lost = "hlo/step_k3_bk128.hlo.pb"
    (bundle / lost).unlink()
    build(spec(base))
    changed = {n for n, t in _times(bundle).items() if before[n] != t and not n.startswith(".build")}
    assert changed == {lost, MANIFEST}
    assert damage(read_bundle(bundle)) == []


def test_doctor_names_each_file_with_a_flipped_bit(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = base / "bundle"
    doctor([str(bundle)])
    for name in read_bundle(bundle).files:
        content = (bundle / name).read_bytes()
        (bundle / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(SystemExit):
            doctor([str(bundle)])
        assert f"CANNOT GENERATE: {name} " in capsys.readouterr().out
        (bundle / name).write_bytes(content)
    doctor([str(bundle)])


def test_a_bundle_of_another_version_is_refused(base: Path) -> None:
    file = base / "bundle" / MANIFEST
    content = file.read_text(encoding="utf-8")
    file.write_text(content.replace('"format_version": 3', '"format_version": 4'), encoding="utf-8")
    with pytest.raises(UserError, match="format 4, this version reads 3; build it again"):
        read_bundle(base / "bundle")
    file.write_text(content, encoding="utf-8")
    read_bundle(base / "bundle")


def test_a_plan_only_bundle_cannot_generate(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(base / "target", base / "bare/target", ignore=shutil.ignore_patterns("*.safetensors"))
    build(spec(base / "bare", "../plan_only", k=0))
    with pytest.raises(SystemExit):
        doctor([str(base / "plan_only")])
    assert "CANNOT GENERATE: the bundle has no weights" in capsys.readouterr().out


class Killed(BaseException):
    """Nothing is written after it."""


def _killed(limit: int, work: Callable[[], object]) -> bool:
    """Whether the work was ended at this fsync, rename or removal; if it has so many."""
    calls = itertools.count(1)

    def crashing(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            if next(calls) >= limit:
                raise Killed
            return real(*args, **named)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((os, "fsync"), (Path, "replace"), (Path, "rename"), (Path, "unlink")):
            patch.setattr(owner, name, crashing(getattr(owner, name)))
        try:
            work()
        except Killed:
            return True
    return False


@pytest.mark.parametrize("over", [False, True], ids=["new", "over a bundle"])
def test_a_build_killed_at_any_write_is_no_bundle_or_a_whole_one(
    base: Path, monkeypatch: pytest.MonkeyPatch, over: bool
) -> None:
    """At each of them in turn; kill -9: test_killed.py."""
    sizes, out = {"k": 0}, base / "killed"
    # what is in the graphs is not looked at
    monkeypatch.setattr("compile.build.lower_graphs", lambda _, graphs: (b"a graph" for _ in graphs))
    whole, old = (build(spec(base, dtype, dtype=dtype, **sizes)) for dtype in ("fp32", "bf16"))
    expected, served, limit = read_bundle(whole).files, 0, 1
    while True:
        shutil.rmtree(out, ignore_errors=True)
        if over:
            shutil.copytree(old, out)
        if not _killed(limit, lambda: build(spec(base, "killed", **sizes))):
            break
        if (out / MANIFEST).exists():
            served += 1
            assert damage(read_bundle(out)) == []
        build(spec(base, "killed", **sizes))
        assert read_bundle(out).files == expected
        assert not list(base.glob(".killed*"))
        limit += 1
    assert limit > 20
    assert served == (limit - 1 if over else 0)
