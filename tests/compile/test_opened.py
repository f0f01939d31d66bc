"""A bundle that is loaded: files are opened once, what was checked is what runs, hostile content is a sentence."""

from __future__ import annotations

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
from tests.compile.tiny import forge, relist, spec
from tests.hostile import damage, invocations
from trnspec.bundle import hlo
from trnspec.bundle.manifest import MANIFEST
from trnspec.bundle.opening import open_bundle, read_bundle
from trnspec.bundle.shards import shard_tensors
from trnspec.bundle.signature import SIGNATURE, VARIABLE
from trnspec.engine.text import TOKENIZER, load_tokenizer
from trnspec.llm import LLM

SHARD, STEP = shard_file(0), "hlo/step_k0_bk128.hlo.pb"


@pytest.fixture(scope="module", autouse=True)
def built(base: Path) -> Path:
    """Of a target alone, which has few files."""
    return build(spec(base, k=0, batch=1))


@pytest.fixture(scope="module")
def pair(base: Path) -> Path:
    return build(spec(base, "pair", k=2, batch=1))


def _ids(bundle: Path) -> tuple[int, ...]:
    with LLM(bundle) as llm:
        return llm.generate([5, 9, 2], max_new_tokens=6).ids


def _refused(bundle: Path, said: str) -> None:
    """At the door of whoever generates, and in the doctor."""
    with pytest.raises(UserError, match=said) as refused:
        _ids(bundle)
    assert str(refused.value).isprintable()
    assert re.search(said, findings(read_bundle(bundle))[0])


def test_damages_are_refused(base: Path, tmp_path: Path) -> None:
    series = damage.damage_files(base / "bundle", tmp_path, seed=15, count=40)
    assert series.tried >= 35
    assert not series.short, str(series)


def test_no_forged_manifest_is_read(pair: Path, tmp_path: Path) -> None:
    series = damage.forge(pair, tmp_path, read_bundle)
    assert series.tried > 280
    assert not series.short, str(series)


@pytest.mark.slow
def test_wrong_invocations_are_sentences(base: Path, pair: Path, tmp_path: Path) -> None:
    series = invocations.invocations(tmp_path, pair, base / "bundle")
    assert series.tried >= 250
    assert not series.short, str(series)


def test_requests_at_the_ends_of_their_ranges_are_served() -> None:
    for request in invocations.allowed():
        invocations.check(invocations.CONFIG, request)


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
    contents = (
        [signed, (bundle / MANIFEST).read_bytes()] if signed_first else [(bundle / MANIFEST).read_bytes(), signed]
    )
    opens, turn = list[str](), iter(contents * 9)

    def exchange(name: str) -> None:
        if name == MANIFEST:
            opens.append(name)
            (bundle / "next").write_bytes(next(turn))
            (bundle / "next").replace(bundle / MANIFEST)

    with monkeypatch.context() as patch:
        _on_open(patch, exchange)
        if signed_first:
            assert open_bundle(bundle).content == signed
        else:
            with pytest.raises(UserError, match="is not signed by the required key"):
                open_bundle(bundle)
    assert opens == [MANIFEST]


def test_what_was_opened_is_what_is_read_whatever_takes_its_name(bundle: Path, tmp_path: Path) -> None:
    opened = open_bundle(bundle)
    shutil.copytree(bundle, tmp_path / "other")
    content = bytearray((bundle / SHARD).read_bytes())
    content[-4:] = bytes(4)
    (tmp_path / "other" / SHARD).write_bytes(content)
    relist(tmp_path / "other", SHARD)
    bundle.rename(tmp_path / "aside")
    (tmp_path / "other").rename(bundle)
    assert shard_tensors(opened, 0).keys() == {t.name for t in opened.plan.target_weights}
    assert opened.read(SHARD) != content == read_bundle(bundle).read(SHARD)


@pytest.mark.parametrize("name", [SHARD, STEP])
def test_a_load_after_a_file_was_changed_is_a_sentence(bundle: Path, name: str) -> None:
    opened = open_bundle(bundle)
    content = bytearray((bundle / name).read_bytes())
    content[-5] ^= 1
    (bundle / name).write_bytes(content)
    for door in (lambda: opened.read(name), lambda: _ids(bundle)):
        with pytest.raises(UserError, match=f"is damaged: {re.escape(name)} does not match the manifest"):
            door()


def test_a_file_that_may_not_be_read_is_named(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(name: str) -> None:
        if name == Path(SHARD).name:
            raise PermissionError(13, "Permission denied", name)

    with pytest.MonkeyPatch.context() as patch:
        _on_open(patch, refuse)
        with pytest.raises(UserError, match=f"{SHARD} cannot be read .Permission denied."):
            _ids(bundle)
        with pytest.raises(SystemExit):
            doctor([str(bundle)])
    assert "Permission denied" in capsys.readouterr().out


def test_no_other_file_of_a_folder_is_opened(base: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    with pytest.raises(UserError, match=r"manifest.json was not written by a build: .*executables"):
        LLM(bundle)


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
    with pytest.raises(UserError, match=rf"{re.escape(name)} (is a link|cannot be read \(is no regular file\))"):
        _ids(bundle)


# content with its digests made right, as a hostile author could write it


def _added(number: int) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"added_tokens": [flags | {"id": number, "content": "<x>", "special": True}]}


def _bpe(**changes: object) -> dict[str, Any]:
    return {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]} | changes}


