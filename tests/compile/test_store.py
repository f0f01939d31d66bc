"""Bundles to S3 and back: a server on loopback with faults before it, and a folder; what is signed and what is not."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import boto3
import botocore.endpoint
import pytest

from compile.bundle import s3
from compile.bundle.remote import Folder, open_remote
from compile.store import bundles, pull, push, verify
from compile.store import main as store
from model.errors import UserError
from model.weights import shard_file
from tests.compile.faulty_s3 import ENVIRONMENT, Fault, FaultyS3, faulty_s3
from tests.compile.tiny import flip, forge, refused, relist
from trnspec.bundle.manifest import MANIFEST, Manifest, sha256_of
from trnspec.bundle.opening import open_bundle, read_bundle
from trnspec.bundle.signature import SIGNATURE, VARIABLE

SHARD = shard_file(0)
SECRET = ENVIRONMENT["AWS_SECRET_ACCESS_KEY"]


@pytest.fixture
def store_of(bundle: Path, tmp_path: Path) -> str:
    """The address of a bundle in a folder."""
    return push(bundle, str(tmp_path / "store/pair"))


@pytest.fixture(scope="module")
def running() -> Iterator[FaultyS3]:
    with faulty_s3() as s3:
        yield s3


@pytest.fixture
def server(running: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> FaultyS3:
    """A server without faults, and boto3's environment set to it."""
    running.faults, running.seen = [], []
    here = {"AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{running.port}", "MOTO_S3_DEFAULT_MAX_KEYS": "1"}
    for name, value in (ENVIRONMENT | here).items():
        monkeypatch.setenv(name, value)
    # botocore's pauses
    monkeypatch.setattr(botocore.endpoint, "time", SimpleNamespace(sleep=lambda seconds: None))
    return running


@pytest.fixture
def address(server: FaultyS3) -> str:
    """A fresh bucket's address for a bundle."""
    bucket = f"bucket-{time.monotonic_ns()}"
    boto3.client("s3").create_bucket(Bucket=bucket)
    return f"s3://{bucket}/team/pair"


def _same(one: Path, other: Path) -> bool:
    return all(sha256_of(one / f) == sha256_of(other / f) for f in [*read_bundle(one).files, MANIFEST])


def _written(server: FaultyS3) -> list[str]:
    return [path for method, path in server.seen if method in ("PUT", "POST")]


def test_round_trip(bundle: Path, address: str, tmp_path: Path, server: FaultyS3) -> None:
    assert push(bundle, address) == address
    assert [f"/team/pair/{MANIFEST}?" in path for path in _written(server)][-2:] == [False, True], "manifest last"
    assert verify(address) == []
    assert _same(bundle, pull(address, tmp_path / "copy"))
    assert list(bundles(address.rpartition("/")[0])) == ["pair"]
    server.seen.clear()
    push(bundle, address)
    pull(address, tmp_path / "copy")
    assert not _written(server), "a second push sends nothing"
    push(tmp_path / "copy", address + "-again")
    assert len(_written(server)) == 1, "a copy shares every object"


# fault, method, part of the path, what the sentence says
PUSHES = [("drop", "PUT", "objects", ""), ("AccessDenied", "PUT", "objects", "AccessDenied"),
          ("SlowDown", "PUT", MANIFEST, "SlowDown"), ("SlowDown", "HEAD", "objects", "503")]  # fmt: skip
PULLS = [("flip", "GET", "objects", "sha256 differs|Checksum"), ("truncate", "GET", "objects", ""),
         ("drop", "GET", "objects", ""), ("AccessDenied", "GET", MANIFEST, "AccessDenied"),
         ("flip", "GET", MANIFEST, "not a bundle's manifest|was changed|Checksum")]  # fmt: skip
NETWORK = "check the AWS_ variables, profile and credentials, the address, network and clock"


