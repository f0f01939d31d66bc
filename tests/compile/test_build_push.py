"""`compile.build --s3`: a good build is pushed, a failed push leaves the bundle and the command that goes on."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

from compile.build import main as build
from compile.doctor import main as doctor
from compile.store import main as store
from compile.store import pull, verify
from model.errors import UserError
from tests.compile.tiny import write_pair

SECRET = "secret-that-must-not-be-printed"


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A tiny build's flags without --s3."""
    folder = tmp_path_factory.mktemp("pair")
    target, draft = write_pair(folder)
    pair = ["--target", target, "--draft", draft, "--checkpoint", target, "--draft-checkpoint", draft]
    sizes = ["--tp", "1", "--k", "1", "--batch", "1", "--max-len", "128", "--dtype", "fp32"]
    return [*pair, *sizes, "--out", str(folder / "tiny")]


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket on a server of this machine, and boto3's environment set to it."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    port = server.get_host_and_port()[1]
    for name, value in {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{port}",
        "AWS_MAX_ATTEMPTS": "1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket="models")
    yield "s3://models/team"
    server.stop()


def test_a_build_is_pushed(
    arguments: list[str], bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        build([*arguments, "--s3", bucket + "/"])
        assert capsys.readouterr().out.splitlines()[-2:] == [f"{bucket}/tiny", arguments[-1]]
    assert verify(f"{bucket}/tiny") == []
    doctor([str(pull(f"{bucket}/tiny", tmp_path / "copy"))])
    build([*arguments, "--s3", str(tmp_path / "mounted"), "--json"])
    assert f'"s3": "{tmp_path}/mounted/tiny"' in capsys.readouterr().out
    assert verify(f"{tmp_path}/mounted/tiny") == []


def test_a_failed_push_leaves_the_bundle_and_the_command(
    arguments: list[str], bucket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match="no such bucket") as caught:
        build([*arguments, "--s3", "s3://elsewhere/team"])
    assert SECRET not in str(caught.value)
    doctor([arguments[-1]])
    sentence, command = str(caught.value).split(" to go on, run: ")
    assert sentence.endswith(f"The bundle is whole in {arguments[-1]};")
    boto3.client("s3").create_bucket(Bucket="elsewhere")
    _, _, module, *rest = shlex.split(command)
    assert module == "compile.store"
    store(rest)
    assert verify("s3://elsewhere/team/tiny") == []


@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["build", "dry-run"])
@pytest.mark.parametrize(
    ("address", "said"),
    [("s3://", "names no bucket"), ("http://x/y", "neither s3://"), ("nope://", "neither s3://")],
)
def test_a_wrong_address_is_refused_before_the_build(
    arguments: list[str], tmp_path: Path, address: str, said: str, dry: list[str]
) -> None:
    out = tmp_path / "none"
    with pytest.raises(UserError, match=said):
        build([*arguments[:-1], str(out), "--s3", address, *dry])
    assert not out.exists()
