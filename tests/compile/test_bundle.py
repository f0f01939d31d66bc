"""A bundle is whole or not there: reuse, damage, crashes at every write."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from compile.build import build
from compile.doctor import main as doctor
from model.bundle.manifest import MANIFEST
from model.bundle.opening import damage, read_bundle
from model.errors import UserError
from tests.compile.tiny import spec, write_pair

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the pair and its bundle."""
    folder = tmp_path_factory.mktemp("pair")
    write_pair(folder)
    build(spec(folder))
    return folder


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


def test_doctor_refuses_a_changed_manifest(base: Path) -> None:
    file = base / "bundle" / MANIFEST
    content = file.read_text(encoding="utf-8")
    for changed in (
        content.replace('"batch": 2', '"batch": 4', 1),
        content[: len(content) // 2],
        '{"format": 1}',
        "[]",
    ):
        file.write_text(changed, encoding="utf-8")
        with pytest.raises((SystemExit, UserError)):
            doctor([str(base / "bundle")])
    file.write_text(content, encoding="utf-8")
    doctor([str(base / "bundle")])


def test_a_bundle_of_another_version_is_refused(base: Path) -> None:
    file = base / "bundle" / MANIFEST
    content = file.read_text(encoding="utf-8")
    file.write_text(content.replace('"format_version": 3', '"format_version": 4'), encoding="utf-8")
    with pytest.raises(UserError, match="format 4, this version reads 3; build it again"):
        read_bundle(base / "bundle")
    file.write_text(content, encoding="utf-8")
    read_bundle(base / "bundle")


def test_a_plan_only_bundle_cannot_generate(base: Path) -> None:
    for name in ("target", "draft"):
        shutil.copytree(base / name, base / "bare" / name, ignore=shutil.ignore_patterns("*.safetensors"))
    build(spec(base / "bare", "../plan_only"))
    with pytest.raises(SystemExit):
        doctor([str(base / "plan_only")])


CRASH = """
import os, sys, pathlib
from compile.build import build
from compile.spec import parse
calls, limit = 0, int(sys.argv[1])
def crashing(real):
    def call(*args, **kwargs):
        global calls
        calls += 1
        if calls == limit:
            os._exit(137)
        return real(*args, **kwargs)
    return call
os.fsync = crashing(os.fsync)
pathlib.Path.replace = crashing(pathlib.Path.replace)
pathlib.Path.unlink = crashing(pathlib.Path.unlink)
os.sync_done = build(parse(sys.argv[2:]))
"""


def _arguments(base: Path, out: str) -> list[str]:
    target, draft = str(base / "target"), str(base / "draft")
    return ["--target", target, "--draft", draft, "--tp", "1",
            "--k", "1", "--batch", "1", "--max-len", "128", "--dtype", "fp32", "--out", str(base / out)]  # fmt: skip


@pytest.mark.parametrize("limit", [1, 3, 8, 17, 20, 21])
def test_a_build_killed_at_any_write_is_no_bundle_or_a_whole_one(base: Path, limit: int) -> None:
    out = base / f"killed{limit}"
    subprocess.run(
        [sys.executable, "-c", CRASH, str(limit), *_arguments(base, out.name)], cwd=ROOT, check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True,
    )  # fmt: skip
    if (out / MANIFEST).exists():
        doctor([str(out)])
    build(spec(base, out.name, k=1, batch=1))
    doctor([str(out)])