@pytest.mark.parametrize(("kind", "method", "word", "message"), PUSHES + PULLS)
def test_a_transfer_that_fails_gives_a_reason_and_resumes(
    bundle: Path, address: str, server: FaultyS3, tmp_path: Path, kind: str, method: str, word: str, message: str
) -> None:
    pushes = (kind, method, word, message) in PUSHES
    run: Callable[[], object] = lambda: push(bundle, address) if pushes else pull(address, tmp_path / "copy")  # noqa: E731
    if not pushes:
        push(bundle, address)
    server.faults = [Fault(kind, method, word)]
    with pytest.raises(UserError, match=message or NETWORK) as caught:
        run()
    assert SECRET not in str(caught.value)
    assert "\n" not in str(caught.value)
    server.faults = []
    if pushes:
        refused(lambda: verify(address), "holds no bundle")
    assert not (tmp_path / "copy").exists()
    run()
    assert verify(address) == []
    # a fault that passes is not seen
    server.faults = [Fault(kind, method, word, times=1)] if kind in ("drop", "SlowDown", "truncate") else []
    run()


def test_a_killed_push_and_pull_go_on(bundle: Path, address: str, server: FaultyS3, tmp_path: Path) -> None:
    files = read_bundle(bundle).files
    for method, run in (("PUT", lambda: push(bundle, address)), ("GET", lambda: pull(address, tmp_path / "copy"))):
        server.faults = [Fault("AccessDenied", method, files[SHARD].sha256)]
        refused(run, "AccessDenied")
        server.faults, server.seen = [], []
        run()
        moved = {path for m, path in server.seen if m == method and "objects" in path}
        assert 0 < len(moved) < len(files), "what had arrived is not sent again"


