"""A bundle's files are opened once, without links or pipes, and the bytes that were checked are those that run."""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compile.build import build
from compile.store import main as store
from model.errors import UserError
from model.weights import shard_file
from tests.compile.tiny import forge, relist, spec, write_model
from trnspec.bundle.manifest import MANIFEST
from trnspec.bundle.opening import open_bundle, read_bundle
from trnspec.bundle.signature import SIGNATURE
from trnspec.engine.text import TOKENIZER
from trnspec.llm import LLM
from trnspec.runtime.xla import XlaRunner

SHARD = shard_file(0)
BOUND_SECONDS = 60


@pytest.fixture(autouse=True)
def _bounded() -> Iterator[None]:
    """A pipe that waits for a writer is a failure and no hang."""

    def late(*_: object) -> None:
        raise TimeoutError(f"more than {BOUND_SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(BOUND_SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model and its bundle."""
    folder = tmp_path_factory.mktemp("once")
    write_model(folder / "target", 1)
    build(spec(folder, k=0))
    return folder


def _ids(llm: LLM) -> tuple[int, ...]:
    with llm:
        return llm.generate([5, 9, 2], max_new_tokens=6).ids


def _before_each_open(patch: pytest.MonkeyPatch, act: Callable[[str], object]) -> None:
    """Call `act` with the last part of a file's name before the file is opened, whichever call opens it."""
    for module in (os, io):

        def opened(path: Any, *rest: Any, real: Callable[..., Any] = module.open, **named: Any) -> Any:
            if isinstance(path, (str, os.PathLike)):
                act(Path(path).name)
            return real(path, *rest, **named)

        patch.setattr(module, "open", opened)


@pytest.mark.parametrize("signed_first", [True, False])
def test_the_manifest_that_is_signed_is_the_one_that_is_used(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signed_first: bool
) -> None:
    minisign = pytest.importorskip("minisign", reason="py-minisign (the extra sign) is not installed")
    pair, secret = minisign.KeyPair.generate(), tmp_path / "secret"
    secret.write_bytes(bytes(pair.secret_key))
    store(["sign", str(bundle), "--key", str(secret)])
    monkeypatch.setenv("TRNSPEC_PUBLIC_KEY", pair.public_key.to_base64().decode())
    contents = [(bundle / MANIFEST).read_bytes()]
    forge(bundle, lambda manifest: manifest.update(commit="forged"))
    contents.insert(0 if not signed_first else 1, (bundle / MANIFEST).read_bytes())
    opens, turn = list[str](), iter(contents * 9)

    def exchange(name: str) -> None:
        if name == MANIFEST:
            opens.append(name)
            (bundle / "next").write_bytes(next(turn))
            (bundle / "next").replace(bundle / MANIFEST)

    with monkeypatch.context() as patch:
        _before_each_open(patch, exchange)
        if signed_first:
            assert open_bundle(bundle).content == contents[0]
        else:
            with pytest.raises(UserError, match="is not signed by the required key"):
                open_bundle(bundle)
    assert opens == [MANIFEST]


def _other_weights(bundle: Path) -> Path:
    content = bytearray((bundle / SHARD).read_bytes())
    half = len(content) // 16 * 8
    content[-half:] = (-np.frombuffer(content[-half:], np.float32)).tobytes()
    (bundle / SHARD).write_bytes(content)
    relist(bundle, SHARD)
    return bundle


def test_what_was_opened_is_what_runs_whatever_takes_its_name(base: Path, bundle: Path, tmp_path: Path) -> None:
    other = _other_weights(Path(shutil.copytree(bundle, tmp_path / "other")))
    ids = _ids(LLM(base / "bundle"))
    assert _ids(LLM(other)) != ids
    llm, opened = LLM(bundle, load=False), open_bundle(bundle)
    bundle.rename(tmp_path / "aside")
    other.rename(bundle)
    for _ in "again", "once more":
        llm.load()
        assert _ids(llm) == ids
    XlaRunner(opened).close()


@pytest.mark.parametrize("name", [SHARD, "hlo/step_k0_bk128.hlo.pb"])
def test_a_load_after_a_file_was_changed_is_a_sentence(bundle: Path, name: str) -> None:
    llm = LLM(bundle)
    llm.close()
    content = bytearray((bundle / name).read_bytes())
    content[-5] ^= 1
    (bundle / name).write_bytes(content)
    with pytest.raises(UserError, match=f"is damaged: {re.escape(name)} does not match the manifest"):
        llm.load()


def test_no_executable_of_a_bundle_is_opened(base: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (bundle / "executables").mkdir()
    planted = {f"{Path(g.file).name.partition('.')[0]}.bin" for g in read_bundle(bundle).graphs}
    for name in planted:
        (bundle / "executables" / name).write_bytes(b"\x7fELF")
    opens = set[str]()
    with monkeypatch.context() as patch:
        _before_each_open(patch, opens.add)
        assert len(_ids(LLM(bundle))) == 6
    assert MANIFEST in opens
    assert not opens & planted
    for listed in (
        lambda m: m["files"].update({f"executables/{n}": m["files"][SHARD] for n in planted}),
        lambda m: m.update(executables={"platform": "cpu", "version": "1", "interface": "1"}),
    ):
        shutil.copy(base / "bundle" / MANIFEST, bundle / MANIFEST)
        forge(bundle, listed)
        with pytest.raises(UserError, match=r"manifest.json was not written by a build: .*executables"):
            LLM(bundle)


def _pipe(file: Path) -> None:
    os.mkfifo(file)


def _endless(file: Path) -> None:
    file.symlink_to("/dev/zero")


ODD: tuple[Callable[[Path], None], ...] = (_pipe, _endless, Path.mkdir)


@pytest.mark.parametrize("odd", ODD)
def test_no_stamp_is_read_or_written(bundle: Path, odd: Callable[[Path], None]) -> None:
    odd(bundle / ".verified")
    before = sorted(bundle.iterdir()), (bundle / ".verified").lstat()
    open_bundle(bundle)
    assert (sorted(bundle.iterdir()), (bundle / ".verified").lstat()) == before


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("name", [MANIFEST, SIGNATURE, TOKENIZER, SHARD, "hlo/step_k0_bk128.hlo.pb"])
def test_what_is_no_file_is_a_sentence(
    bundle: Path, name: str, odd: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == SIGNATURE:
        monkeypatch.setenv("TRNSPEC_PUBLIC_KEY", "any")
    (bundle / name).unlink(missing_ok=True)
    odd(bundle / name)
    with pytest.raises(UserError, match=rf"{re.escape(name)} (is a link|cannot be read \(is no regular file\))"):
        LLM(bundle)
