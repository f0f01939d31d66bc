"""Bundles to S3 and back: a server on loopback with faults before it, and a folder; what is signed and what is not."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import boto3
import botocore.endpoint
import pytest
from moto.server import ThreadedMotoServer

from compile.build import build
from compile.bundle import s3
from compile.bundle.remote import Folder, open_remote
from compile.store import bundles, pull, push, verify
from compile.store import main as store
from model.errors import UserError
from model.weights import shard_file
from tests.compile.fault_proxy import Fault, Proxy, proxied
from tests.compile.tiny import forge, spec
from tests.hostile.network import ENVIRONMENT
from trnspec.bundle.manifest import MANIFEST, Manifest, sha256_of
from trnspec.bundle.opening import open_bundle, read_bundle
from trnspec.bundle.signature import SIGNATURE, VARIABLE

SHARD = shard_file(0)
# the secret of hostile.network's environment
SECRET = ENVIRONMENT["AWS_SECRET_ACCESS_KEY"]


@pytest.fixture(scope="module", autouse=True)
def built(base: Path) -> Path:
    """Of a target alone, which has few files."""
    return build(spec(base, k=0))


@pytest.fixture
def store_of(bundle: Path, tmp_path: Path) -> str:
    """The address of a bundle in a folder."""
    return push(bundle, str(tmp_path / "store/pair"))


@pytest.fixture(scope="module")
def moto() -> Iterator[int]:
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    yield server.get_host_and_port()[1]
    server.stop()


@pytest.fixture
def server(moto: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy before the server, and boto3's environment set to it."""
    with proxied(moto) as proxy:
        for name, value in (ENVIRONMENT | {"AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{proxy.port}"}).items():
            monkeypatch.setenv(name, value)
        # botocore's pauses
        monkeypatch.setattr(botocore.endpoint, "time", SimpleNamespace(sleep=lambda seconds: None))
        yield proxy


@pytest.fixture
def address(server: Proxy) -> str:
    """A fresh bucket's address for a bundle."""
    bucket = f"bucket-{time.monotonic_ns()}"
    boto3.client("s3").create_bucket(Bucket=bucket)
    return f"s3://{bucket}/team/pair"


def _same(one: Path, other: Path) -> bool:
    return all(sha256_of(one / f) == sha256_of(other / f) for f in [*read_bundle(one).files, MANIFEST])


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-9] ^= 64
    file.write_bytes(content)


def _written(server: Proxy) -> list[str]:
    return [path for method, path in server.seen if method in ("PUT", "POST")]


def test_round_trip(bundle: Path, address: str, tmp_path: Path, server: Proxy) -> None:
    assert push(bundle, address) == address
    assert [MANIFEST in path for path in _written(server)][-2:] == [False, True], "the manifest is last"
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


@pytest.mark.parametrize(("kind", "method", "word", "said"), PUSHES + PULLS)
def test_a_transfer_that_fails_says_why_and_goes_on(
    bundle: Path, address: str, server: Proxy, tmp_path: Path, kind: str, method: str, word: str, said: str
) -> None:
    pushes = (kind, method, word, said) in PUSHES
    run: Callable[[], object] = lambda: push(bundle, address) if pushes else pull(address, tmp_path / "copy")  # noqa: E731
    if not pushes:
        push(bundle, address)
    server.faults = [Fault(kind, method, word)]
    with pytest.raises(UserError, match=said or NETWORK) as caught:
        run()
    assert SECRET not in str(caught.value)
    assert "\n" not in str(caught.value)
    server.faults = []
    if pushes:
        with pytest.raises(UserError, match="holds no bundle"):
            verify(address)
    assert not (tmp_path / "copy").exists()
    run()
    assert verify(address) == []
    # a fault that passes is not seen
    server.faults = [Fault(kind, method, word, times=1)] if kind in ("drop", "SlowDown", "truncate") else []
    run()


def test_a_killed_push_and_pull_go_on(bundle: Path, address: str, server: Proxy, tmp_path: Path) -> None:
    files = read_bundle(bundle).files
    for method, run in (("PUT", lambda: push(bundle, address)), ("GET", lambda: pull(address, tmp_path / "copy"))):
        server.faults = [Fault("AccessDenied", method, files[SHARD].sha256)]
        with pytest.raises(UserError):
            run()
        server.faults, server.seen = [], []
        run()
        moved = {path for m, path in server.seen if m == method and "objects" in path}
        assert 0 < len(moved) < len(files), "what had arrived is not sent again"


