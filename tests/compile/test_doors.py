"""The doors of a bundle: what loads was verified, what is served stays whole, what is stored is what was pushed."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path

import pytest

from compile.build import build, build_and_count
from compile.build import main as build_command
from compile.bundle import swap
from compile.bundle.sources import SOURCES
from compile.doctor import main as doctor
from compile.store import bundles, push, verify
from compile.store import main as store
from model.bundle import opening
from model.bundle.manifest import MANIFEST, manifest_digest, read_bundle
from model.bundle.opening import STAMP, open_bundle
from model.bundle.schema import UNFILTERED
from model.bundle.weights import shard_file
from model.errors import UserError
from model.llm import LLM
from model.serving.request import Params
from tests.compile.tiny import spec, write_pair
from tests.hostile.damage import damage_files, forge
from tests.hostile.invocations import REQUESTS, SHAPE, allowed, check, invocations

SMALL = {"k": 2, "batch": 1}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny pair, its bundle and its target's."""
    folder = tmp_path_factory.mktemp("doors")
    write_pair(folder)
    build(spec(folder, **SMALL))
    build(spec(folder, "alone", k=0))
    return folder


@pytest.fixture
def bundle(base: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(base / "bundle", tmp_path / "bundle", ignore=shutil.ignore_patterns(STAMP)))


def _flip(file: Path) -> None:
    """One bit, and the time of the file as it was."""
    stat, content = file.stat(), bytearray(file.read_bytes())
    content[-9] ^= 64
    file.write_bytes(content)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_no_damage_loads(base: Path, tmp_path: Path) -> None:
    series = damage_files(base / "bundle", tmp_path, seed=15, count=40)
    assert series.tried >= 35
    assert not series.short, str(series)


def test_no_forged_manifest_is_read_anywhere(base: Path, tmp_path: Path) -> None:
    series = forge(base / "bundle", tmp_path, read_bundle)
    assert series.tried > 150
    assert not series.short, str(series)


def test_two_hundred_wrong_invocations_are_sentences(base: Path, tmp_path: Path) -> None:
    series = invocations(tmp_path, base / "bundle", base / "alone")
    assert series.tried >= 200 + len(REQUESTS)
    assert not series.short, str(series)
    for request in allowed():
        check(SHAPE, request)


def test_an_llm_refuses_a_flipped_weight_before_anything_runs(bundle: Path) -> None:
    _flip(bundle / shard_file(0))
    with pytest.raises(UserError, match=r"is damaged: weights/tp0.* \(sha256 differs\); build the bundle again"):
        LLM(bundle)
    LLM(bundle, load=False, verify=False)


