"""The serve command: what it prints for a bundle that the engine loads, and one sentence for each that it cannot."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compile.build import build
from compile.doctor import main as doctor
from compile.serve_command import _LAYOUT_SWITCHES, Served, engine_arguments, neuron_fields, routes
from compile.serve_command import main as serve_command
from model.errors import UserError
from model.nki.launches import LNC
from model.weights import shard_file
from tests.compile import fake_sdk
from tests.compile.tiny import forge, relist, spec
from tests.model.family import untraced
from trnspec.bundle.opening import read_bundle
from trnspec.runtime.xla import XlaRunner

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
V0 = ("--engine", "v0")


@pytest.fixture(scope="module")
def base(base: Path) -> Path:
    """A folder with `full`, a bundle built with the whole (fake) SDK, and `none`, one without."""
    with pytest.MonkeyPatch.context() as patch:
        fake_sdk.write_compiler(base / "bin")
        patch.setenv("PATH", str(base / "bin"), prepend=":")
        build(spec(base, "neffs", tp=2))
        fake_sdk.install(patch)
        build(spec(base, "full", tp=2))
    build(spec(base, "none"))
    return base


@pytest.fixture
def full(base: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(base / "full", tmp_path / "full"))


def _json(bundle: Path, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    serve_command([str(bundle), "--json", *V0, *more])
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return printed


def test_command_and_environment(full: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = _json(full, capsys, "--draft", "/checkpoints/my draft")
    assert printed["environment"]["NEURON_COMPILED_ARTIFACTS"] == str(full)
    assert printed["environment"]["NEURON_LOGICAL_NC_CONFIG"] == "2"
    command = printed["command"]
    assert command[:5] == ["vllm", "serve", "/models/target", "--served-model-name", "target"]
    named = dict(zip(command[5::2], command[6::2], strict=True))
    assert (named["--tensor-parallel-size"], named["--max-num-seqs"], named["--max-model-len"]) == ("2", "2", "125")
    # k of the bundle is 3: NxDI counts four verified rows, and the method of a plain draft is not named
    assert json.loads(named["--speculative-config"]) == {
        "model": "/checkpoints/my draft",
        "num_speculative_tokens": 4,
        "max_model_len": 125,
    }
    neuron = json.loads(named["--override-neuron-config"])
    assert neuron == {"save_sharded_checkpoint": True, "enable_fused_speculation": True}
    serve_command([str(full), *V0])
    text = capsys.readouterr().out
    assert text.startswith("VLLM_USE_V1=0 \\\n")
    assert "eagle" not in text


@pytest.mark.parametrize("k", [0, 1, 7])
def test_no_sequence_of_the_engine_meets_the_end_of_the_cache(k: int) -> None:
    """NxDI's host raises once position + k + 1 > max_len; vLLM's last position is below max_model_len."""
    asked = engine_arguments(Served("t", "d", tp=1, batch=1, max_len=128, k=k))
    last = asked["max_model_len"] - 1
    assert last + k + 1 == 128
    assert asked.get("speculative_config", asked)["max_model_len"] == asked["max_model_len"]


def test_generating_here_and_being_loaded_there_have_two_words(base: Path, full: Path, capsys: Any) -> None:
    """A bundle of a machine without the SDK does the one and not the other; a damaged one does neither."""
    doctor([str(base / "none")])
    *_, verdict, plugin, nrt, v0, v1 = capsys.readouterr().out.splitlines()
    assert verdict == "this bundle is whole and can generate here"
    assert plugin.endswith("PJRT: compile.serve_command --engine plugin")
    assert "nrtpy: no, it holds no NEFF of each graph (neff: none); run python -m compile.neuron" in nrt
    assert "V0 engine, SDK 2.26: no, it was built without the Neuron SDK (neff: none) and has no model.pt" in v0
    assert "V1 engine, SDK 2.31: no, the v1 engine cannot load a bundle with a draft model" in v1
    none = r"none cannot be loaded on Trainium: it was built without the Neuron SDK \(neff: none\) and has no model.pt"
    with pytest.raises(UserError, match=none):
        serve_command([str(base / "none"), *V0])
    doctor([str(full)])
    assert "V0 engine, SDK 2.26: compile.serve_command --engine v0\n" in capsys.readouterr().out
    (full / shard_file(1)).unlink()
    with pytest.raises(SystemExit):
        doctor([str(full)])
    assert "\nCANNOT GENERATE: weights/tp1" in capsys.readouterr().out
    with pytest.raises(UserError, match="full cannot be loaded on Trainium: weights/tp1"):
        serve_command([str(full), *V0])


def test_without_a_neff_it_says_why(base: Path) -> None:
    with pytest.raises(UserError, match=r"compiled by neuronx-cc alone and has no model\.pt"):
        serve_command([str(base / "neffs"), *V0])


def test_our_plugin_comes_first_and_needs_no_neff(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    serve_command([str(base / "none"), "--port", "7000"])
    assert capsys.readouterr().out == (
        f"VLLM_PLUGINS=trnspec \\\nNEURON_LOGICAL_NC_CONFIG={LNC} \\\nHF_HUB_OFFLINE=1 \\\n"
        f'vllm serve {base / "none"} --port 7000 --additional-config \'{{"platform": "neuron"}}\'\n'
    )
    assert [engine for engine, why in routes(read_bundle(base / "full")).items() if not why] == ["plugin", "v0"]
    assert [engine for engine, why in routes(read_bundle(base / "neffs")).items() if not why] == ["plugin", "nrt"]
    serve_command([str(base / "neffs"), "--engine", "nrt"])
    assert '{"platform": "nrt"}' in capsys.readouterr().out


def test_an_engine_that_takes_no_plain_draft_is_refused(full: Path) -> None:
    with pytest.raises(UserError, match=r"the v1 engine cannot load a bundle with a draft model: .*the method draft_m"):
        serve_command([str(full), "--engine", "v1"])


def _edit_config(bundle: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    file = bundle / "neuron_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    edit(config)
    file.write_text(json.dumps(config), encoding="utf-8")
    relist(bundle, file.name)


def test_every_size_and_every_switch_is_compared_for_target_and_draft(full: Path) -> None:
    names = [*neuron_fields(2, 2, 128, 3, 2), *_LAYOUT_SWITCHES]
    for of in (lambda c: c["neuron_config"], lambda c: c["fused_spec_config"]["draft_config"]["neuron_config"]):
        for name in names:
            kept = (full / "neuron_config.json").read_bytes()
            _edit_config(full, lambda c, of=of, name=name: of(c).update({name: 77}))  # type: ignore[misc]
            with pytest.raises(UserError, match=f"has {name} 77.* and the bundle was built for .*; build it again"):
                serve_command([str(full), *V0])
            (full / "neuron_config.json").write_bytes(kept)
    _edit_config(full, lambda c: c.update(fused_spec_config=None))
    with pytest.raises(UserError, match="has no draft and its k is 3"):
        serve_command([str(full), *V0])


def test_shards_of_another_build_are_refused(base: Path, full: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each file under its right name, with the right digest in the manifest: the same tensors of another dtype."""
    made = untraced(spec(base, "other", tp=2, dtype="bf16"))
    for shard in (full / "weights").iterdir():
        shutil.copyfile(made / "weights" / shard.name, shard)
        relist(full, f"weights/{shard.name}")
    for refuse in (lambda: serve_command([str(full), *V0]), lambda: XlaRunner(read_bundle(full))):
        with pytest.raises(UserError, match=r"tp0_sharded.* was cut for another model, rank or layout"):
            refuse()
    with pytest.raises(SystemExit):
        doctor([str(full)])
    assert "CANNOT GENERATE: weights/tp1_sharded" in capsys.readouterr().out


