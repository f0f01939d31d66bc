"""A bundle that is loaded: files are opened once, what was checked is what runs, hostile content is a sentence."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compile.build import build
from compile.doctor import findings
from compile.doctor import main as doctor
from compile.store import main as store
from model.errors import UserError
from model.weights import shard_file
from tests.compile.tiny import flip, forge, refused, relist, spec
from tests.hostile import corruption, invocations
from tests.model.family import untraced
from trnspec.bundle import hlo
from trnspec.bundle.manifest import MANIFEST
from trnspec.bundle.opening import open_bundle, read_bundle
from trnspec.bundle.shards import shard_tensors
from trnspec.bundle.signature import SIGNATURE, VARIABLE
from trnspec.bundle.tokenizer import TOKENIZER
from trnspec.engine.text import load_tokenizer
from trnspec.llm import LLM

SHARD, STEP = shard_file(0), "hlo/step_k0_bk128.hlo.pb"


def _ids(bundle: Path) -> tuple[int, ...]:
    with LLM(bundle) as llm:
        return llm.generate([5, 9, 2], max_new_tokens=6).ids


def test_damages_are_refused(built: Path, tmp_path: Path) -> None:
    series = corruption.corrupt_files(built, tmp_path, seed=15, count=40)
    assert series.tried >= 35
    assert not series.failures, str(series)


def test_no_forged_manifest_is_read(base: Path, tmp_path: Path) -> None:
    series = corruption.forge(untraced(spec(base, "untraced", k=2, batch=1)), tmp_path, read_bundle)
    assert series.tried > 280
    assert not series.failures, str(series)


@pytest.mark.slow
def test_wrong_invocations_are_sentences(base: Path, built: Path, tmp_path: Path) -> None:
    series = invocations.invocations(tmp_path, build(spec(base, "pair", k=2, batch=1)), built)
    assert series.tried >= 200
    assert not series.failures, str(series)


def _on_open(patch: pytest.MonkeyPatch, act: Callable[[str], object]) -> None:
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
    keys, secret = minisign.KeyPair.generate(), tmp_path / "secret"
    secret.write_bytes(bytes(keys.secret_key))
    store(["sign", str(bundle), "--key", str(secret)])
    monkeypatch.setenv(VARIABLE, keys.public_key.to_base64().decode())
    signed = (bundle / MANIFEST).read_bytes()
    forge(bundle, lambda manifest: manifest.update(commit="forged"))
    contents = [signed, (bundle / MANIFEST).read_bytes()][:: 1 if signed_first else -1]
    opens, versions = list[str](), iter(contents * 9)

    def exchange(name: str) -> None:
        if name == MANIFEST:
            opens.append(name)
            (bundle / "next").write_bytes(next(versions))
            (bundle / "next").replace(bundle / MANIFEST)

    refusal = pytest.raises(UserError, match="is not signed by the required key")
    with monkeypatch.context() as patch, contextlib.nullcontext() if signed_first else refusal:
        _on_open(patch, exchange)
        assert open_bundle(bundle).content == signed
    assert opens == [MANIFEST]


def test_what_was_opened_is_what_is_read_whatever_takes_its_name(built: Path, bundle: Path, tmp_path: Path) -> None:
    opened = open_bundle(bundle)
    shutil.copytree(bundle, tmp_path / "other")
    flip(tmp_path / "other" / SHARD)
    relist(tmp_path / "other", SHARD)
    bundle.rename(tmp_path / "aside")
    (tmp_path / "other").rename(bundle)
    assert shard_tensors(opened, 0).keys() == {t.name for t in opened.plan.target_weights}
    assert opened.read(SHARD) == (built / SHARD).read_bytes() != read_bundle(bundle).read(SHARD)


@pytest.mark.parametrize("name", [SHARD, STEP])
def test_a_load_after_a_file_was_changed_is_a_sentence(bundle: Path, name: str) -> None:
    opened = open_bundle(bundle)
    flip(bundle / name)
    for read in (lambda: opened.read(name), lambda: _ids(bundle)):
        refused(read, f"is corrupt: {name} does not match the manifest")


def test_a_file_that_may_not_be_read_is_named(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(name: str) -> None:
        if name == Path(SHARD).name:
            raise PermissionError(13, "Permission denied", name)

    with pytest.MonkeyPatch.context() as patch:
        _on_open(patch, refuse)
        refused(lambda: _ids(bundle), f"{SHARD} cannot be read (Permission denied)")
        with pytest.raises(SystemExit):
            doctor([str(bundle)])
    assert "Permission denied" in capsys.readouterr().out


def test_no_other_file_of_a_folder_is_opened(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = {"step_k0_bk128.bin", "pickled.pkl"}
    (bundle / "executables").mkdir()
    for name in planted:
        (bundle / "executables" / name).write_bytes(b"\x7fELF")
    opens = set[str]()
    with monkeypatch.context() as patch:
        _on_open(patch, opens.add)
        assert len(_ids(bundle)) == 6
    assert MANIFEST in opens
    assert not opens & planted
    forge(bundle, lambda m: m["files"].update({f"executables/{name}": m["files"][SHARD] for name in planted}))
    refused(lambda: LLM(bundle), "manifest.json was not written by a build: ", "executables")


ODD: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo, "endless": lambda file: file.symlink_to("/dev/zero"), "folder": Path.mkdir,
}  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("name", [MANIFEST, SIGNATURE, TOKENIZER, SHARD, STEP])
def test_what_is_no_file_is_a_sentence(bundle: Path, name: str, odd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == SIGNATURE:
        monkeypatch.setenv(VARIABLE, "any")
    (bundle / name).unlink(missing_ok=True)
    ODD[odd](bundle / name)
    message = "is a link" if odd == "endless" else "cannot be read (is no regular file)"
    refused(lambda: _ids(bundle), f"{name} {message}")


def _added(number: int) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"added_tokens": [flags | {"id": number, "content": "<x>", "special": True}]}


def _bpe(**changes: object) -> dict[str, Any]:
    return {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]} | changes}


def _tokenizer(changes: str | dict[str, Any]) -> Callable[[bytes], bytes]:
    if isinstance(changes, str):
        return lambda _: changes.encode("utf-8", "surrogateescape")
    return lambda content: json.dumps(json.loads(content) | changes).encode()


def _proto(edit: Callable[[Any], object]) -> Callable[[bytes], bytes]:
    def edited(proto: bytes) -> bytes:
        module = hlo.parse(proto)
        edit([i for c in module.computations for i in c.instructions])
        return bytes(module.SerializeToString())

    return edited


def _header(edit: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    def edited(content: bytes) -> bytes:
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        edit(header)
        text = json.dumps(header, separators=(",", ":")).encode().ljust(size)
        return len(text).to_bytes(8, "little") + text + content[8 + size :]

    return edited


TOKEN, CUT = r"(cannot be used: |has the id \d+, the model's ids are)", "was cut for another model, rank or layout"
SIZE = r"has \d+ bytes, its tensors need \d+"
# content with its digests made right, as a hostile author could write it: what a loader and the doctor say, and what
# only a loader says
HOSTILE: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    **{f"tokenizer, {name}": (TOKENIZER, _tokenizer(value), TOKEN) for name, value in {
        "no JSON": "{", "not UTF-8": "\udcff", "deep": "[" * 100_000, "model": {"model": {"type": "Magic"}},
        "added id": _added(2**31), "added id beyond 32 bits": _added(2**32),
        "vocabulary's id": {"model": {"type": "WordLevel", "vocab": {"w0": 2**32 - 1}, "unk_token": "w0"}},
        "merges of absent tokens": _bpe(merges=["a z"]),
        # the library panics, which is no Exception
        "prefix beyond a token": _bpe(continuing_subword_prefix="####"),
    }.items()},
    "garbage": ("", lambda _: bytes(range(256)) * 99, "it cannot be followed"),
    "a parameter's shape": ("", _proto(lambda all_: [i.shape.dimensions.insert(0, 7) for i in all_
                                                     if i.opcode == "parameter"]), "parameter "),
    "a callback": ("", _proto(lambda all_: setattr(all_[-2], "opcode", "custom-call")), "it has the operation custom"),
    "another rank": (SHARD, lambda content: content.replace(b'"rank":"0 of', b'"rank":"1 of'), CUT),
    "F8": (SHARD, _header(lambda h: h["target_model.norm.weight"].update(dtype="F8")), CUT),
}  # fmt: skip
LOADER: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    # the contract reads no operation's shape: XLA does, when it compiles
    "XLA": ("", _proto(lambda all_: [i.shape.dimensions.__setitem__(0, 7) for i in all_ if i.opcode == "dot"]),
            "cannot be compiled"),
    "many tensors": (SHARD, _header(lambda h: h.update({str(number): {} for number in range(10**5)})), SIZE),
    "long": (SHARD, lambda content: content + b"\0", SIZE),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE | LOADER)
def test_hostile_content_is_a_sentence(bundle: Path, case: str) -> None:
    """At the entry point of whoever generates and in the doctor; no parser of headers reads a hundred thousand."""
    name, edit, message = (HOSTILE | LOADER)[case]
    names = [name] if name else [graph.file for graph in read_bundle(bundle).graphs]
    for file in (bundle / name for name in names):
        before = file.read_bytes()
        file.write_bytes(edit(before))
        assert file.read_bytes() != before
    relist(bundle, *names)
    begin = time.perf_counter()
    with pytest.raises(UserError, match=rf"{name or 'hlo/.*'} {message}") as caught:
        _ids(bundle)
    assert time.perf_counter() - begin < 10
    assert str(caught.value).isprintable()
    assert case in LOADER or re.search(message, findings(read_bundle(bundle))[0])


def test_the_doctor_names_what_a_bundle_lacks(bundle: Path, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, message in ((TOKENIZER, "has no tokenizer; "), (SHARD, "has no weights; ")):
        forge(bundle, lambda manifest, name=name: manifest["files"].pop(name))
        with pytest.raises(SystemExit):
            doctor([str(bundle), "--json"])
        assert message in json.loads(capsys.readouterr().out)["findings"][-1]
    ranks = untraced(spec(base, "ranks", tp=2, k=0, batch=1))
    shutil.copyfile(ranks / SHARD, ranks / shard_file(1))
    relist(ranks, shard_file(1))
    assert findings(read_bundle(ranks))[-1].startswith(f"{shard_file(1)} {CUT}")
    forge(ranks, lambda manifest: manifest["files"].pop(SHARD))
    refused(lambda: read_bundle(ranks), f"files lacks {SHARD}")


def test_a_tokenizer_that_pads_without_end_pads_nothing(bundle: Path) -> None:
    """The library would end its process."""
    padding = {"strategy": {"Fixed": 1 << 44}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
               "pad_type_id": 0, "pad_token": "w0"}  # fmt: skip
    (bundle / TOKENIZER).write_bytes(_tokenizer({"padding": padding})((bundle / TOKENIZER).read_bytes()))
    relist(bundle, TOKENIZER)
    assert load_tokenizer(read_bundle(bundle)).encode("w7").ids == [7]
