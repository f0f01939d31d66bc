"""Which commands mean a bundle, and what vLLM reads of it."""

import dataclasses
import json
import os
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

import serve.plugin
import trnspec
from model.errors import UserError
from serve.folder import BUNDLE_VARIABLE, METRICS_PREFIX, METRICS_VARIABLE, find_bundle_arg, model_folder, no_bundle
from serve.plugin import platform
from tests.model.demo_bundle import graphs
from trnspec.bundle.opening import read_bundle


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(BUNDLE_VARIABLE, raising=False)


@pytest.fixture
def bundle(tmp_path: Path, demo_bundles: Path) -> Path:
    return shutil.copytree(graphs(demo_bundles).bundle.path, tmp_path / "bundle")


def test_only_a_folder_with_a_manifest_is_a_bundle(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_bundle_arg(["serve", str(bundle), "--port", "1"]) == bundle
    assert find_bundle_arg(["serve", "--port", "1", "--model", str(bundle)]) == bundle
    assert find_bundle_arg(["serve", f"--model={bundle}"]) == bundle
    # an option's folder is not the model, whatever it holds
    download = ["serve", "Qwen/Qwen3-0.6B", "--download-dir", str(bundle)]
    with pytest.raises(UserError, match=r"pull it first: python -m compile\.store pull s3://team/demo FOLDER"):
        find_bundle_arg(["serve", "s3://team/demo"])
    for arguments in (["serve", str(tmp_path)], download, ["bench", str(bundle)], [], ["serve", ""]):
        assert find_bundle_arg(arguments) is None
    for manifest in ("{}", '{"format": "other"}', "[]"):
        (tmp_path / "manifest.json").write_text(manifest)
        assert find_bundle_arg(["serve", str(tmp_path)]) is None, "another tool's"
    (bundle / "manifest.json").write_bytes((bundle / "manifest.json").read_bytes() + b"x")
    with pytest.raises(UserError, match="is not a bundle's manifest"):
        find_bundle_arg(["serve", str(bundle)])
    monkeypatch.setenv(BUNDLE_VARIABLE, "known")
    assert find_bundle_arg([]) == Path("known"), "in the processes that the first one starts"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("serve a/b --port 1", "a/b is no bundle: there is no such folder"),
        ("serve --port 1 --model a/b", "a/b is no bundle"),
        ("serve --model=a/b", "a/b is no bundle"),
        ("serve .", ". is no bundle: the folder has no manifest.json of a bundle"),
        ("serve --port 1", "the command names no bundle"),
    ],
)
def test_a_command_without_a_bundle_is_a_sentence_with_the_reason(arguments: str, sentence: str) -> None:
    assert str(no_bundle(arguments.split())).startswith(sentence)


def test_vllm_reads_the_target_and_its_tokenizer(bundle: Path) -> None:
    read = read_bundle(bundle)
    folder = model_folder(read)
    assert folder.name == read.manifest.digest[:16], "another bundle has another one"
    ours = {"config.json", "generation_config.json", "chat_template.jinja"}
    assert {file.name for file in folder.iterdir()} == ours | {file.name for file in (bundle / "tokenizer").iterdir()}
    config = json.loads((folder / "config.json").read_text())
    source = json.loads((Path(__file__).parents[2] / "demo/target/config.json").read_text())
    same = ("architectures", "model_type", "hidden_size", "vocab_size", "eos_token_id", "head_dim", "rope_theta")
    assert {name: config[name] for name in same} == {name: source[name] for name in same}
    assert (folder / "tokenizer.json").read_bytes() == (bundle / "tokenizer/tokenizer.json").read_bytes()
    template = folder / "chat_template.jinja"
    assert "message['content']" in template.read_text()
    template.write_text("the tokenizer's")
    model_folder(read)
    assert template.read_text() == "the tokenizer's"


