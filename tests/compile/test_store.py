"""Bundles to S3 and back: two real servers on loopback and a folder, with faults between them and us."""

import contextlib
import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import boto3
import botocore.endpoint
import pytest
from moto.server import ThreadedMotoServer

from compile.build import build
from compile.bundle import s3, watch
from compile.bundle.remote import Folder, open_remote
from compile.doctor import main as doctor
from compile.store import bundles, pull, push, verify
from compile.store import main as store
from model.errors import UserError
from tests.compile.fault_proxy import Fault, Proxy, proxied
from tests.compile.tiny import forge, relist, spec
from trnspec.bundle.manifest import MANIFEST, sha256_of
from trnspec.bundle.opening import read_bundle

ROOT = Path(__file__).resolve().parents[2]
SECRET = "secret-that-must-not-be-printed"


@pytest.fixture(scope="module")
def bundle(base: Path) -> Path:
    """Of a target alone, which has few files."""
    return build(spec(base, k=0))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def moto_port() -> Iterator[int]:
    port = _free_port()
    server = ThreadedMotoServer("127.0.0.1", port, verbose=False)
    server.start()
    yield port
    server.stop()


@pytest.fixture(scope="module")
def rclone_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    port, root = _free_port(), tmp_path_factory.mktemp("rclone")
    program = Path(sys.executable).with_name("rclone")
    process = subprocess.Popen(
        [program, "serve", "s3", "--auth-key", f"key,{SECRET}", "--addr", f"127.0.0.1:{port}", str(root)],
        stderr=subprocess.DEVNULL,
        env=os.environ | {"RCLONE_CONFIG": str(root / "none.conf")},
    )
    for _ in range(100):
        with socket.socket() as probe:
            if not probe.connect_ex(("127.0.0.1", port)):
                break
        time.sleep(0.1)
    yield port
    process.terminate()
    process.wait()