TOKENIZERS: dict[str, str | dict[str, Any]] = {
    "no JSON": "{", "not UTF-8": "\udcff", "deep": "[" * 100_000, "model": {"model": {"type": "Magic"}},
    "added id": _added(2**31), "added id beyond 32 bits": _added(2**32),
    "vocabulary's id": {"model": {"type": "WordLevel", "vocab": {"w0": 2**32 - 1}, "unk_token": "w0"}},
    "merges of absent tokens": _bpe(merges=["a z"]),
    # the library panics, which is no Exception
    "prefix beyond a token": _bpe(continuing_subword_prefix="####"),
}  # fmt: skip


@pytest.mark.parametrize("case", TOKENIZERS)
def test_a_hostile_tokenizer_is_a_sentence(bundle: Path, case: str) -> None:
    text = TOKENIZERS[case]
    if isinstance(text, dict):
        text = json.dumps(json.loads((bundle / TOKENIZER).read_text(encoding="utf-8")) | text)
    (bundle / TOKENIZER).write_bytes(text.encode("utf-8", "surrogateescape"))
    relist(bundle, TOKENIZER)
    _refused(bundle, rf"{TOKENIZER} (cannot be used: |has the id \d+, the model's ids are)")


def test_a_tokenizer_that_pads_without_end_pads_nothing(bundle: Path) -> None:
    """The library would end its process."""
    padding = {"strategy": {"Fixed": 1 << 44}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
               "pad_type_id": 0, "pad_token": "w0"}  # fmt: skip
    text = json.dumps(json.loads((bundle / TOKENIZER).read_text(encoding="utf-8")) | {"padding": padding})
    (bundle / TOKENIZER).write_text(text, encoding="utf-8")
    relist(bundle, TOKENIZER)
    assert load_tokenizer(read_bundle(bundle)).encode("w7").ids == [7]


def _of_proto(edit: Callable[[Any], object]) -> Callable[[bytes], bytes]:
    def edited(proto: bytes) -> bytes:
        module = hlo.parse(proto)
        edit([i for c in module.computations for i in c.instructions])
        return bytes(module.SerializeToString())

    return edited


PROTOS: dict[str, Callable[[bytes], bytes]] = {
    "garbage": lambda proto: bytes(range(256)) * 99,
    "nothing": lambda proto: b"",
    "half": lambda proto: proto[: len(proto) // 2],
    "a parameter's shape": _of_proto(lambda all_: [i.shape.dimensions.insert(0, 7) for i in all_
                                                   if i.opcode == "parameter"]),
    "a callback": _of_proto(lambda all_: setattr(all_[-2], "opcode", "custom-call")),
}  # fmt: skip


@pytest.mark.parametrize("case", PROTOS)
def test_a_proto_that_is_not_the_graph_is_a_sentence(bundle: Path, case: str) -> None:
    for graph in read_bundle(bundle).graphs:
        (bundle / graph.file).write_bytes(PROTOS[case]((bundle / graph.file).read_bytes()))
        relist(bundle, graph.file)
    _refused(bundle, r"hlo/.* (it|its|parameter|result) ")


def test_what_xla_refuses_is_a_sentence(bundle: Path) -> None:
    """The contract reads no operation's shape: XLA does, when it compiles."""
    edit = _of_proto(lambda all_: [i.shape.dimensions.__setitem__(0, 7) for i in all_ if i.opcode == "dot"])
    for graph in read_bundle(bundle).graphs:
        (bundle / graph.file).write_bytes(edit((bundle / graph.file).read_bytes()))
        relist(bundle, graph.file)
    with pytest.raises(UserError, match=r"hlo/.* cannot be compiled"):
        _ids(bundle)


def _of_header(edit: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    def edited(content: bytes) -> bytes:
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        edit(header)
        text = json.dumps(header, separators=(",", ":")).encode().ljust(size)
        return len(text).to_bytes(8, "little") + text + content[8 + size :]

    return edited


CUT, SIZE = "was cut for another model, rank or layout", r"has \d+ bytes, its tensors need \d+"
SHARDS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "rank": (lambda content: content.replace(b'"rank":"0 of', b'"rank":"1 of'), CUT),
    "F8": (_of_header(lambda h: h["target_model.norm.weight"].update(dtype="F8")), CUT),
    "many tensors": (_of_header(lambda h: h.update({str(number): {} for number in range(10**5)})), SIZE),
    "long": (lambda content: content + b"\0", SIZE),
}


@pytest.mark.parametrize("case", SHARDS)
def test_a_hostile_shard_is_a_sentence(bundle: Path, case: str) -> None:
    before, (edit, said) = (bundle / SHARD).read_bytes(), SHARDS[case]
    (bundle / SHARD).write_bytes(edit(before))
    assert (bundle / SHARD).read_bytes() != before
    relist(bundle, SHARD)
    begin = time.perf_counter()
    with pytest.raises(UserError, match=f"{SHARD} {said}"):
        LLM(bundle)
    assert time.perf_counter() - begin < 10, "no parser of headers reads it"
    if said == CUT:
        assert re.search(f"{SHARD} {said}", findings(read_bundle(bundle))[0])