def test_large_objects_go_in_parts(address: str, tmp_path: Path, server: Proxy) -> None:
    remote, content = open_remote(address), os.urandom(40 << 20)
    (tmp_path / "large").write_bytes(content)
    server.faults = [Fault("drop", "PUT", "partNumber=2", times=1), Fault("truncate", "GET", "large", times=1)]
    remote.put(tmp_path / "large", "large")
    assert sum("partNumber" in path for path in _written(server)) >= 3
    found = bytearray()
    remote.get("large", len(content), found.extend)
    assert found == content
    assert [fault.met for fault in server.faults] == [1, 1]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("AWS_MAX_ATTEMPTS", "x", "ValueError"),
        ("AWS_ENDPOINT_URL_S3", "localhost:9000", "ValueError"),
        ("AWS_PROFILE", "nobody", "ProfileNotFound"),
        ("AWS_ACCESS_KEY_ID", "", "NoCredentialsError|PartialCredentialsError"),
        ("AWS_DEFAULT_REGION", "us-east-1", "NoSuchBucket"),
    ],
)
def test_mistakes_of_the_environment_are_sentences(
    server: Proxy, monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"({said}) after all retries; {NETWORK}"):
        bundles("s3://bucket/team")


def test_a_server_that_stalls_is_an_error(server: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    assert s3.TIMEOUT_SECONDS == 30
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(s3, "TIMEOUT_SECONDS", 0.3)
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(UserError, match="ReadTimeoutError after all retries"):
            verify("s3://bucket/team/pair")


def test_a_mounted_bucket_serves_as_well(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows no rename, no append and no change in place."""
    opened, address = Path.open, str(tmp_path / "mount/pair")

    def refused(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    def whole_files(path: Path, mode: str = "r", *rest: object, **named: object) -> object:
        assert not {"a", "+"} & set(mode)
        return opened(path, mode, *rest, **named)  # type: ignore[call-overload]

    with monkeypatch.context() as mounted:
        mounted.setattr(Path, "open", whole_files)
        mounted.setattr(Path, "replace", refused)
        mounted.setattr(Path, "rename", refused)
        push(bundle, address)
    assert _same(bundle, pull(address, tmp_path / "copy"))
    # what a push that was killed in its manifest leaves
    manifest = Path(address) / MANIFEST
    manifest.write_bytes(manifest.read_bytes()[:50])
    with pytest.raises(UserError, match="is not a bundle's manifest"):
        verify(address)
    push(bundle, address)
    assert verify(address) == []


def test_another_bundle_is_never_overwritten(bundle: Path, store_of: str, tmp_path: Path) -> None:
    other = Path(shutil.copytree(bundle, tmp_path / "other"))
    forge(other, lambda manifest: manifest.update(commit="another"))
    for run in (lambda: push(other, store_of), lambda: pull(store_of, other)):
        with pytest.raises(UserError, match="holds a different bundle"):
            run()
    assert verify(store_of) == []


def test_a_wrong_object_is_named_and_mended(bundle: Path, store_of: str, tmp_path: Path) -> None:
    stored = tmp_path / "store/objects" / read_bundle(bundle).files[SHARD].sha256
    whole = stored.read_bytes()

    def sparse() -> None:
        with stored.open("xb") as file:
            file.truncate(1 << 40)

    for damage, said in (
        (lambda: stored.write_bytes(whole[:-1] + b"?"), f"sha256 differs.*delete {stored} and push the bundle again"),
        (stored.touch, "has 0 bytes, not "),
        (sparse, f"has {1 << 40} bytes, not "),
        (lambda: os.mkfifo(stored), "is gone; push the bundle again"),
        (lambda: None, "is gone; push the bundle again"),
    ):
        stored.unlink(missing_ok=True)
        damage()
        with pytest.raises(UserError, match=f"{SHARD} .*{said}"):
            pull(store_of, tmp_path / "copy")
        assert not (tmp_path / "copy").exists()
        (found,) = verify(store_of)
        assert found.startswith(SHARD)
        with pytest.raises(SystemExit):
            store(["verify", store_of])
    stored.unlink(missing_ok=True)
    push(bundle, store_of)
    assert verify(store_of) == []


def test_a_bad_manifest_does_not_hide_its_neighbours(
    bundle: Path, store_of: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contents = {"html": b"<html>", "empty": b"{}", "deep": b"[" * 100_000, "cut": (bundle / MANIFEST).read_bytes()[:99]}
    for name, content in contents.items():
        (tmp_path / "store" / name).mkdir()
        (tmp_path / "store" / name / MANIFEST).write_bytes(content)
    with (tmp_path / "store/html" / "x").open("wb") as large:
        large.truncate(1 << 40)
    (tmp_path / "store/sparse").mkdir()
    os.link(tmp_path / "store/html/x", tmp_path / "store/sparse" / MANIFEST)
    rows = bundles(str(tmp_path / "store"))
    assert {name for name, row in rows.items() if isinstance(row, Manifest)} == {"pair"}
    with pytest.raises(SystemExit):
        store(["ls", str(tmp_path / "store")])
    assert capsys.readouterr().out.count("unusable: ") == len(contents) + 1
    with pytest.raises(UserError, match=r"or a proxy answered \(it begins with '<html>'\)"):
        push(bundle, str(tmp_path / "store/html"))


def test_strange_places_and_full_disks_are_refused(
    bundle: Path, store_of: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for address, said in (("s3://", "name"), ("s3://bucket", "name"), ("gs://a/b", "neither"), ("alone", "name")):
        with pytest.raises(UserError, match=said):
            push(bundle, address)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/letter").touch()
    with pytest.raises(UserError, match="not empty"):
        pull(store_of, tmp_path / "mine")
    with pytest.raises(UserError, match=r"letter.*; fix this and run the command again"):
        store(["push", str(bundle), str(tmp_path / "mine/letter/pair")])
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
        with pytest.raises(UserError, match=r"MB are needed and .* has 0.00 MB free, .* too little; free some space"):
            pull(store_of, tmp_path / "copy")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "get", full)
        with pytest.raises(UserError, match=f"the disk of {tmp_path}/copy is full; free some space and run"):
            store(["pull", store_of, str(tmp_path / "copy")])
    forge(Path(store_of), lambda m: m["files"].update({"../escaped": m["files"][SHARD]}))
    with pytest.raises(UserError, match="was not written by a build"):
        pull(store_of, tmp_path / "copy")


def test_the_command_prints_the_place_last(
    bundle: Path, store_of: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, said in (
        (["push", str(bundle), store_of], store_of),
        (["verify", store_of], f"{store_of}: every object is as it was pushed"),
        (["pull", store_of, str(tmp_path / "copy")], str(tmp_path / "copy")),
        (["ls", str(tmp_path / "store")], f"{'pair':<40} {read_bundle(bundle).manifest}"),
    ):
        store(words)
        assert capsys.readouterr().out == f"{said}\n"


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


def test_a_signature_is_required_by_policy(
    bundle: Path, tmp_path: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, keys.public)
    for door in (open_bundle, lambda path: push(path, str(tmp_path / "store/x"))):
        with pytest.raises(UserError, match="is not signed and a signature is required"):
            door(bundle)
    store(["sign", str(bundle), "--key", keys.secret])
    address = push(bundle, str(tmp_path / "store/pair"))
    store(["pull", address, str(tmp_path / "copy")])
    # the file's name, its text, its last line, and that with a newline
    text = Path(keys.public).read_text(encoding="utf-8")
    for key in (keys.public, text, text.splitlines()[-1], f"{text.splitlines()[-1]}\n"):
        monkeypatch.setenv(VARIABLE, key)
        open_bundle(tmp_path / "copy")
    monkeypatch.setenv(VARIABLE, keys.other_public)
    for refused in (lambda: open_bundle(tmp_path / "copy"), lambda: store(["pull", address, str(tmp_path / "no")])):
        with pytest.raises(UserError, match="is not signed by the required key"):
            refused()
    for value, said in ((" ", f"{VARIABLE} is set and empty"), ("garbage", "is no public key of minisign")):
        monkeypatch.setenv(VARIABLE, value)
        with pytest.raises(UserError, match=said):
            open_bundle(bundle)
    monkeypatch.delenv(VARIABLE)
    _flip(bundle / SHARD)
    (bundle / SIGNATURE).unlink()
    with pytest.raises(UserError, match=r"is damaged: weights/tp0.*; build it again before it is signed"):
        store(["sign", str(bundle), "--key", keys.secret])
    assert not (bundle / SIGNATURE).exists()


def test_a_push_replaces_no_signature_that_nobody_has_checked(
    bundle: Path, store_of: str, tmp_path: Path, keys: Keys
) -> None:
    stored, copy = Path(store_of) / SIGNATURE, pull(store_of, tmp_path / "copy")
    store(["sign", str(bundle), "--key", keys.secret])
    push(bundle, store_of)
    ours = stored.read_bytes()
    pull(store_of, copy)
    assert (copy / SIGNATURE).read_bytes() == ours, "a copy that was pulled unsigned gets the signature"
    store(["sign", str(bundle), "--key", keys.other_secret])
    with pytest.raises(UserError, match="is not the signature that "):
        push(bundle, store_of)
    with pytest.raises(UserError, match="is not signed by the required key"):
        store(["push", str(bundle), store_of, "--public-key", keys.public])
    assert stored.read_bytes() == ours
    store(["push", str(bundle), store_of, "--public-key", keys.other_public])
    assert stored.read_bytes() == (bundle / SIGNATURE).read_bytes() != ours
    (bundle / SIGNATURE).write_bytes(b"garbage")
    for place in (store_of, str(tmp_path / "store/new")):
        with pytest.raises(UserError, match="is none of minisign"):
            push(bundle, place)
    (bundle / SIGNATURE).unlink()
    with contextlib.suppress(UserError):
        push(bundle, store_of)
    assert stored.read_bytes() != ours, "an unsigned copy takes no signature away"