# most tests take one of the servers, each fault another one than its neighbour
@pytest.fixture(params=["moto", "rclone"])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy before one of the servers, and boto3's environment set to it."""
    port = request.getfixturevalue(f"{request.param}_port")
    with proxied(port) as proxy:
        for name, value in {
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{proxy.port}",
            "AWS_MAX_ATTEMPTS": "2",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(s3, "_PAUSES", (0.01,) * 3)
        # botocore's own pauses
        monkeypatch.setattr(botocore.endpoint, "time", SimpleNamespace(sleep=lambda seconds: None))
        yield proxy


ON_MOTO, ON_RCLONE = (pytest.mark.parametrize("server", [name], indirect=True) for name in ("moto", "rclone"))


@pytest.fixture
def address(server: Proxy) -> str:
    """A fresh bucket's address for a bundle."""
    bucket = f"bucket-{time.monotonic_ns()}"
    boto3.client("s3").create_bucket(Bucket=bucket)
    return f"s3://{bucket}/team/pair"


def _same(one: Path, other: Path) -> bool:
    files = read_bundle(one).files
    return all(sha256_of(one / f) == sha256_of(other / f) for f in [*files, MANIFEST])


def test_round_trip(bundle: Path, address: str, tmp_path: Path, server: Proxy) -> None:
    bundle = build(spec(bundle.parent, "one", k=1, batch=1))
    assert push(bundle, address) == address
    writes = [path for method, path in server.seen if method == "PUT"]
    assert [MANIFEST in path for path in writes] == [False] * (len(writes) - 1) + [True], "the manifest is last"
    assert verify(address) == []
    assert _same(bundle, pull(address, tmp_path / "copy"))
    doctor([str(tmp_path / "copy")])
    assert [r["name"] for r in bundles(address.rpartition("/")[0])] == ["pair"]
    server.seen.clear()
    push(bundle, address)
    pull(address, tmp_path / "copy")
    assert not [s for s in server.seen if s[0] in ("PUT", "POST")], "a second push sends nothing"
    # another build shares what is equal: here its weights, tokenizer and the graph of the target alone
    other = build(spec(bundle.parent, "other", k=2, batch=1))
    server.seen.clear()
    push(other, address + "-other")
    sent = {p.rpartition("/")[2].partition("?")[0] for m, p in server.seen if m == "PUT" and "objects" in p}
    files = read_bundle(other).files
    assert {n for n, e in files.items() if e.sha256 in sent} == {
        "neuron_config.json",
        *(f"hlo/prefill_{key}_r32_bk128.hlo.pb" for key in ("k2", "k2_asking", "draft_k2")),
        *(f"hlo/{half}_k2_asking_bk128.hlo.pb" for half in ("draft", "verify")),
        "hlo/step_k2_bk128.hlo.pb",
        "hlo/step_k2_unfiltered_bk128.hlo.pb",
    }
    # a copy is a bundle of its own standing: it goes anywhere else, and shares every object
    server.seen.clear()
    push(tmp_path / "copy", address + "-again")
    assert len([s for s in server.seen if s[0] in ("PUT", "POST")]) == 1, "only the manifest is new"


@ON_RCLONE
def test_another_bundle_is_never_overwritten(bundle: Path, address: str, tmp_path: Path) -> None:
    push(bundle, address)
    other = tmp_path / "other"
    shutil.copytree(bundle, other)
    forge(other, lambda manifest: manifest.update(commit="another"))
    with pytest.raises(UserError, match="holds a different bundle"):
        push(other, address)
    push(other, address + "2")
    with pytest.raises(UserError, match="holds a different bundle"):
        pull(address, other)
    assert verify(address) == []


# server, fault, method, part of the path, what the sentence says
FAULTS = [
    ("rclone", "drop", "PUT", "objects", "connection was lost"),
    ("moto", "SlowDown", "PUT", "objects", "slow down"),
    ("rclone", "AccessDenied", "PUT", "objects", "denied"),
    ("moto", "RequestTimeTooSkewed", "PUT", "objects", "clock"),
    ("moto", "drop", "PUT", MANIFEST, "connection was lost"),
    ("rclone", "SlowDown", "HEAD", "objects", "busy"),
]


@pytest.mark.parametrize(("server", "kind", "method", "word", "sentence"), FAULTS, indirect=["server"])
def test_a_push_that_fails_says_why_and_goes_on(
    bundle: Path, address: str, server: Proxy, kind: str, method: str, word: str, sentence: str
) -> None:
    server.faults = [Fault(kind, method, word)]
    with pytest.raises(UserError, match=sentence) as caught:
        push(bundle, address)
    _clean(str(caught.value))
    server.faults = []
    with pytest.raises(UserError, match="holds no bundle"):
        verify(address)
    push(bundle, address)
    assert verify(address) == []


PULLS = [
    ("rclone", "flip", "objects", "sha256 differs|a different checksum"),
    ("moto", "truncate", "objects", "connection was lost"),
    ("rclone", "drop", "objects", "connection was lost"),
    ("moto", "AccessDenied", "objects", "denied"),
    ("rclone", "SlowDown", "objects", "slow down|busy"),
    ("moto", "RequestTimeTooSkewed", "objects", "clock"),
    ("moto", "flip", MANIFEST, "not a bundle's manifest|garbles|changed|a different checksum"),
    ("rclone", "AccessDenied", MANIFEST, "denied"),
]


@pytest.mark.parametrize(("server", "kind", "word", "sentence"), PULLS, indirect=["server"])
def test_a_pull_that_fails_says_why_and_goes_on(
    bundle: Path, address: str, server: Proxy, tmp_path: Path, kind: str, word: str, sentence: str
) -> None:
    push(bundle, address)
    server.faults = [Fault(kind, method, word) for method in ("GET", "HEAD")]
    with pytest.raises(UserError, match=sentence) as caught:
        pull(address, tmp_path / "copy")
    _clean(str(caught.value))
    assert not (tmp_path / "copy" / MANIFEST).exists()
    server.faults = []
    assert _same(bundle, pull(address, tmp_path / "copy"))


def _clean(sentence: str) -> None:
    assert SECRET not in sentence
    assert "\n" not in sentence


ONCE = [("moto", "drop"), ("rclone", "SlowDown"), ("rclone", "truncate")]


@pytest.mark.parametrize(("server", "kind"), ONCE, indirect=["server"])
def test_a_passing_fault_is_not_seen(bundle: Path, address: str, server: Proxy, tmp_path: Path, kind: str) -> None:
    server.faults = [Fault(kind, "PUT" if kind != "truncate" else "GET", "objects", times=1)]
    push(bundle, address)
    assert _same(bundle, pull(address, tmp_path / "copy"))
    assert server.faults[0].met == 1


@pytest.mark.parametrize(("server", "kind"), ONCE, indirect=["server"])
def test_an_answer_for_the_manifest_that_is_cut_is_asked_for_again(
    bundle: Path, address: str, server: Proxy, tmp_path: Path, kind: str
) -> None:
    push(bundle, address)
    server.faults = [Fault(kind, "GET", f"{MANIFEST}", times=1)]
    assert _same(bundle, pull(address, tmp_path / "copy"))
    assert server.faults[0].met == 1
    server.faults = [Fault(kind, "GET", MANIFEST)]
    with pytest.raises(UserError, match=r"connection was lost, also when tried again|lost|slow down|busy"):
        verify(address)


@ON_MOTO
@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("AWS_MAX_ATTEMPTS", "x", "AWS_MAX_ATTEMPTS is 'x'; give a whole number"),
        ("AWS_ENDPOINT_URL_S3", "localhost:9000", "is no address; give one with its scheme"),
        ("AWS_PROFILE", "nobody", "names a profile that is in no configuration file"),
    ],
)
def test_mistakes_of_the_environment_are_sentences(
    server: Proxy, monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=said) as caught:
        bundles("s3://bucket/team")
    assert "goes on from here" not in str(caught.value)


