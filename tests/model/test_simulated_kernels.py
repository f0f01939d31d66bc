"""Graphs with simulated NKI kernels as custom calls; tests/compile/test_ranks.py has their tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compile.graph.trace import lower_graph
from model.errors import UserError
from model.graph_key import GraphKey, Stage
from model.nki import custom_calls
from model.nki.launches import TARGET, Launch
from tests.compile.tiny import spec, write_model
from tests.model.family import AsTheyRun, untraced
from trnspec.bundle.opening import read_bundle
from trnspec.bundle.plan import make_plan
from trnspec.engine.config import engine_config
from trnspec.engine.engine import Engine
from trnspec.engine.request import Request


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair with the head dim that attention's kernel supports unpadded."""
    folder = tmp_path_factory.mktemp("simulated")
    sizes: dict[str, Any] = {"scale": 0.3, "hidden_size": 64, "head_dim": 64, "eos_token_id": None}
    for name, layers in (("target", 2), ("draft", 1)):
        write_model(folder / name, 5, num_hidden_layers=layers, **sizes)
    return folder


def test_the_graph_has_the_calls(folder: Path) -> None:
    """Each layer's attention, the noise, the samples and the acceptance are calls by the compiler's name."""
    plans = (make_plan(spec(folder, kernels=kernels).bundle) for kernels in ("nki", "reference"))
    fused, plain = (lower_graph(plan.spec, plan.by_key[GraphKey(Stage.STEP, 3, 128)]) for plan in plans)
    for kernel in ("verify_attention", "gumbel_noise", "coupled_sample", "weights_above", "accept_drafts"):
        assert f'"kernel": "{kernel}"'.encode() in fused
    assert (TARGET.encode() in fused, TARGET.encode() in plain) == (True, False)


@pytest.mark.slow
def test_a_failure_inside_a_call_is_one_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next request is served, with the tokens of the reference; test_ranks.py has more of these."""

    def broken(launch: Launch, arrays: Any) -> Any:
        raise ValueError("the floor is on fire")

    request, engines = Request((9, 2, 7), max_new_tokens=6), []
    for kernels in ("nki", "reference"):
        runner = AsTheyRun(read_bundle(untraced(spec(folder, kernels, kernels=kernels, k=1, batch=1))))
        engines.append(Engine(runner, engine_config(runner.bundle)))
    with monkeypatch.context() as patched:
        patched.setattr(custom_calls, "simulate", broken)
        with pytest.raises(UserError, match="a simulated kernel refused its operands: the floor is on fire"):
            engines[0].run([request])
    found, expected = (engine.run([request])[0].ids for engine in engines)
    assert found == expected
