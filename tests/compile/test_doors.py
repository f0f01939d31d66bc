"""The doors of a bundle: what loads was verified, what is served stays whole, what is stored is what was pushed."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from compile.build import build, build_and_count
from compile.build import main as build_command
from compile.bundle import cutting, swap
from compile.bundle.sources import SOURCES
from compile.bundle.staging import record_file
from compile.doctor import main as doctor
from compile.store import bundles, pull, push, verify
from compile.store import main as store
from model.errors import UserError
from model.weights import shard_file
from tests.compile.tiny import spec
from tests.hostile.damage import damage_files, forge
from tests.hostile.invocations import REQUESTS, SHAPE, allowed, check, invocations
from trnspec.bundle.manifest import MANIFEST, sha256_of
from trnspec.bundle.opening import open_bundle, read_bundle
from trnspec.bundle.signature import SIGNATURE
from trnspec.llm import LLM

SMALL = {"k": 2, "batch": 1}


@pytest.fixture(scope="module")
def base(base: Path) -> Path:
    """A folder with the tiny pair, its bundle and its target's."""
    build(spec(base, **SMALL))
    build(spec(base, "alone", k=0))
    return base


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
    assert series.tried > 270
    assert not series.short, str(series)


def test_two_hundred_wrong_invocations_are_sentences(base: Path, tmp_path: Path) -> None:
    series = invocations(tmp_path, base / "bundle", base / "alone")
    assert series.tried >= 200 + len(REQUESTS)
    assert not series.short, str(series)
    for request in allowed():
        check(SHAPE, request)


def test_an_llm_refuses_a_flipped_weight_before_anything_runs(bundle: Path) -> None:
    _flip(bundle / shard_file(0))
    with pytest.raises(UserError, match=r"is damaged: weights/tp0.* does not match the manifest; build the bundle"):
        LLM(bundle)


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
    assert open_bundle(out).spec.k == 2