@ON_MOTO
def test_a_killed_push_and_pull_go_on(bundle: Path, address: str, server: Proxy, tmp_path: Path) -> None:
    count = len({e.sha256 for e in read_bundle(bundle).files.values()})
    last = read_bundle(bundle).files["weights/tp0_sharded_checkpoint.safetensors"].sha256
    server.faults = [Fault("AccessDenied", "PUT", last)]
    with pytest.raises(UserError):
        push(bundle, address)
    server.faults, server.seen = [], []
    push(bundle, address)
    sent = [p for m, p in server.seen if m == "PUT" and "objects" in p]
    assert 0 < len(sent) < count, "what had arrived is not sent again"
    server.faults = [Fault("AccessDenied", "GET", last)]
    with pytest.raises(UserError):
        pull(address, tmp_path / "copy")
    with pytest.raises(UserError, match="did not finish"):
        doctor([str(tmp_path / "copy")])
    server.faults, server.seen = [], []
    pull(address, tmp_path / "copy")
    assert len({p for m, p in server.seen if m == "GET" and "objects" in p}) < count
    doctor([str(tmp_path / "copy")])


def test_large_objects_go_in_parts(address: str, bundle: Path, tmp_path: Path, server: Proxy) -> None:
    large = tmp_path / "large"
    shutil.copytree(bundle, large)
    (large / "weights/tp0_sharded_checkpoint.safetensors").write_bytes(os.urandom(40 << 20))
    relist(large, "weights/tp0_sharded_checkpoint.safetensors")
    server.faults = [Fault("drop", "PUT", "partNumber=2", times=1)]
    push(large, address)
    assert server.faults[0].met == 1
    assert sum("partNumber" in p for m, p in server.seen if m == "PUT") >= 3
    server.faults = [Fault("truncate", "GET", sha256_of(large / "weights/tp0_sharded_checkpoint.safetensors"), times=1)]
    assert _same(large, pull(address, tmp_path / "copy"))
    assert server.faults[0].met == 1


def test_a_wrong_byte_on_the_way_up_is_found_by_the_pull_and_mended(
    bundle: Path, address: str, server: Proxy, tmp_path: Path
) -> None:
    """AWS refuses it at once, by the checksum that boto3 sends; these two servers do not look at it."""
    weights = read_bundle(bundle).files["weights/tp0_sharded_checkpoint.safetensors"].sha256
    server.faults = [Fault("flip upload", "PUT", weights)]
    push(bundle, address)
    server.faults = []
    with pytest.raises(UserError, match=r"stays so, (delete s3://.*/objects/|compile.store verify says)"):
        pull(address, tmp_path / "copy")
    assert not (tmp_path / "copy" / MANIFEST).exists()
    boto3.client("s3").delete_object(Bucket=address.split("/")[2], Key=f"team/objects/{weights}")
    push(bundle, address)
    assert _same(bundle, pull(address, tmp_path / "copy"))


