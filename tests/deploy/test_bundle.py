"""What the pods run: a bundle is pushed and fetched only if its server can load it, and results are kept."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from compile.neuron import config as neuron_config
from compile.neuron.flags import LNC, TARGET
from compile.serve_command import CONFIG, MODEL
from compile.spec import BuildSpec
from compile.store import push
from deploy.bundle import Expected, check_shape, fetch, push_checked
from deploy.bundle import main as bundle_command
from deploy.checkpoint import main as check_checkpoints
from deploy.keep import main as keep
from model.config import PRESETS
from model.errors import UserError
from model.weights import shard_file
from trnspec.bundle.manifest import MANIFEST, Compiler, File, manifest_json, sha256_of
from trnspec.bundle.opening import read_bundle
from trnspec.bundle.plan import make_plan
from trnspec.bundle.shards import shard_header

PAIR = Expected(tp=2, batch=4, max_len=256, k=7, lnc=2, drafter="chain")
ALONE = Expected(tp=2, batch=4, max_len=256, k=0, lnc=2, drafter="none")


def flags_of(expected: Expected) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in expected._asdict().items()]


def built(folder: Path, e: Expected, weights: bool = True, **config: Any) -> Path:
    """A bundle as compile.build leaves it where the SDK is; its graphs and its program are empty, its shards headers
    alone."""
    model = "Qwen/Qwen3-0.6B"
    draft = {"draft": model} if e.k else {}
    spec = BuildSpec(model, tp=e.tp, batch=e.batch, max_len=e.max_len, k=str(e.k), **draft).bundle
    plan = make_plan(spec)
    written = json.loads(neuron_config.render(spec))
    written["neuron_config"] |= config
    contents = {graph.file: b"" for graph in plan.graphs}
    contents |= {CONFIG: json.dumps(written).encode(), MODEL: b"program"}
    contents |= {shard_file(rank): shard_header(plan, rank) for rank in range(e.tp) if weights}
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    files = {name: File("0" * 64, sha256_of(folder / name), len(content)) for name, content in contents.items()}
    compiler = Compiler("full", "model.pt", TARGET, LNC)
    (folder / MANIFEST).write_bytes(manifest_json(plan, files, compiler, {}, None))
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
    assert read_bundle(tmp_path / "local").spec.k == expected.k


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
    with pytest.raises(UserError, match="built for drafter chain and the server needs eagle3"):
        check_shape(read_bundle(made), PAIR._replace(drafter="eagle3"))
    with pytest.raises(UserError, match="was built for lnc 2 and the server needs 1"):
        push_checked(made, str(tmp_path / "bucket/a"), PAIR._replace(lnc=1))
    with pytest.raises(UserError, match="save_sharded_checkpoint False"):
        push_checked(built(tmp_path / "b", PAIR, save_sharded_checkpoint=False), str(tmp_path / "bucket/b"), PAIR)
    (made / CONFIG).unlink()
    with pytest.raises(UserError, match=f"{CONFIG} is missing"):
        push_checked(made, str(tmp_path / "bucket/c"), PAIR)
    bundle = read_bundle(made)
    del bundle.files[MODEL]
    with pytest.raises(UserError, match=r"has no model\.pt"):
        check_shape(bundle, PAIR)
    with pytest.raises(UserError, match="has no weights"):
        push_checked(built(tmp_path / "d", PAIR, weights=False), str(tmp_path / "bucket/d"), PAIR)
    assert not (tmp_path / "bucket").exists()


def test_a_wrong_byte_is_refused(tmp_path: Path) -> None:
    address = stored(tmp_path)
    digest = read_bundle(address).files[MODEL].sha256
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


def checkpoint(folder: Path, **changes: Any) -> Path:
    """A folder as the hub has it, which ends sequences by one id, with an empty file of weights."""
    folder.mkdir()
    raw = dataclasses.asdict(PRESETS["Qwen/Qwen3-0.6B"]) | {"model_type": "qwen3", "eos_token_id": 151645} | changes
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    (folder / "model.safetensors").touch()
    return folder


def test_a_checkpoint_of_a_different_model_or_without_weights_is_not_built(tmp_path: Path) -> None:
    folder, wide = checkpoint(tmp_path / "0.6B"), checkpoint(tmp_path / "wide", hidden_size=2048)
    check_checkpoints([f"Qwen/Qwen3-0.6B={folder}", f"eagle3={wide}"])
    for wrong, said in ((f"Qwen/Qwen3-0.6B={wide}", r"wide/config\.json is not Qwen/Qwen3-0\.6B's"),
                        (f"Qwen/Qwen3-8B={folder}", r"is not Qwen/Qwen3-8B's"),
                        (f"eagle3={tmp_path}", "holds no weights"), ("eagle3", "holds no weights")):  # fmt: skip
        with pytest.raises(UserError, match=said):
            check_checkpoints([f"Qwen/Qwen3-0.6B={folder}", wrong])
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"0\.6B holds no weights; copy the checkpoint of Qwen/Qwen3-0\.6B there"):
        check_checkpoints([f"Qwen/Qwen3-0.6B={folder}"])


def run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True, check=False)


def test_a_pod_without_its_bundle_fails_at_once_with_one_sentence(tmp_path: Path) -> None:
    begin = time.monotonic()
    done = run("deploy.bundle", "fetch", str(tmp_path / "bundles/none"), str(tmp_path / "local"), *flags_of(ALONE))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "bundles/none is no folder that can be opened (No such file or directory)" in done.stderr
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