def test_a_build_of_a_different_k_takes_the_place_at_once_and_links_what_both_have(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build(spec(base, str(tmp_path / "bundle"), **SMALL))
    (tmp_path / "bundle/notes.txt").write_text("a user's", encoding="utf-8")
    values = {n: getattr(spec(base, **SMALL), n) for n in ("target", "draft", "tp", "batch", "max_len", "dtype")}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
    with (tmp_path / "bundle" / shard_file(0)).open("rb") as reader:
        inode = os.fstat(reader.fileno()).st_ino
        build_command([*flags, f"--out={tmp_path}/bundle", "--k=1", '--recipe={"chunks": [32]}'])
        assert (tmp_path / "bundle" / shard_file(0)).stat().st_ino == inode, "a kept file is the same file"
        assert len(reader.read()) == os.fstat(reader.fileno()).st_size
    assert "holds a bundle of ks 2 for 1; it stays until the new one is complete" in capsys.readouterr().err
    assert open_bundle(tmp_path / "bundle").spec.k == 1
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
            build_and_count(spec(bundle.parent, target="Qwen/Qwen3-0.6B", k=0))
    assert open_bundle(bundle).spec.k == 2


def test_a_verify_finds_a_flipped_object_and_says_how_to_mend_it(bundle: Path, tmp_path: Path) -> None:
    address = push(bundle, str(tmp_path / "store/pair"))
    digest = read_bundle(bundle).files[shard_file(0)].sha256
    stored = tmp_path / "store/objects" / digest
    _flip(stored)
    assert verify(address) == [
        f"{shard_file(0)} does not hold the bytes that were pushed; delete {stored} and push the bundle again"
    ]
    with pytest.raises(SystemExit):
        store(["verify", address])
    stored.unlink()
    push(bundle, address)
    assert verify(address) == []


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
    hub = read_bundle(build(spec(base, str(tmp_path / "hub"), target=str(folder), k=0)))
    assert hub.title("target") == "Qwen/Qwen3-32B"


def test_a_file_that_may_not_be_read_is_named(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    real = os.open

    def guarded(path: object, *rest: object, **named: object) -> int:
        if path == Path(shard_file(0)).name:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *rest, **named)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", guarded)
        with pytest.raises(UserError, match=f"{shard_file(0)} cannot be read .Permission denied."):
            LLM(bundle)
        with pytest.raises(SystemExit):
            doctor([str(bundle)])
    assert "Permission denied" in capsys.readouterr().out


class Keys(NamedTuple):
    """Files of two keys of minisign."""

    secret: str
    public: str
    other_secret: str
    other_public: str


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    minisign = pytest.importorskip("minisign", reason="py-minisign (the extra sign) is not installed")
    pairs = [minisign.KeyPair.generate() for _ in "ab"]
    contents = [bytes(key) for pair in pairs for key in (pair.secret_key, pair.public_key)]
    files = [tmp_path / name for name in Keys._fields]
    for file, content in zip(files, contents, strict=True):
        file.write_bytes(content)
    return Keys(*map(str, files))


def test_a_signature_is_asked_for_by_policy(
    bundle: Path, tmp_path: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRNSPEC_PUBLIC_KEY", keys.public)
    for door in (open_bundle, lambda path: doctor([str(path)]), lambda path: push(path, str(tmp_path / "store/x"))):
        with pytest.raises(UserError, match="is not signed and a signature is required"):
            door(bundle)
    store(["sign", str(bundle), "--key", keys.secret])
    open_bundle(bundle)
    address = push(bundle, str(tmp_path / "store/pair"))
    store(["pull", address, str(tmp_path / "copy")])
    open_bundle(tmp_path / "copy")
    monkeypatch.setenv("TRNSPEC_PUBLIC_KEY", keys.other_public)
    for refused in (lambda: open_bundle(tmp_path / "copy"), lambda: store(["pull", address, str(tmp_path / "no")])):
        with pytest.raises(UserError, match="is not signed by the required key"):
            refused()
    assert SIGNATURE not in read_bundle(bundle, key="").files, "a signature is no file of the bundle that it signs"
    monkeypatch.setenv("TRNSPEC_PUBLIC_KEY", " ")
    with pytest.raises(UserError, match="TRNSPEC_PUBLIC_KEY is set and empty"):
        open_bundle(bundle)


def test_a_damaged_bundle_is_not_signed(bundle: Path, keys: Keys, capsys: pytest.CaptureFixture[str]) -> None:
    store(["sign", str(bundle), "--key", keys.secret])
    assert "vouches for the content, whatever the folder is called" in capsys.readouterr().err
    (bundle / SIGNATURE).unlink()
    _flip(bundle / shard_file(0))
    with pytest.raises(UserError, match=r"is damaged: weights/tp0.*; build it again before it is signed"):
        store(["sign", str(bundle), "--key", keys.secret])
    assert not (bundle / SIGNATURE).exists()


def test_a_push_replaces_no_signature_that_nobody_has_checked(bundle: Path, tmp_path: Path, keys: Keys) -> None:
    address, stored = str(tmp_path / "store/pair"), tmp_path / "store/pair" / SIGNATURE
    store(["sign", str(bundle), "--key", keys.secret])
    push(bundle, address)
    ours = stored.read_bytes()
    store(["sign", str(bundle), "--key", keys.other_secret])
    with pytest.raises(UserError, match="has a different signature, which is not replaced unseen; give --public-key"):
        push(bundle, address)
    with pytest.raises(UserError, match="is not signed by the required key"):
        store(["push", str(bundle), address, "--public-key", keys.public])
    assert stored.read_bytes() == ours
    store(["push", str(bundle), address, "--public-key", keys.other_public])
    assert stored.read_bytes() == (bundle / SIGNATURE).read_bytes() != ours
    (bundle / SIGNATURE).write_bytes(b"garbage")
    for place in (address, str(tmp_path / "store/new")):
        with pytest.raises(UserError, match=r"a different signature|is not a signature of minisign"):
            push(bundle, place)
    (bundle / SIGNATURE).unlink()
    push(bundle, address)
    assert stored.read_bytes() != ours, "an unsigned copy takes no signature away"


def test_a_copy_that_was_pulled_unsigned_gets_the_signature_with_the_next_pull(
    bundle: Path, tmp_path: Path, keys: Keys
) -> None:
    address, copy = push(bundle, str(tmp_path / "store/pair")), tmp_path / "copy"
    pull(address, copy)
    assert not (copy / SIGNATURE).exists()
    store(["sign", str(bundle), "--key", keys.secret])
    push(bundle, address)
    pull(address, copy)
    assert (copy / SIGNATURE).read_bytes() == (bundle / SIGNATURE).read_bytes()


def _strangers(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.mark.parametrize("where", [".bundle.building", "bundle/weights", "bundle/hlo", "bundle/.build"])
def test_a_build_writes_in_no_folder_that_a_link_leads_to(base: Path, bundle: Path, tmp_path: Path, where: str) -> None:
    theirs, link = tmp_path / "theirs", tmp_path / where
    theirs.mkdir()
    (theirs / "letter.safetensors").write_bytes(b"mine")
    if link.is_dir():
        shutil.rmtree(link)
    link.symlink_to(theirs)
    with pytest.raises(UserError, match=r"is a link, .*remove"):
        build(spec(base, str(bundle), **SMALL | {"k": 1}))
    assert _strangers(theirs) == {"letter.safetensors": b"mine"}


GROWS = f"{shard_file(0)}.cut"


@pytest.mark.parametrize("name", [GROWS, f"{shard_file(0)}.tmp", f"{record_file(Path(), GROWS)}.tmp"])
def test_a_build_writes_to_no_file_that_a_link_leads_to(base: Path, tmp_path: Path, name: str) -> None:
    letter, out = tmp_path / "letter", tmp_path / "out"
    letter.write_bytes(b"mine")
    (out / ".build").mkdir(parents=True)
    (out / "weights").mkdir()
    (out / name).symlink_to(letter)
    with contextlib.suppress(OSError):
        build(spec(base, str(out), k=0))
    assert letter.read_bytes() == b"mine"


def test_records_that_came_with_a_copy_are_not_believed(base: Path, bundle: Path) -> None:
    """Wrong weights with a right record, as an archive could bring them: they are cut again."""
    good = (bundle / shard_file(0)).read_bytes()
    _flip(bundle / shard_file(0))
    for record in (bundle / ".build").glob("*.json"):
        note = json.loads(record.read_text(encoding="utf-8"))
        if note["sha256"] == hashlib.sha256(good).hexdigest():
            record.write_text(json.dumps(note | {"sha256": sha256_of(bundle / shard_file(0))}), encoding="utf-8")
    build(spec(base, str(bundle), **SMALL))
    assert (bundle / shard_file(0)).read_bytes() == good


def test_a_part_of_a_shard_that_came_with_a_copy_is_not_believed(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, copy = tmp_path / "out", tmp_path / "copy"
    monkeypatch.setattr(cutting, "PART_BYTES", 1)
    whole = (build(spec(base, str(out), k=0)) / shard_file(0)).read_bytes()
    shutil.rmtree(out)
    with monkeypatch.context() as patch:
        patch.setattr(cutting.ShardWriter, "finish", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            build(spec(base, str(out), k=0))
    shutil.copytree(out, copy)
    note = record_file(copy, GROWS)
    _flip(copy / GROWS)
    noted = json.loads(note.read_text(encoding="utf-8")) | {"sha256": sha256_of(copy / GROWS)}
    note.write_text(json.dumps(noted), encoding="utf-8")
    assert (build(spec(base, str(copy), k=0)) / shard_file(0)).read_bytes() == whole