# rclone's server knows no If-None-Match and takes the second too
@ON_MOTO
def test_the_server_decides_between_two_writers(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = open_remote(address)
    assert remote.put_new("manifest.json", b"first")
    # the other writer's object comes between our look and our write
    monkeypatch.setattr(type(remote), "size", lambda *_: None)
    assert not remote.put_new("manifest.json", b"second")
    assert remote.read("manifest.json") == b"first"


@ON_RCLONE
def test_a_missing_object_is_named(address: str, bundle: Path, tmp_path: Path) -> None:
    push(bundle, address)
    entry = read_bundle(bundle).files["neuron_config.json"]
    bucket = address.split("/")[2]
    boto3.client("s3").delete_object(Bucket=bucket, Key=f"team/objects/{entry.sha256}")
    assert verify(address) == ["neuron_config.json is missing; push the bundle again"]
    with pytest.raises(UserError, match="gone"):
        pull(address, tmp_path / "copy")
    # the manifest is there and right, so a push fills the hole
    push(bundle, address)
    assert verify(address) == []


@ON_MOTO
def test_no_bucket_and_no_credentials(bundle: Path, server: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"no such bucket|gone"):
        push(bundle, "s3://absent-bucket/team/pair")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(UserError, match=r"no credentials|incomplete"):
        push(bundle, "s3://any-bucket/team/pair")


def test_a_folder_serves_as_well(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # a mounted bucket knows no rename and no append
    def refused(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    opened = Path.open

    def whole_files_alone(path: Path, mode: str = "r", *rest: object, **named: object) -> object:
        assert not {"a", "+"} & set(mode), "a mounted bucket knows no append and no change in place"
        return opened(path, mode, *rest, **named)  # type: ignore[call-overload]

    address = str(tmp_path / "mount" / "pair")
    with monkeypatch.context() as mounted:
        mounted.setattr(Path, "open", whole_files_alone)
        mounted.setattr(Path, "replace", refused)
        mounted.setattr(Path, "rename", refused)
        push(bundle, address)
    assert verify(address) == []
    assert _same(bundle, pull(address, tmp_path / "copy"))
    # what a push killed in its manifest leaves
    manifest = Path(address) / MANIFEST
    manifest.write_bytes(manifest.read_bytes()[:50])
    with pytest.raises(UserError, match="manifest"):
        verify(address)
    push(bundle, address)
    assert verify(address) == []


def test_disks_that_are_full_or_closed_end_in_a_sentence(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = str(tmp_path / "store" / "pair")
    store(["push", str(bundle), address])
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 0))
        with pytest.raises(UserError, match=r"MB are needed and .* has 0.00 MB free, .* too little; free some space"):
            store(["pull", address, str(tmp_path / "copy")])

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "get", full)
        with pytest.raises(UserError, match=f"the disk of {tmp_path}/copy is full; free some space and run"):
            store(["pull", address, str(tmp_path / "copy")])
    store(["pull", address, str(tmp_path / "copy")])
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(UserError, match=r"file.*; fix this and run the command again"):
        store(["push", str(bundle), str(tmp_path / "file" / "pair")])


def test_a_manifest_may_not_leave_its_folder(bundle: Path, tmp_path: Path) -> None:
    address = tmp_path / "store" / "pair"
    push(bundle, str(address))
    manifest = json.loads((address / MANIFEST).read_text(encoding="utf-8"))
    for name in ("../escaped", "/tmp/escaped", "a/../../b", ".build/x", "manifest.json"):
        entry = manifest["files"]["neuron_config.json"]
        forge(address, lambda m, name=name, entry=entry: m.update(files={name: entry}))  # type: ignore[misc]
        with pytest.raises(UserError, match="do not trust"):
            pull(str(address), tmp_path / "copy")


def test_strange_places_are_refused(bundle: Path, tmp_path: Path) -> None:
    for address, word in (("s3://", "name"), ("s3://bucket", "name"), ("gs://a/b", "neither"), ("alone", "name")):
        with pytest.raises(UserError, match=word):
            push(bundle, address)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter").write_text("x", encoding="utf-8")
    push(bundle, str(tmp_path / "store/pair"))
    with pytest.raises(UserError, match="not empty"):
        pull(str(tmp_path / "store/pair"), tmp_path / "mine")


def test_the_command_prints_the_place_last(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address = str(tmp_path / "store/pair")
    store(["push", str(bundle), address])
    assert capsys.readouterr().out == address + "\n"
    store(["verify", address])
    store(["ls", str(tmp_path / "store")])
    assert "pair" in capsys.readouterr().out.splitlines()[-1]
    store(["pull", address, str(tmp_path / "copy")])
    assert capsys.readouterr().out == str(tmp_path / "copy") + "\n"


class Stalled:
    """A server that takes requests and answers with a byte now and then, inside of the head or of a body, or never."""

    def __init__(self, begin: bytes | None) -> None:
        self._begin, self._listener = begin, socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._drip, args=(connection,), daemon=True).start()

    def _drip(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            connection.recv(1 << 16)
            connection.sendall(self._begin or b"")
            while True:
                time.sleep(0.2)
                if self._begin:
                    connection.sendall(b"x")


@pytest.mark.parametrize(
    "begin",
    [None, b"HTTP/1.1 200 OK\r\nX-Head: ", b"HTTP/1.1 200 OK\r\nContent-Length: 9999999\r\n\r\n"],
    ids=["silent", "drips its head", "drips its body"],
)
def test_a_server_that_stalls_is_told(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin: bytes | None
) -> None:
    for name, value in {"ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": SECRET, "DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", Stalled(begin).url)
    monkeypatch.delenv("AWS_MAX_ATTEMPTS", raising=False)
    assert watch.STALLED_SECONDS == 30
    monkeypatch.setattr(watch, "STALLED_SECONDS", 1.5)
    for work in (lambda: pull("s3://b/team/pair", tmp_path / "copy"), lambda: push(bundle, "s3://b/team/pair")):
        since = time.monotonic()
        with pytest.raises(UserError, match=r"the server moved less than 32 KiB in 1\.5 seconds; check the endpoint"):
            work()
        assert time.monotonic() - since < 10