def test_a_verified_bundle_is_read_once(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    real = opening.sha256_of
    monkeypatch.setattr(opening, "sha256_of", lambda file, told: read.append(file) or real(file, told))
    count = len(open_bundle(bundle)["files"])
    assert len(read) == count
    open_bundle(bundle)
    assert len(read) == count, "the second start reads no file"
    # a stamp is bound to the files' places: a copy is read again, and so is a file that was touched
    open_bundle(Path(shutil.copytree(bundle, bundle.with_name("copy"))))
    assert len(read) == 2 * count
    (bundle / "neuron_config.json").touch()
    open_bundle(bundle)
    assert len(read) == 3 * count
    _flip(bundle / "neuron_config.json")
    with pytest.raises(UserError, match=r"neuron_config\.json has another content"):
        open_bundle(bundle)


def test_a_folder_without_room_for_a_stamp_serves(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "write_text", refused)
    open_bundle(bundle)
    assert not (bundle / STAMP).exists()


def test_a_failed_build_leaves_the_old_bundle_served(base: Path, tmp_path: Path) -> None:
    pair = tmp_path / "pair"
    for name in ("target", "draft"):
        shutil.copytree(base / name, pair / name)
    out = build(spec(pair, **SMALL))

    def there() -> dict[Path, int]:
        # what is known of the checkpoints is no part of the bundle
        return {p: p.stat().st_ino for p in out.rglob("*") if p.is_file() and p.name != SOURCES}

    before = there()
    content = bytearray((pair / "target/model.safetensors").read_bytes())
    content[-4:] = b"\xff\xff\xff\xff"
    (pair / "target/model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match="holds NaN"):
        build(spec(pair, **SMALL))
    assert there() == before
    assert open_bundle(out)["k"] == 2


def test_a_build_of_a_different_k_takes_the_place_at_once_and_links_what_both_have(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(base / "bundle", tmp_path / "bundle")
    (tmp_path / "bundle/notes.txt").write_text("a user's", encoding="utf-8")
    flags = [f"--{n.replace('_', '-')}={v}" for n, v in vars(spec(base, **SMALL)).items() if v and v is not True]
    with (tmp_path / "bundle" / shard_file(0)).open("rb") as reader:
        inode = os.fstat(reader.fileno()).st_ino
        build_command([*(f for f in flags if not f.startswith(("--out", "--k="))), f"--out={tmp_path}/bundle", "--k=1"])
        assert (tmp_path / "bundle" / shard_file(0)).stat().st_ino == inode, "a kept file is the same file"
        assert len(reader.read()) == os.fstat(reader.fileno()).st_size
    assert "holds a bundle of k 2 for 1; it stays until the new one is complete" in capsys.readouterr().err
    assert open_bundle(tmp_path / "bundle")["k"] == 1
    assert (tmp_path / "bundle/notes.txt").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bundle"]


@pytest.mark.parametrize("atomic", [True, False], ids=["exchange", "two-renames"])
def test_folders_are_exchanged_and_a_killed_exchange_is_recovered(
    tmp_path: Path, atomic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, served = tmp_path / "new", tmp_path / "served"
    for folder in (new, served):
        folder.mkdir()
        (folder / folder.name).touch()
    if atomic:
        assert swap._renameat2(new, served)
        assert swap._renameat2(new, served)
    else:
        monkeypatch.setattr(swap, "_renameat2", lambda *_: False)
    swap.exchange(new, served)
    assert (served / "new").exists()
    assert (new / "served").exists()
    served.rename(tmp_path / ".served.old")
    swap.recover(served)
    assert (served / "new").exists()


def test_two_builds_at_once_are_one_and_a_sentence(bundle: Path) -> None:
    lock = bundle / ".build/lock"
    lock.parent.mkdir(exist_ok=True)
    with lock.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="is being written by a different process; wait for its end"):
            build_and_count(spec(bundle.parent, target="Qwen/Qwen3-0.6B", checkpoint="", k=0))
    assert open_bundle(bundle)["k"] == 2


def test_a_deep_verify_finds_a_flipped_object_and_again_mends_it(bundle: Path, tmp_path: Path) -> None:
    address = push(bundle, str(tmp_path / "store/pair"))
    digest = read_bundle(bundle)["files"][shard_file(0)]["sha256"]
    _flip(tmp_path / "store/objects" / digest)
    assert verify(address) == []
    assert verify(address, deep=True) == [
        f"{shard_file(0)} has another content than was pushed; push the bundle with --again"
    ]
    with pytest.raises(SystemExit):
        store(["verify", "--deep", address])
    store(["push", "--again", str(bundle), address])
    assert verify(address, deep=True) == []


def test_a_bad_manifest_does_not_hide_its_neighbours(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    push(bundle, str(tmp_path / "store/good"))
    contents = {"html": b"<html>", "empty": b"{}", "deep": b"[" * 100_000, "cut": (bundle / MANIFEST).read_bytes()[:99]}
    for name, content in contents.items():
        (tmp_path / "store" / name).mkdir()
        (tmp_path / "store" / name / MANIFEST).write_bytes(content)
    rows = {row["name"]: row for row in bundles(str(tmp_path / "store"))}
    assert {name for name, row in rows.items() if "error" in row} == set(contents)
    assert rows["good"]["k"] == 2
    with pytest.raises(SystemExit):
        store(["ls", str(tmp_path / "store")])
    assert capsys.readouterr().out.count("unusable: ") == len(contents)
    with pytest.raises(UserError, match=r"begins with '<html>'.*if a proxy"):
        push(bundle, str(tmp_path / "store/html"))


def test_a_model_of_a_folder_is_told_with_its_size(base: Path, tmp_path: Path) -> None:
    push(base / "bundle", str(tmp_path / "store/pair"))
    (row,) = bundles(str(tmp_path / "store"))
    assert (row["target"], row["draft"]) == ("target (19.6K)", "draft (9.8K)")
    assert read_bundle(base / "alone").title("draft") == "none"


def test_a_folder_of_the_hub_s_cache_is_named_after_its_model(base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "models--Qwen--Qwen3-32B/snapshots/9216db5781bf21249d130ec9da846c4624c16137"
    shutil.copytree(base / "target", folder)
    hub = read_bundle(build(spec(base, str(tmp_path / "hub"), target=str(folder), checkpoint=str(folder), k=0)))
    assert hub.title("target") == "Qwen/Qwen3-32B"


def test_a_file_that_may_not_be_read_is_named(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    real, closed = Path.open, bundle / shard_file(0)

    def guarded(path: Path, *rest: object, **named: object) -> object:
        if path == closed:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *rest, **named)  # type: ignore[call-overload]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", guarded)
        with pytest.raises(UserError, match=f"{shard_file(0)} cannot be read .Permission denied."):
            open_bundle(bundle)
        with pytest.raises(SystemExit):
            doctor([str(bundle)])
    assert "Permission denied" in capsys.readouterr().out


def test_a_signature_is_asked_for_by_policy(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    minisign = pytest.importorskip("minisign", reason="py-minisign (the extra sign) is not installed")
    ours, theirs = minisign.KeyPair.generate(), minisign.KeyPair.generate()
    (tmp_path / "secret").write_bytes(bytes(ours.secret_key))
    (tmp_path / "public").write_bytes(bytes(ours.public_key))
    monkeypatch.setenv("TRNSPEC_PUBLIC_KEY", str(tmp_path / "public"))
    with pytest.raises(UserError, match="is not signed and a signature is asked for"):
        open_bundle(bundle)
    store(["sign", str(bundle), "--key", str(tmp_path / "secret")])
    open_bundle(bundle)
    address = push(bundle, str(tmp_path / "store/pair"))
    store(["pull", address, str(tmp_path / "copy")])
    open_bundle(tmp_path / "copy")
    # the stamp is as writable as the files, and is no proof where a signature is asked for
    _flip(bundle / shard_file(0))
    stamp = (bundle / STAMP).exists() and (bundle / STAMP).read_text(encoding="utf-8")
    with pytest.raises(UserError, match="is damaged"):
        open_bundle(bundle)
    assert stamp
    monkeypatch.setenv("TRNSPEC_PUBLIC_KEY", theirs.public_key.to_base64().decode())
    for refused in (lambda: open_bundle(tmp_path / "copy"), lambda: store(["pull", address, str(tmp_path / "no")])):
        with pytest.raises(UserError, match="is not signed by the key that is asked for"):
            refused()
    manifest = json.loads((tmp_path / "copy" / MANIFEST).read_text(encoding="utf-8"))
    assert "minisig" not in json.dumps(manifest["files"]), "a signature is no file of the bundle that it signs"


def test_a_bundle_without_graphs_of_unfiltered_steps_gives_the_same_ids(base: Path, tmp_path: Path) -> None:
    """As an earlier build left it, with one k and no list of them: such steps then run the graph that filters."""
    earlier = tmp_path / "earlier"
    shutil.copytree(base / "bundle", earlier)
    manifest = json.loads((earlier / MANIFEST).read_text(encoding="utf-8"))
    del manifest["ks"]
    manifest["graphs"] = [g for g in manifest["graphs"] if not g["tag"].endswith(UNFILTERED)]
    for name in [n for n in manifest["files"] if UNFILTERED in n]:
        del manifest["files"][name]
        (earlier / name).unlink()
    manifest["manifest_sha256"] = manifest_digest(manifest)
    (earlier / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    for params in (Params(), Params(0.8, seed=7), Params(1.1, top_k=5, seed=3)):
        ids = [LLM(folder).generate([5, 9, 2], params, max_new_tokens=9).ids for folder in (base / "bundle", earlier)]
        assert ids[0] == ids[1]