def test_shards_under_each_other_s_names_are_refused(full: Path) -> None:
    """Of one layout and one size: nothing but the file's own word tells one rank from another."""
    first, second = (full / shard_file(rank) for rank in range(2))
    kept = first.read_bytes()
    shutil.copyfile(second, first)
    second.write_bytes(kept)
    relist(full, shard_file(0), shard_file(1))
    with pytest.raises(UserError, match=r"tp0_sharded.* was cut for another model, rank or layout"):
        XlaRunner(read_bundle(full))


def test_files_that_are_missing_or_cut_short_are_refused(full: Path) -> None:
    config = full / "neuron_config.json"
    kept = config.read_bytes()
    config.write_text("{", encoding="utf-8")
    relist(full, config.name)
    with pytest.raises(UserError, match=r"neuron_config.json cannot be read \(JSONDecodeError\)"):
        serve_command([str(full), *V0])
    config.write_bytes(kept)
    relist(full, config.name)
    shard = "weights/tp1_sharded_checkpoint.safetensors"
    (full / shard).write_bytes((full / shard).read_bytes()[:-1])
    with pytest.raises(UserError, match=f"{shard} is missing or cut short"):
        serve_command([str(full), *V0])
    forge(full, lambda manifest: manifest["files"].pop(shard))
    with pytest.raises(UserError, match=f"files lacks {shard}"):
        serve_command([str(full), *V0])
