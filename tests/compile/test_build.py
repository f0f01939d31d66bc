"""A bundle is complete or not there: what a build reuses, where it writes, and what a kill at any write leaves."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

import compile.build
from compile.build import BuildResult, build_and_count
from compile.build import main as build_command
from compile.bundle import cutting, staging
from compile.bundle.staging import BUILD
from compile.graph import trace
from compile.recipes import CUT_BY, ROOT, TRACED_BY, sources
from model.errors import UserError
from model.graph_key import GraphKey, Stage
from model.graph_spec import GraphSpec
from model.nki.fused_layer import PACKED_ATTENTION, PACKED_MLP
from model.weights import Packing, shard_file
from tests.compile.tiny import flip, refused, shard_of, spec
from tests.hostile.kills import kills
from trnspec.bundle import manifest
from trnspec.bundle.checkpoint import Checkpoint
from trnspec.bundle.manifest import MANIFEST
from trnspec.bundle.opening import corrupt_files, open_bundle, read_bundle
from trnspec.bundle.plan import make_plan

SMALL: dict[str, Any] = {"k": 0, "batch": 1}
SHARD = shard_file(0)


@pytest.fixture(autouse=True)
def _untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in the graphs is not looked at."""

    def named(_: object, graphs: list[GraphSpec]) -> Iterator[tuple[GraphSpec, bytes]]:
        return ((graph, graph.file.encode()) for graph in graphs)

    monkeypatch.setattr(compile.build, "lower_graphs", named)


def _built(fresh: Path, out: str = "bundle", **changes: Any) -> BuildResult:
    return build_and_count(spec(fresh, out, **SMALL | changes))


