"""Bundles whose layers are several in a launch: the tokens and caches of halves, on one rank and on two."""

from __future__ import annotations

import base64
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compile.build import build
from compile.neuron.specialise import specialised
from model.graph_key import GraphKey, Stage
from model.nki import custom_calls
from model.nki.launches import LAYERS, TARGET, Launch
from model.nki.simulated import simulate
from tests.compile import fake_nki
from tests.compile.test_packed_weights import SIZES
from tests.compile.tiny import spec, write_model
from trnspec.bundle import hlo
from trnspec.bundle.contract import violations
from trnspec.bundle.opening import Bundle, read_bundle
from trnspec.engine.config import engine_config
from trnspec.engine.engine import Engine
from trnspec.engine.request import Params, Request
from trnspec.runtime.xla import XlaRunner

REQUESTS = [Request((1, 2, 3), max_new_tokens=6), Request((7,), Params(0.9, seed=5), 4)]
STEP = GraphKey(Stage.STEP, 1, 128, filters=False)
# layers of target and draft
COUNTS = (3, 2)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launches")
    write_model(folder / "target", 1, 0.2, num_key_value_heads=2, num_hidden_layers=COUNTS[0], **SIZES)
    changes = {"num_key_value_heads": 2, "num_hidden_layers": COUNTS[1], "tie_word_embeddings": True}
    write_model(folder / "draft", 2, 0.2, **changes, **SIZES)
    return folder


def _built(base: Path, tp: int, layers: int) -> Bundle:
    return read_bundle(build(spec(base, f"{tp}-{layers}", kernels="nki", k=1, tp=tp, layers=layers)))


def _run(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Counter[str]]:
    """The ids of all requests and the bits of all caches, and how often each kernel was simulated."""
    launched = Counter[str]()

    def counted(launch: Launch, operands: Any) -> Any:
        launched[launch.kernel] += 1
        return simulate(launch, operands)

    monkeypatch.setattr(custom_calls, "simulate", counted)
    graphs = XlaRunner(bundle)
    ids = [r.ids for r in Engine(graphs, engine_config(bundle)).run(REQUESTS)]
    return (ids, {name: np.asarray(array).tobytes() for name, array in graphs._state.items()}), launched


@pytest.mark.parametrize("tp", [1, 2])
def test_ids_and_caches_are_those_of_halves(base: Path, tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one rank the launch itself is simulated, on several ranks its halves are, and the graph sums."""
    halves, joined = (_built(base, tp, layers) for layers in (1, 2))
    for bundle in (halves, joined):
        graph = bundle.plan.by_key[STEP]
        proto = bytes(bundle.read(graph.file))
        assert violations(graph, proto, bundle.spec) == []
        assert (LAYERS.encode() in proto) == (bundle is joined)
    (expected, _), (found, launched) = (_run(bundle, monkeypatch) for bundle in (halves, joined))
    assert found == expected
    assert [len(ids) for ids in found[0]] == [r.max_new_tokens for r in REQUESTS]
    assert bool(launched[LAYERS]) == (tp == 1)
    # the target's third layer is alone
    assert launched["decode_attention"]


def test_the_vendor_s_frameworks_see_every_tensor_of_a_launch(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each operand has a parameter's name of its own, and each pool is aliased: frameworks look into no tuple."""
    bundle = _built(base, 1, 2)
    plain = bytes(bundle.read(bundle.plan.by_key[STEP].file))
    fake_nki.install(monkeypatch)
    of_vendor = hlo.parse(specialised(plain, tmp_path))
    texts = [json.loads(i.backend_config) for i in _calls(hlo.parse(plain))]
    configs = [json.loads(base64.b64decode(i.backend_config)) for i in _calls(of_vendor)]
    launch, config = next(pair for pair in zip(texts, configs, strict=True) if pair[0]["kernel"] == LAYERS)
    names = config["klir_binary"]["input_names"]
    assert len(set(names)) == len(names) == len(launch["operands"]) == 25
    assert names[:2] == ["x", "layers_0_0"]
    pools = [f"layers_{layer}_{which}.must_alias_input" for layer in (0, 1) for which in (8, 9)]
    assert [names[number] for number in launch["changed"]] == pools


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[[0, 1]]", "[[0, 0]]", "an all-reduce has the groups ((0, 0),), which do not share out 2 ranks"),
        ("[[0, 1]]", '[["0"]]', "kernel call whose text is no launch"),
        ("[[0, 1]]", "null", "it runs the collectives"),
        ('"#3"', '"#99"', "kernel call whose text is no launch"),
    ],
)
def test_a_forged_launch_is_refused(base: Path, old: str, new: str, said: str) -> None:
    bundle = _built(base, 2, 2)
    graph = bundle.plan.by_key[STEP]
    module = hlo.parse(bytes(bundle.read(graph.file)))
    call = next(i for i in _calls(module) if LAYERS.encode() in i.backend_config)
    assert call.backend_config.count(old.encode()) == 1
    call.backend_config = call.backend_config.replace(old.encode(), new.encode())
    found = violations(graph, module.SerializeToString(), bundle.spec)
    assert any(said in clause for clause in found), found


def _calls(module: Any) -> list[Any]:
    return [i for c in module.computations for i in c.instructions if i.custom_call_target == TARGET]