def test_large_objects_go_in_parts(address: str, tmp_path: Path, server: FaultyS3) -> None:
    remote, content = open_remote(address), os.urandom(40 << 20)
    (tmp_path / "large").write_bytes(content)
    server.faults = [Fault("drop", "PUT", "partNumber=2", times=1), Fault("truncate", "GET", "large", times=1)]
    remote.put(tmp_path / "large", "large")
    assert sum("partNumber" in path for path in _written(server)) >= 3
    actual = bytearray()
    remote.get("large", len(content), actual.extend)
    assert actual == content
    assert [fault.met for fault in server.faults] == [1, 1]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("AWS_MAX_ATTEMPTS", "x", "ValueError"), ("AWS_ENDPOINT_URL_S3", "localhost:9000", "ValueError"),
     ("AWS_PROFILE", "nobody", "ProfileNotFound"), ("AWS_DEFAULT_REGION", "us-east-1", "NoSuchBucket"),
     ("AWS_ACCESS_KEY_ID", "", "CredentialsError")],
)  # fmt: skip
def test_mistakes_of_the_environment_are_sentences(
    server: FaultyS3, monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv(name, value)
    refused(lambda: bundles("s3://bucket/team"), f"{message} after all retries; {NETWORK}")


def test_a_server_that_stalls_is_an_error(server: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> None:
    assert s3.TIMEOUT_SECONDS == 30
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(s3, "TIMEOUT_SECONDS", 0.3)
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{silent.getsockname()[1]}")
        refused(lambda: verify("s3://bucket/team/pair"), "ReadTimeoutError after all retries")


def _unsupported(*_: object) -> None:
    raise OSError(38, "Function not implemented")


def test_a_mounted_bucket_serves_as_well(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows no rename, no append and no change in place."""
    opened, address = Path.open, str(tmp_path / "mount/pair")

    def complete_files(path: Path, mode: str = "r", *rest: object, **named: object) -> object:
        assert not {"a", "+"} & set(mode)
        return opened(path, mode, *rest, **named)  # type: ignore[call-overload]

    with monkeypatch.context() as mounted:
        for name, act in {"open": complete_files, "replace": _unsupported, "rename": _unsupported}.items():
            mounted.setattr(Path, name, act)
        push(bundle, address)
    assert _same(bundle, pull(address, tmp_path / "copy"))
    # what a push that was killed in its manifest leaves
    manifest = Path(address) / MANIFEST
    manifest.write_bytes(manifest.read_bytes()[:50])
    refused(lambda: verify(address), "is not a bundle's manifest")
    push(bundle, address)
    assert verify(address) == []


def test_another_bundle_is_never_overwritten(bundle: Path, store_of: str, address: str, tmp_path: Path) -> None:
    other = Path(shutil.copytree(bundle, tmp_path / "other"))
    flip(other / SHARD)
    relist(other, SHARD)
    refused(lambda: push(other, store_of), "holds a different bundle")
    assert len([*(tmp_path / "store/objects").iterdir()]) == len(read_bundle(bundle).files), "nothing was sent"
    refused(lambda: pull(store_of, other), "holds a different bundle")
    assert verify(store_of) == []
    flip(other / SHARD)
    refused(lambda: push(other, f"{store_of}-2"), "is corrupt: weights/tp0", "before it is pushed")
    for remote in (open_remote(str(tmp_path)), open_remote(address)):
        assert remote.put_new("key", b"ours")
        remote.size = lambda key: None  # type: ignore[method-assign]
        assert not remote.put_new("key", b"longer than ours")


def test_a_wrong_object_is_named_and_mended(bundle: Path, store_of: str, tmp_path: Path) -> None:
    stored = tmp_path / "store/objects" / read_bundle(bundle).files[SHARD].sha256
    content = stored.read_bytes()

    def sparse() -> None:
        with stored.open("xb") as file:
            file.truncate(1 << 40)

    mend = f"its sha256 differs); try again, and if it stays so, delete {stored} and push the bundle again"
    for corrupt, message in (
        (lambda: stored.write_bytes(content[:-1] + b"?"), mend),
        (stored.touch, "has 0 bytes, not "),
        (sparse, f"has {1 << 40} bytes, not "),
        (lambda: os.mkfifo(stored), "is gone; push the bundle again"),
        (lambda: None, "is gone; push the bundle again"),
    ):
        stored.unlink(missing_ok=True)
        corrupt()
        refused(lambda: pull(store_of, tmp_path / "copy"), SHARD, message)
        assert not (tmp_path / "copy").exists()
        (actual,) = verify(store_of)
        assert actual.startswith(SHARD)
        with pytest.raises(SystemExit):
            store(["verify", store_of])
    stored.write_bytes(content[:9])
    push(bundle, store_of)
    assert verify(store_of) == []


def test_bad_manifests_in_ls(bundle: Path, store_of: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    contents = {"html": b"<html>", "empty": b"{}", "deep": b"[" * 100_000, "sparse": b"",
                "cut": (bundle / MANIFEST).read_bytes()[:99]}  # fmt: skip
    for name, content in contents.items():
        (tmp_path / "store" / name).mkdir()
        (tmp_path / "store" / name / MANIFEST).write_bytes(content)
    os.truncate(tmp_path / "store/sparse" / MANIFEST, 1 << 40)
    rows = bundles(str(tmp_path / "store"))
    assert {name for name, row in rows.items() if isinstance(row, Manifest)} == {"pair"}
    with pytest.raises(SystemExit):
        store(["ls", str(tmp_path / "store")])
    assert capsys.readouterr().out.count("unusable: ") == len(contents)
    refused(lambda: push(bundle, str(tmp_path / "store/html")), "or a proxy answered (it begins with '<html>')")


def test_strange_and_full_places(bundle: Path, store_of: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for address, message in (("s3://", "name"), ("s3://bucket", "name"), ("gs://a/b", "neither"), ("bucket", "name"),
                          ("s3:/bucket/pair", "neither")):  # fmt: skip
        refused(partial(push, bundle, address), message)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/letter").touch()
    refused(lambda: pull(store_of, tmp_path / "mine"), "not empty")
    below_a_file = ["push", str(bundle), str(tmp_path / "mine/letter/pair")]
    refused(lambda: store(below_a_file), "letter", "; fix this and run the command again")
    with monkeypatch.context() as patch:
        needed = sum(file.bytes for file in read_bundle(bundle).files.values())
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=needed - 1))
        refused(lambda: pull(store_of, tmp_path / "copy"), f"{needed / 1e6:.2f} MB are needed", "0.00 MB too little; ")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "get", full)
        pulling = ["pull", store_of, str(tmp_path / "copy")]
        refused(lambda: store(pulling), f"the disk of {tmp_path}/copy is full; free some space and run the command ag")
    forge(Path(store_of), lambda m: m["files"].update({"../escaped": m["files"][SHARD]}))
    refused(lambda: pull(store_of, tmp_path / "copy"), "was not written by a build")


def test_the_commands_output(bundle: Path, store_of: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["push", str(bundle), store_of], store_of),
        (["verify", store_of], f"{store_of}: every object is as it was pushed"),
        (["pull", store_of, str(tmp_path / "copy")], str(tmp_path / "copy")),
        (["ls", str(tmp_path / "store")], f"{'pair':<40} {read_bundle(bundle).manifest}"),
    ):
        store(words)
        assert capsys.readouterr().out == f"{message}\n"


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
    files = Keys(*(str(tmp_path / name) for name in Keys._fields))
    for file, key in zip(files, (key for p in pairs for key in (p.secret_key, p.public_key)), strict=True):
        Path(file).write_bytes(bytes(key))
    return files


def test_a_signature_may_be_required(bundle: Path, tmp_path: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    address, copy = str(tmp_path / "store/pair"), tmp_path / "copy"
    monkeypatch.setenv(VARIABLE, keys.public)
    for run in (lambda: open_bundle(bundle), lambda: push(bundle, address)):
        refused(run, "is not signed and a signature is required")
    store(["sign", str(bundle), "--key", keys.secret])
    push(bundle, address)
    store(["pull", address, str(copy)])
    # the file's name, its text, its last line, and that with a newline
    text = Path(keys.public).read_text(encoding="utf-8")
    for key in (keys.public, text, text.splitlines()[-1], f"{text.splitlines()[-1]}\n"):
        monkeypatch.setenv(VARIABLE, key)
        open_bundle(copy)
    monkeypatch.setenv(VARIABLE, keys.other_public)
    for run in (lambda: open_bundle(copy), lambda: pull(address, tmp_path / "no")):
        refused(run, "is not signed by the required key")
    for value, message in ((" ", f"{VARIABLE} is set and empty"), ("garbage", "is not a public key of minisign")):
        monkeypatch.setenv(VARIABLE, value)
        refused(partial(open_bundle, bundle), message)
    monkeypatch.delenv(VARIABLE)
    flip(bundle / SHARD)
    (bundle / SIGNATURE).unlink()
    sign = ["sign", str(bundle), "--key", keys.secret]
    refused(lambda: store(sign), "is corrupt: weights/tp0", "; build it again before it is signed")
    assert not (bundle / SIGNATURE).exists()


def test_a_push_replaces_no_unchecked_signature(bundle: Path, store_of: str, tmp_path: Path, keys: Keys) -> None:
    stored, copy = Path(store_of) / SIGNATURE, pull(store_of, tmp_path / "copy")
    store(["sign", str(bundle), "--key", keys.secret])
    push(bundle, store_of)
    ours = stored.read_bytes()
    pull(store_of, copy)
    assert (copy / SIGNATURE).read_bytes() == ours, "a copy that was pulled unsigned gets the signature"
    store(["sign", str(bundle), "--key", keys.other_secret])
    refused(lambda: push(bundle, store_of), "differs from the signature at")
    refused(lambda: push(bundle, store_of, keys.public), "is not signed by the required key")
    assert stored.read_bytes() == ours
    store(["push", str(bundle), store_of, "--public-key", keys.other_public])
    assert stored.read_bytes() == (bundle / SIGNATURE).read_bytes() != ours
    pull(store_of, copy)
    assert (copy / SIGNATURE).read_bytes() == ours, "an unchecked one replaces none"
    (bundle / SIGNATURE).write_bytes(b"garbage")
    for place in (store_of, str(tmp_path / "store/new")):
        refused(partial(push, bundle, place), "is not minisign's, or")
    (bundle / SIGNATURE).unlink()
    with contextlib.suppress(UserError):
        push(bundle, store_of)
    assert stored.read_bytes() != ours, "an unsigned copy takes no signature away"