def _there(folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of every file."""
    files = [p for p in folder.rglob("*") if p.is_file()]
    return {str(p.relative_to(folder)): (p.stat().st_ino, p.stat().st_mtime_ns) for p in files}


def _changed(folder: Path, before: dict[str, tuple[int, int]]) -> set[str]:
    return {name for name, actual in _there(folder).items() if before.get(name) != actual}


def test_a_second_build_makes_only_what_is_lost(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forced = list[int]()
    monkeypatch.setattr(os, "fsync", lambda fd: forced.append(os.fstat(fd).st_ino))
    first = _built(fresh, tp=2, k=2)
    before = _there(first.path)
    assert sorted(forced) == sorted(inode for name, (inode, _) in before.items() if name != f"{BUILD}/records")
    again = _built(fresh, tp=2, k=2)
    assert (first.reused, again.made, again.reused) == (0, 0, first.made)
    made_anew = {MANIFEST, f"{BUILD}/records"}
    assert _changed(first.path, before) == made_anew
    for lost in (SHARD, "hlo/step_k2_bk128.hlo.pb"):
        before = _there(first.path)
        (first.path / lost).unlink()
        again = _built(fresh, tp=2, k=2)
        assert (again.made, again.reused) == (1, first.made - 1)
        assert _changed(first.path, before) == {lost, *made_anew}
    assert all((first.path / g.file).read_bytes() == g.file.encode() for g in read_bundle(first.path).graphs)
    assert corrupt_files(read_bundle(first.path)) == []
    assert sorted(p.name for p in fresh.iterdir()) == ["bundle", "draft", "target"]


def test_a_copy_of_a_checkpoint_is_the_same_checkpoint(fresh: Path) -> None:
    """Whatever its times; a different content is cut anew."""
    out = _built(fresh).path
    copy = Path(shutil.copytree(fresh / "target", fresh / "elsewhere/target"))
    os.utime(copy / "model.safetensors", ns=(0, 0))
    assert _built(fresh, target=str(copy)).made == 0
    flip(copy / "model.safetensors")
    os.utime(copy / "model.safetensors", ns=(0, 0))
    before = _there(out)
    assert _built(fresh, target=str(copy)).made == 1
    assert SHARD in _changed(out, before)


def test_a_build_of_a_different_k_links_what_both_have(fresh: Path) -> None:
    out = _built(fresh, k=2).path
    inode = (out / SHARD).stat().st_ino
    with (out / SHARD).open("rb") as reader:
        assert _built(fresh, k=1).path == out
        assert (out / SHARD).stat().st_ino == inode, "a reused file is the same file"
        assert len(reader.read()) == os.fstat(reader.fileno()).st_size
    assert open_bundle(out).spec.k == 1
    assert sorted(p.name for p in fresh.iterdir()) == ["bundle", "draft", "target"]


def test_a_failed_build_leaves_the_old_bundle(fresh: Path) -> None:
    out = _built(fresh, k=2).path
    before = _there(out)
    file = fresh / "target/model.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + b"\xff" * 4)
    refused(lambda: _built(fresh, k=2), "has NaN, infinity")
    assert _there(out) == before
    assert open_bundle(out).spec.k == 2


def test_a_plan_is_made_once(fresh: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    made = list[object]()
    for module in (compile.build, manifest):
        monkeypatch.setattr(module, "make_plan", lambda spec: made.append(spec) or make_plan(spec))
    flags = ["--target", str(fresh / "target"), "--k", "0", "--tp", "1", "--max-len", "128", "--json"]
    for new, reused in ((7, 0), (0, 7)):
        build_command([*flags, "--out", str(fresh / "out")])
        message = capsys.readouterr()
        cost = json.loads(message.out)["cost"]
        assert (cost["made"], cost["reused"]) == (new, reused)
        assert 0 < cost["wall_seconds"] < 600
        assert f"{new} files made, {reused} reused; " in message.err
    assert len(made) == 2


class Killed(BaseException):
    """Nothing is written after it."""


def _killed(limit: int, work: Callable[[], object]) -> bool:
    """Whether the work was ended at this fsync, rename, link or removal; if it has so many."""
    calls = itertools.count(1)

    def crashing(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            if next(calls) >= limit:
                raise Killed
            return real(*args, **named)

        return call

    with pytest.MonkeyPatch.context() as patch:
        owners = [(os, "fsync"), (shutil, "rmtree"), (staging, "_exchange")]
        for owner, name in (*owners, *((Path, n) for n in ("replace", "rename", "unlink", "hardlink_to"))):
            patch.setattr(owner, name, crashing(getattr(owner, name)))
        try:
            work()
        except Killed:
            return True
    return False


@pytest.mark.parametrize(("over", "exchange"), [(False, True), (True, True), (True, False)])
def test_a_build_killed_at_any_write_is_no_bundle_or_a_complete_one(
    fresh: Path, over: bool, exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every third of them; kill -9: below."""
    if not exchange:
        monkeypatch.setattr(staging, "_exchange", lambda *_: False)
    complete, old = (_built(fresh, dtype, dtype=dtype).path for dtype in ("fp32", "bf16"))
    expected, out, without = read_bundle(complete).files, fresh / "killed", 0
    for limit in itertools.count(1, 3):
        shutil.rmtree(out, ignore_errors=True)
        if over:
            shutil.copytree(old, out)
        if not _killed(limit, lambda: _built(fresh, "killed")):
            break
        without += not (out / MANIFEST).exists()
        if (out / MANIFEST).exists():
            assert corrupt_files(read_bundle(out)) == []
        _built(fresh, "killed")
        assert read_bundle(out).files == expected
        assert not list(fresh.glob(".killed*"))
    assert limit > 15
    # between two renames the place is empty until the next build
    assert without <= (not exchange if over else limit)


@pytest.mark.slow
def test_six_kills_of_new_builds_and_of_builds_over_a_bundle(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The doctor reads the graphs too. The rest: `make hostile`."""
    monkeypatch.setattr(compile.build, "lower_graphs", trace.lower_graphs)
    series = kills(spec(fresh, k=2, batch=1), tmp_path, seed=0, count=6)
    assert series.tried >= 6
    assert not series.failures, str(series)


def test_two_builds_at_once_are_one_and_a_sentence(fresh: Path) -> None:
    out = _built(fresh).path
    with staging.staged(out):
        refused(lambda: _built(fresh, k=1), "is being written by another process; wait for its end")
    assert open_bundle(out).spec.k == 0
    assert _built(fresh, k=1).made


def test_places_that_no_bundle_can_have_are_sentences(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (fresh / "loop").symlink_to("loop")
    (fresh / "strange").mkdir()
    (fresh / "strange/letter.txt").write_text("mine", encoding="utf-8")
    (fresh / "file").touch()
    notes = _built(fresh, "noted").path / "notes.txt"
    notes.write_text("mine", encoding="utf-8")
    for out, message in (("/", "cannot be a bundle's folder"), ("loop", "cannot be"),
                      ("file", "cannot be a bundle's folder"), ("noted", "notes.txt is not a file of a bundle"),
                      ("/dev/shm", "cannot be"), ("strange", "is not empty and is not a bundle")):  # fmt: skip
        with pytest.raises((UserError, OSError), match=rf"{message}|symbolic links"):
            _built(fresh, out, k=1)
    assert notes.read_text(encoding="utf-8") == (fresh / "strange/letter.txt").read_text(encoding="utf-8") == "mine"
    needed = (64 << 20) + 2 * make_plan(spec(fresh, **SMALL, tp=2).bundle).weight_bytes
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=needed - 1))
    refused(lambda: _built(fresh, "new", tp=2), f"{needed / 1e6:.2f} MB are needed", "0.00 MB too little")


@pytest.mark.parametrize(
    "where", [".bundle.building", ".bundle.building/bundle/weights", "bundle/hlo", f"bundle/{BUILD}"]
)
def test_a_build_writes_through_no_link(fresh: Path, where: str) -> None:
    stored, link = fresh / "theirs", fresh / where
    stored.mkdir()
    (stored / "letter.safetensors").write_bytes(b"mine")
    _built(fresh)
    if link.is_dir():
        shutil.rmtree(link)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(stored)
    with contextlib.suppress(UserError):
        _built(fresh, k=1)
    assert {p.name: p.read_bytes() for p in stored.iterdir()} == {"letter.safetensors": b"mine"}
    if link.is_symlink():
        link.unlink()
    assert _built(fresh, k=1).path


def test_records_that_came_with_a_copy_are_not_believed(fresh: Path) -> None:
    """Wrong weights with a right record, as an archive could bring them: they are cut again."""
    original = _built(fresh).path
    good, copy = (original / SHARD).read_bytes(), fresh / "copy"
    digest = read_bundle(original).files[SHARD].sha256
    shutil.copytree(original, copy)
    flip(copy / SHARD)
    records = copy / BUILD / "records"
    records.write_text(records.read_text().replace(digest, staging.sha256_of(copy / SHARD)), encoding="utf-8")
    _built(fresh, "copy")
    assert (copy / SHARD).read_bytes() == good


def test_a_file_is_made_again_when_its_makers_change(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _built(fresh)
    for maker, folder, count in ((compile.build, "hlo", 5), (cutting, "weights", 1)):
        monkeypatch.setattr(maker, "trace_code" if folder == "hlo" else "cut_code", lambda: ["another version"])
        before = _there(fresh / "bundle")
        assert _built(fresh).made == count
        changed = {name.split("/")[0] for name in _changed(fresh / "bundle", before)}
        assert changed == {folder, MANIFEST, BUILD}


def test_graphs_are_made_again_for_other_options(fresh: Path) -> None:
    nki: dict[str, Any] = {"kernels": "nki", "layers": 1}
    options = {"gather": "all_gather"}, {"kernels": "nki"}, nki, nki | {"without": ("accept_drafts",)}
    assert [_built(fresh, **given).made for given in ({}, *options)] == [7, 5, 5, 5, 5]


def test_a_bundle_has_the_target_s_tokenizer_and_templates(fresh: Path) -> None:
    contents = {
        "tokenizer_config.json": "{}",
        "generation_config.json": '{"eos_token_id": [7]}',
        "chat_template.jinja": "{}",
    }
    for name, content in contents.items():
        (fresh / "target" / name).write_text(content, encoding="utf-8")
    copies = {p.name: p.read_bytes() for p in (_built(fresh, k=1).path / "tokenizer").iterdir()}
    assert copies.keys() == {"tokenizer.json", *contents}
    assert all(content == (fresh / "target" / name).read_bytes() for name, content in copies.items())


def _files_that_run(call: Callable[[], object]) -> set[str]:
    """Files of ours whose functions run during a call."""
    ran: set[str] = set()

    def notice(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            ran.add(frame.f_code.co_filename)

    sys.setprofile(notice)
    try:
        call()
    finally:
        sys.setprofile(None)
    named = (Path(name).relative_to(ROOT).as_posix() for name in ran if Path(name).is_relative_to(ROOT))
    return {name for name in named if name.split("/")[0] in ("model", "trnspec", "compile", "nki_kernels")}


@pytest.mark.slow
def test_what_runs_while_a_file_is_made_is_in_its_recipe(fresh: Path) -> None:
    plan = make_plan(spec(fresh, kernels="nki", k=2).bundle)
    graph = plan.by_key[GraphKey(Stage.VERIFY, 2, 128)]
    ran = _files_that_run(lambda: trace.lower_graph(plan.spec, graph))
    assert "model/speculative.py" in ran
    assert ran <= {*sources(TRACED_BY)}
    opened, packing = Checkpoint(fresh / "target", plan.spec.target_config), Packing(PACKED_ATTENTION, PACKED_MLP)
    cut = _files_that_run(lambda: shard_of(opened, 0, 1, trace.torch.float32, packing))
    # shapes are hashed as values
    assert cut - {"trnspec/bundle/part.py"} <= {*sources(CUT_BY)}
