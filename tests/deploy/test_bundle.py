"""What the pods run: a bundle is pushed and fetched only if its server can load it, and results are kept."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from compile.serve_command import CONFIG, MODEL, neuron_fields
from compile.spec import BuildSpec
from compile.store import push
from deploy.bundle import Expected, check_shape, fetch, push_checked
from deploy.bundle import main as bundle_command
from deploy.keep import main as keep
from model.bundle.manifest import MANIFEST, read_bundle
from model.errors import UserError
from tests.compile.tiny import manifest_of

PAIR = Expected(tp=2, batch=4, max_len=256, k=7, lnc=2, drafter="chain")
ALONE = Expected(tp=2, batch=4, max_len=256, k=0, lnc=2, drafter="none")


def flags_of(expected: Expected) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in expected._asdict().items()]


@pytest.fixture(autouse=True)
def no_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shards below hold no weights."""
    monkeypatch.setattr("compile.serve_command.faults", lambda bundle: iter(()))


def built(folder: Path, e: Expected, **config: Any) -> Path:
    """A bundle as compile.build leaves it where the SDK is: its configuration, its program, a shard for each rank."""
    (folder / "weights").mkdir(parents=True)
    written: dict[str, Any] = {"neuron_config": neuron_fields(e.tp, e.batch, e.max_len, e.k, e.lnc) | config}
    if e.k:
        draft = neuron_fields(e.tp, e.batch, e.max_len, 0, e.lnc)
        written["fused_spec_config"] = {"draft_config": {"neuron_config": draft}}
    (folder / CONFIG).write_text(json.dumps(written), encoding="utf-8")
    (folder / MODEL).write_bytes(b"program")
    for rank in range(e.tp):
        (folder / f"weights/tp{rank}_sharded_checkpoint.safetensors").write_bytes(bytes([rank]) * 100)
    files = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
    model = "Qwen/Qwen3-0.6B"
    spec = BuildSpec(model, tp=e.tp, batch=e.batch, max_len=e.max_len, k=e.k, **({"draft": model} if e.k else {}))
    manifest = manifest_of(spec, files)
    for name in manifest["files"].keys() - files.keys():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    (folder / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    return folder


def stored(tmp_path: Path, expected: Expected = ALONE) -> Path:
    """A bundle pushed to a folder that stands for the mounted bucket."""
    push(built(tmp_path / "made", expected), str(tmp_path / "bucket/bundles/name"))
    return tmp_path / "bucket/bundles/name"


@pytest.mark.parametrize("expected", [ALONE, PAIR], ids=["alone", "pair"])
def test_a_bundle_is_pushed_and_fetched_whole(expected: Expected, tmp_path: Path, capsys: Any) -> None:
    made, address = built(tmp_path / "made", expected), str(tmp_path / "bucket/bundles/name")
    bundle_command(["push", str(made), address, *flags_of(expected)])
    # a read-only bucket is enough
    for path in (tmp_path / "bucket").rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    bundle_command(["fetch", address, str(tmp_path / "local"), *flags_of(expected)])
    assert capsys.readouterr().out.splitlines() == [address, str(tmp_path / "local")]
    assert (tmp_path / "local" / MODEL).read_bytes() == b"program"
    assert read_bundle(tmp_path / "local")["k"] == expected.k


WRONG = [({"tp": 4}, "tp 4"), ({"batch": 1}, "batch 1"), ({"max_len": 512}, "max_len 512"),
         ({"k": 15, "drafter": "chain"}, "k 15")]  # fmt: skip


@pytest.mark.parametrize(("change", "said"), WRONG, ids=str)
def test_a_bundle_of_a_different_shape_is_refused_before_a_byte_is_copied(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    address = stored(tmp_path, ALONE._replace(**change))
    with pytest.raises(UserError, match=f"built for {said} and the server needs"):
        fetch(address, tmp_path / "local", ALONE)
    assert not (tmp_path / "local").exists()
    with pytest.raises(UserError, match=said):
        push_checked(tmp_path / "made", str(tmp_path / "other/name"), ALONE)
    assert not (tmp_path / "other").exists()


def test_a_different_drafter_lnc_layout_or_an_unfinished_bundle_is_refused(tmp_path: Path) -> None:
    made = built(tmp_path / "made", PAIR)
    with pytest.raises(UserError, match="built for drafter chain and the server needs medusa"):
        check_shape(read_bundle(made), PAIR._replace(drafter="medusa"))
    with pytest.raises(UserError, match="was built for lnc 2 and the server needs 1"):
        push_checked(made, str(tmp_path / "bucket/a"), PAIR._replace(lnc=1))
    with pytest.raises(UserError, match="save_sharded_checkpoint False"):
        push_checked(built(tmp_path / "b", PAIR, save_sharded_checkpoint=False), str(tmp_path / "bucket/b"), PAIR)
    (made / CONFIG).unlink()
    with pytest.raises(UserError, match=f"{CONFIG} is missing"):
        push_checked(made, str(tmp_path / "bucket/c"), PAIR)
    bundle = read_bundle(made)
    del bundle.manifest["files"][MODEL]
    with pytest.raises(UserError, match=r"has no model\.pt"):
        check_shape(bundle, PAIR)
    assert not (tmp_path / "bucket").exists()


def test_a_wrong_byte_is_refused(tmp_path: Path) -> None:
    address = stored(tmp_path)
    digest = read_bundle(address)["files"][MODEL]["sha256"]
    (tmp_path / "bucket/bundles/objects" / digest).write_bytes(b"progrum")
    with pytest.raises(UserError, match="did not arrive as it was built"):
        fetch(address, tmp_path / "local", ALONE)
    assert not (tmp_path / "local" / MANIFEST).exists()


def test_with_a_public_key_an_unsigned_bundle_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import minisign  # noqa: PLC0415

    keys = minisign.KeyPair.generate()
    monkeypatch.setenv("TRNSPEC_PUBLIC_KEY", keys.public_key.to_base64().decode())
    with pytest.raises(UserError, match="is not signed"):
        fetch(stored(tmp_path), tmp_path / "local", ALONE)
    assert not (tmp_path / "local").exists()


def run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True, check=False)


def test_a_pod_without_its_bundle_fails_at_once_with_one_sentence(tmp_path: Path) -> None:
    begin = time.monotonic()
    done = run("deploy.bundle", "fetch", str(tmp_path / "bundles/none"), str(tmp_path / "local"), *flags_of(ALONE))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "none has no manifest.json" in done.stderr
    assert time.monotonic() - begin < 30


def samples(folder: Path, *answers: str) -> None:
    """As lm-eval writes them."""
    (folder / "Qwen__Qwen3-32B").mkdir(parents=True)
    lines = [json.dumps({"doc_id": number, "resps": [[answer]]}) for number, answer in enumerate(answers)]
    file = folder / "Qwen__Qwen3-32B" / "samples_gsm8k_2026-11-22T10-00-00.123.jsonl"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def test_results_are_kept_and_different_answers_fail_after_that(tmp_path: Path, capsys: Any) -> None:
    results, kept = tmp_path / "results", tmp_path / "kept"
    samples(results / "baseline", "18", "3")
    samples(results / "speculative", "18", "3")
    keep([str(results), str(kept), "--same-answers"])
    first, address = capsys.readouterr().out.splitlines()
    assert first == "2 answers are equal"
    assert len(list(Path(address).rglob("samples_*.jsonl"))) == 2
    for wrong, said in (("4", "1 of 2 answers differ .*, first document 1 of gsm8k"), (None, "1 of 2 answers differ")):
        for file in (*(results / "speculative").rglob("*.jsonl"), *kept.rglob("*.jsonl")):
            file.unlink()
        (results / "speculative/Qwen__Qwen3-32B").rmdir()
        samples(results / "speculative", *(["18"] if wrong is None else ["18", wrong]))
        with pytest.raises(UserError, match=said):
            keep([str(results), str(kept), "--same-answers"])
        assert len(list(kept.rglob("samples_*.jsonl"))) == 2


@pytest.mark.parametrize("line", ["", "{", "[]", '{"doc_id": 1}', '"x"'])
def test_nothing_to_keep_or_compare_is_an_error(line: str, tmp_path: Path) -> None:
    (tmp_path / "results/baseline").mkdir(parents=True)
    with pytest.raises(UserError, match="holds no file to store"):
        keep([str(tmp_path / "results"), str(tmp_path / "kept")])
    (tmp_path / "results/baseline/samples_x_1.jsonl").write_text(line, encoding="utf-8")
    with pytest.raises(UserError, match=r"no samples|is no sample of lm-eval"):
        keep([str(tmp_path / "results"), str(tmp_path / "kept"), "--same-answers"])
