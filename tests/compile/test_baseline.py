"""`--k 0`: the target alone as a bundle of its own, which no draft is needed for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from compile.build import build
from compile.build import main as build_command
from compile.doctor import main as doctor
from compile.neuron import config as neuron_config
from compile.neuron.flags import DECODE, DEFAULT_FLAGS, PREFILL
from compile.serve_command import main as serve_command
from compile.spec import BuildSpec
from model.errors import UserError
from model.generate import main as generate
from model.graph_key import GraphKey, Stage
from model.weights import shard_file
from tests.compile import fake_sdk
from tests.compile.tiny import spec, write_model
from trnspec.bundle.opening import read_bundle
from trnspec.engine.config import engine_config
from trnspec.engine.engine import Engine
from trnspec.engine.request import Params, Request
from trnspec.runtime.xla import XlaRunner

REQUESTS = [
    Request((5, 9, 2, 7), max_new_tokens=12),
    Request((8, 1), Params(0.9, seed=3), max_new_tokens=9),
    Request((3, 3, 4), Params(1.2, top_k=9, top_p=0.8, min_p=0.02, seed=2**40), max_new_tokens=12),
]


@pytest.fixture(scope="module")
def base(base: Path) -> Path:
    build(spec(base, "alone", k=0))
    return base


def _run(graphs: XlaRunner, speculative: bool) -> list[list[int]]:
    return [r.ids for r in Engine(graphs, engine_config(graphs.bundle), speculative).run(REQUESTS)]


def test_it_emits_the_tokens_of_a_pair_s_target(base: Path) -> None:
    pair, alone = (XlaRunner(read_bundle(path)) for path in (build(spec(base, "pair")), base / "alone"))
    expected = _run(pair, speculative=False)
    assert _run(alone, speculative=False) == expected
    assert _run(alone, speculative=True) == expected, "there is nothing to speculate with"
    assert len({tuple(ids) for ids in expected}) == len(REQUESTS)


def test_a_target_s_folder_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(write_model(tmp_path / "only", 1))
    sizes = ["--k", "0", "--tp", "2", "--batch", "1", "--max-len", "128", "--dtype", "fp32", "--out"]
    build_command(["--target", target, *sizes, str(tmp_path / "made")])
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "made")
    doctor([str(tmp_path / "made")])
    with pytest.raises(UserError, match="k is 0, which builds the target alone, and --draft was given"):
        build_command(["--target", target, "--draft", target, *sizes, "x"])


def test_it_holds_the_target_under_nxdis_names(base: Path) -> None:
    bundle = read_bundle(base / "alone")
    assert {g.key[:2] for g in bundle.graphs} == {(Stage.PREFILL, 0), (Stage.STEP, 0)}
    spec_ = bundle.spec
    assert (spec_.ks, spec_.rows, spec_.draft_ranks, spec_.draft, spec_.draft_config) == ((), 1, 0, "none", None)
    with safe_open(bundle.path / shard_file(0), framework="np") as shard:
        names = set(shard.keys())
    assert names == {t.name for t in bundle.plan.by_key[GraphKey(Stage.STEP, 0, 128)].weights}
    assert {"embed_tokens.weight", "norm.weight", "layers.1.self_attn.qkv_proj.k_proj.weight"} <= names
    assert not [n for n in names if n.startswith(("target_model", "draft_model"))]


def _flat(text: str) -> dict[str, Any]:
    value = json.loads(text)
    neuron = value.pop("neuron_config")
    return value | {f"neuron/{k}": v for k, v in neuron.items()}


def test_its_config_differs_from_the_pair_s_in_speculation_alone() -> None:
    alone, pair = (_flat(neuron_config.render(BuildSpec(k=k).bundle)) for k in ("0", "7"))
    assert alone.keys() == pair.keys()
    assert {k: alone[k] for k in alone if alone[k] != pair[k]} == {
        "fused_spec_config": None,
        "neuron/enable_fused_speculation": False,
        "neuron/speculation_length": 0,
        "neuron/kv_cache_tiling": False,
    }


def test_generate_runs_it(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--bundle", str(base / "alone"), "--prompt", "w5 w9 w2", "--max-new-tokens", "5"]
    generate([*arguments, "--json"])
    report = json.loads(capsys.readouterr().out)
    assert (report["tokens"], report["ks"], report["speculation"]) == (5, [], False)
    assert report["target_steps"] == 4
    generate(arguments)
    assert "wall without speculation:" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"is a target alone \(k 0\)"):
        generate([*arguments, "--compare"])


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_with_the_sdk_it_is_served_without_speculation(
    base: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_sdk.install(monkeypatch)
    out = build(spec(base, "served", k=0))
    builder = fake_sdk.ModelBuilder.built[-1]
    assert {key: e["priority"] for key, e in builder.added.items()} == {PREFILL: None, DECODE: 0}
    assert {key: e["flags"] for key, e in builder.added.items()} == {t: DEFAULT_FLAGS[t] for t in (PREFILL, DECODE)}
    outputs = builder.added[DECODE]["instance"].module(*builder.added[DECODE]["inputs"][0])
    assert list(outputs[0].shape) == [2], "one id a sequence, as NxDI's host indexes it"
    for engine, variable in (("v0", "0"), ("v1", "1")):
        serve_command([str(out), "--engine", engine, "--json"])
        printed = json.loads(capsys.readouterr().out)
        assert printed["environment"]["VLLM_USE_V1"] == variable
        command = printed["command"]
        assert "--speculative-config" not in command
        override = {"save_sharded_checkpoint": True}
        if engine == "v0":
            assert json.loads(command[command.index("--override-neuron-config") + 1]) == override
        else:
            assert "--override-neuron-config" not in command
            own = json.loads(command[command.index("--additional-config") + 1])
            assert own == {"override_neuron_config": override}
