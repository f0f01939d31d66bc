"""What runs in the pods: the check before a server starts, the keeping of results."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from compile.spec import BuildSpec
from compile.store import pull, push
from deploy import fetch as fetch_command
from deploy import keep as keep_command
from deploy.expected import CONFIG, MODEL, Expected, check_config, check_manifest
from deploy.fetch import fetch
from model.bundle.manifest import MANIFEST, manifest_digest, read_bundle
from model.errors import UserError
from tests.compile.tiny import manifest_of

PAIR = Expected(tp=2, batch=4, max_len=256, k=7, lnc=2, drafter="chain")
ALONE = Expected(tp=2, batch=4, max_len=256, k=0, lnc=2, drafter="none")


def built(folder: Path, expected: Expected, **config: Any) -> Path:
    """A bundle as compile.build leaves it where the SDK is: its configuration, its program, a shard for each rank."""
    (folder / "weights").mkdir(parents=True)
    written = {"neuron_config": expected.neuron_config | config}
    (folder / CONFIG).write_text(json.dumps(written), encoding="utf-8")
    (folder / MODEL).write_bytes(b"program")
    for rank in range(expected.tp):
        (folder / f"weights/tp{rank}_sharded_checkpoint.safetensors").write_bytes(bytes([rank]) * 100)
    files = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
    e, model = expected, "Qwen/Qwen3-0.6B"
    of_pair = {"draft": model} if e.k else {}
    spec = BuildSpec(target=model, tp=e.tp, batch=e.batch, max_len=e.max_len, k=e.k, **of_pair)
    manifest = manifest_of(spec, files)
    for name in manifest["files"].keys() - files.keys():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    (folder / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    return folder


def stored(tmp_path: Path, expected: Expected = ALONE, **manifest: Any) -> Path:
    """A bundle pushed to a folder that stands for the mounted bucket."""
    folder = built(tmp_path / "made", expected)
    if manifest:
        changed = read_bundle(folder).manifest | manifest
        changed["manifest_sha256"] = manifest_digest(changed)
        (folder / MANIFEST).write_text(json.dumps(changed), encoding="utf-8")
    address = tmp_path / "bucket/bundles/name"
    push(folder, str(address))
    return address


@pytest.mark.parametrize("expected", [ALONE, PAIR], ids=["alone", "pair"])
def test_a_bundle_is_pushed_and_fetched_whole(expected: Expected, tmp_path: Path) -> None:
    out = fetch(stored(tmp_path, expected), tmp_path / "local", expected)
    assert (out / MODEL).read_bytes() == b"program"
    assert read_bundle(out)["k"] == expected.k
    assert len(list((out / "weights").iterdir())) == expected.tp


def test_a_read_only_bucket_is_enough(tmp_path: Path) -> None:
    address = stored(tmp_path)
    for path in [tmp_path / "bucket", *(tmp_path / "bucket").rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = sorted(p.name for p in (tmp_path / "bucket").rglob("*"))
    fetch(address, tmp_path / "local", ALONE)
    assert sorted(p.name for p in (tmp_path / "bucket").rglob("*")) == before


WRONG = {
    "tp": ({"tp": 4}, "built for tp 4"),
    "batch": ({"batch": 1}, "built for batch 1"),
    "length": ({"max_len": 512}, "built for max_len 512"),
    "k": ({"k": 15, "drafter": "chain"}, "built for k 15"),
    "no-neff": ({"neff": "none", "toolchain": "cpu"}, "without the Neuron SDK"),
}


@pytest.mark.parametrize("name", WRONG)
def test_another_bundle_than_the_server_asks_for_is_refused_before_a_byte_is_copied(name: str, tmp_path: Path) -> None:
    different, part = WRONG[name]
    manifest = different if "neff" in different else {}
    address = stored(tmp_path, ALONE if manifest else dataclasses.replace(ALONE, **different), **manifest)
    with pytest.raises(UserError, match=part):
        fetch(address, tmp_path / "local", ALONE)
    assert not (tmp_path / "local").exists()


def test_a_bundle_with_a_different_drafter_is_refused(tmp_path: Path) -> None:
    manifest = read_bundle(built(tmp_path / "made", PAIR)).manifest
    check_manifest(manifest, PAIR, "made")
    with pytest.raises(UserError, match="made was built for drafter chain and the server is asked for medusa"):
        check_manifest(manifest, dataclasses.replace(PAIR, drafter="medusa"), "made")


def test_another_lnc_or_an_unsharded_checkpoint_is_refused(tmp_path: Path) -> None:
    address = stored(tmp_path)
    with pytest.raises(UserError, match="logical_nc_config 2 and the server needs 1"):
        fetch(address, tmp_path / "local", dataclasses.replace(ALONE, lnc=1))
    with pytest.raises(UserError, match="save_sharded_checkpoint"):
        check_config(built(tmp_path / "b", ALONE, save_sharded_checkpoint=False), ALONE)
    with pytest.raises(UserError, match="enable_fused_speculation"):
        check_config(built(tmp_path / "c", PAIR), ALONE)


def test_a_wrong_byte_is_refused(tmp_path: Path) -> None:
    address = stored(tmp_path)
    digest = read_bundle(address)["files"][MODEL]["sha256"]
    (tmp_path / "bucket/bundles/objects" / digest).write_bytes(b"progrum")
    with pytest.raises(UserError, match="did not arrive as it was built"):
        fetch(address, tmp_path / "local", ALONE)
    assert not (tmp_path / "local" / MANIFEST).exists()


UNFINISHED = {
    "model": (MODEL, "has no model.pt"),
    "shard": ("weights/tp1_sharded_checkpoint.safetensors", "ranks \\[1\\]"),
}


@pytest.mark.parametrize("name", UNFINISHED)
def test_a_bundle_that_cannot_be_served_is_refused(name: str, tmp_path: Path) -> None:
    file, part = UNFINISHED[name]
    manifest = read_bundle(built(tmp_path / "made", ALONE)).manifest
    check_manifest(manifest, ALONE, "made")
    del manifest["files"][file]
    with pytest.raises(UserError, match=part):
        check_manifest(manifest, ALONE, "made")


def test_a_bundle_without_a_configuration_is_refused(tmp_path: Path) -> None:
    folder = built(tmp_path / "made", ALONE)
    check_config(folder, ALONE)
    (folder / CONFIG).unlink()
    with pytest.raises(UserError, match="cannot be read"):
        check_config(folder, ALONE)


def run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True, check=False)


def test_a_pod_without_its_artifact_fails_at_once_with_one_sentence(tmp_path: Path) -> None:
    begin = time.monotonic()
    done = run("deploy.fetch", str(tmp_path / "bundles/none"), str(tmp_path / "local"), *ALONE.arguments)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "none has no manifest.json" in done.stderr
    assert time.monotonic() - begin < 30


def test_the_commands_print_where_things_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = built(tmp_path / "made", ALONE)
    push(folder, str(tmp_path / "store/name"))
    fetch_command.main([str(tmp_path / "store/name"), str(tmp_path / "local"), *ALONE.arguments])
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / "local")]
    assert pull(str(tmp_path / "store/name"), tmp_path / "again") == tmp_path / "again"


@pytest.mark.parametrize("code", [0, 1])
def test_results_are_kept_whatever_the_exit_code_which_is_passed_on(code: int, tmp_path: Path) -> None:
    results, kept = tmp_path / "results", tmp_path / "kept"
    results.mkdir()
    program = f"import pathlib, sys; pathlib.Path(r'{results}/a.json').write_text('x'); sys.exit({code})"
    done = run("deploy.keep", str(results), str(kept), "--", sys.executable, "-c", program)
    assert done.returncode == code
    assert (Path(done.stdout.splitlines()[-1]) / "a.json").read_text() == "x"


def test_nothing_to_keep_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    with pytest.raises(UserError, match="holds no file to keep"):
        keep_command.main([str(tmp_path / "results"), str(tmp_path / "kept"), "--", sys.executable, "-c", "pass"])


def test_a_request_to_stop_reaches_the_command(tmp_path: Path) -> None:
    program = (
        "import pathlib, signal, sys, time; p = pathlib.Path(sys.argv[1]);"
        "signal.signal(signal.SIGTERM, lambda *_: (p.joinpath('stopped').write_text('x'), sys.exit(3)));"
        "p.joinpath('ready').write_text('x'); time.sleep(30)"
    )
    results = tmp_path / "results"
    results.mkdir()
    command = [sys.executable, "-m", "deploy.keep", str(results), str(tmp_path / "kept"), "--"]
    with subprocess.Popen([*command, sys.executable, "-c", program, str(results)], text=True) as process:
        for _ in range(600):
            if (results / "ready").exists():
                break
            time.sleep(0.05)
        process.terminate()
        assert process.wait(30) == 3
    assert (results / "stopped").exists()
    assert list((tmp_path / "kept").rglob("stopped"))