@pytest.mark.parametrize(
    ("generation", "ends", "config_ends"),
    [({"temperature": 0.6, "eos_token_id": 5}, (5, 6), [5, 6]), ({"top_k": 20}, (7,), 7), (None, (), None)],
)
def test_vllm_gets_the_checkpoint_s_sampling_defaults_and_all_its_end_ids(
    bundle: Path, generation: dict[str, Any] | None, ends: tuple[int, ...], config_ends: object
) -> None:
    read = read_bundle(bundle)
    name, spec = "tokenizer/generation_config.json", read.spec
    changed = dataclasses.replace(spec, target_config=dataclasses.replace(spec.target_config, eos_token_ids=ends))
    content = {name: json.dumps(generation).encode()} if generation else {}
    made: Any = SimpleNamespace(manifest=read.manifest, files=content, read=content.__getitem__, spec=changed)
    folder = model_folder(made)
    written = json.loads((folder / "generation_config.json").read_text())
    assert written == (generation or {}) | {"eos_token_id": list(ends) or None}
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == config_ends


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json"])
def test_a_configuration_that_is_no_object_is_a_sentence(bundle: Path, name: str) -> None:
    read, content = read_bundle(bundle), {f"tokenizer/{name}": b"[]"}
    made: Any = SimpleNamespace(manifest=read.manifest, files=content, read=content.__getitem__, spec=read.spec)
    with pytest.raises(UserError, match=f"{name} is not a JSON object"):
        model_folder(made)


@pytest.mark.parametrize(("device", "refused"), [("CPU", True), ("cuda", False), (None, False)])
def test_a_target_device_without_plugins_is_a_sentence(
    bundle: Path, device: str | None, refused: bool, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("VLLM_TARGET_DEVICE", device) if device else monkeypatch.delenv("VLLM_TARGET_DEVICE", False)
    monkeypatch.setattr("sys.argv", ["vllm", "serve", str(bundle)])
    with pytest.raises(SystemExit, match="2") if refused else nullcontext():
        trnspec.check_target_device()
    sentence = "error: VLLM_TARGET_DEVICE is cpu, for which vLLM loads no platform plugin; unset it to serve a bundle\n"
    assert capsys.readouterr().err == (sentence if refused else "")
    monkeypatch.setattr("sys.argv", ["vllm", "serve", "Qwen/Qwen3-0.6B"])
    trnspec.check_target_device()


@pytest.mark.parametrize(("chosen", "refused"), [(None, True), ("neuron,trnspec", True), ("trnspec", False)])
def test_a_second_platform_on_the_machine_is_a_sentence(
    chosen: str | None, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    platforms = {"serve.plugin": platform, "idle": lambda: None, "broken": mock.Mock(side_effect=OSError),
             "vllm_neuron": lambda: "vllm_neuron.platform.Neuron"}  # fmt: skip
    names = "trnspec", "idle", "broken", "neuron"
    points = [
        SimpleNamespace(name=name, module=module, load=lambda ask=ask: ask)
        for name, (module, ask) in zip(names, platforms.items(), strict=True)
    ]
    monkeypatch.setattr(serve.plugin, "entry_points", lambda group: points)
    monkeypatch.setattr(serve.plugin, "find_bundle_arg", lambda arguments: Path("demo"))
    monkeypatch.setattr(serve.plugin, "install_excepthook", lambda: None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    # set, so that what the platform sets is undone
    for name in ("VLLM_USE_V2_MODEL_RUNNER", BUNDLE_VARIABLE, METRICS_VARIABLE):
        monkeypatch.setenv(name, "")
    monkeypatch.delenv(METRICS_VARIABLE)
    monkeypatch.setenv("VLLM_PLUGINS", chosen) if chosen else monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.setattr("sys.argv", ["vllm", "serve", "demo"])
    if not refused:
        assert platform() == "serve.platform.BundlePlatform"
        assert (os.environ[BUNDLE_VARIABLE], os.environ["VLLM_USE_V2_MODEL_RUNNER"]) == ("demo", "0")
        assert os.environ[METRICS_VARIABLE].startswith(str(tmp_path / METRICS_PREFIX))
        return
    with pytest.raises(SystemExit, match="2"):
        platform()
    assert "the plugin neuron (vllm_neuron) is active as well; set VLLM_PLUGINS=trnspec" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--version"], ["bench", "serve", "--model", "m"], ["serve", "--help"]])
def test_a_command_without_a_bundle_gets_a_bare_platform_where_no_other_answers(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["vllm", *words])
    monkeypatch.setattr(serve.plugin, "_is_only_platform", lambda: True)
    assert platform() == "serve.platform.NullPlatform"
    monkeypatch.setattr(serve.plugin, "_is_only_platform", lambda: False)
    assert platform() is None
