"""The compiled graph of a bundle with simulated NKI kernels as custom calls: the reference's tokens.

The two backends round exp, log and sums differently, so that a near-tie could fall on the other side; none does here.
"""

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
from tests.last_few import last_few
from tests.model.family import AsTheyRun, untraced
from trnspec.bundle.opening import read_bundle
from trnspec.bundle.plan import make_plan
from trnspec.engine.config import engine_config
from trnspec.engine.engine import Engine
from trnspec.engine.request import Params, Request
from trnspec.runtime.xla import XlaRunner

# the one that filters is the longest: while it runs no step needs the graph without filters, which XLA would compile
REQUESTS = [
    Request((9, 2, 7), Params(), 6),
    Request(tuple(range(60, 20, -1)), Params(0.8, seed=7), 6),
    Request((1, 2, 3, 1, 2, 3), Params(1.3, seed=3), 5),
    Request((4,), Params(1.0, 20, 0.9, 0.02, 2**63 + 11), 9),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair whose draft is right now and then, with the head dim that attention's kernel takes as it is."""
    folder = tmp_path_factory.mktemp("simulated")
    sizes: dict[str, Any] = {"scale": 0.3, "hidden_size": 64, "head_dim": 64, "eos_token_id": None}
    for name, layers in (("target", 2), ("draft", 1)):
        write_model(folder / name, 5, num_hidden_layers=layers, **sizes)
    return folder


@last_few
def _graphs(folder: Path, kernels: str, k: int, batch: int, dtype: str = "fp32") -> XlaRunner:
    plan = spec(folder, f"{kernels}{k}-{batch}-{dtype}", kernels=kernels, k=k, batch=batch, dtype=dtype)
    return AsTheyRun(read_bundle(untraced(plan)))


def _ids(g: XlaRunner, speculative: bool = True, requests: list[Request] = REQUESTS) -> list[list[int]]:
    return [r.ids for r in Engine(g, engine_config(g.bundle), speculative).run(requests)]


@pytest.mark.slow
def test_tokens_are_the_reference_s(folder: Path) -> None:
    """Greedy, sampled and filtered requests, as many at a time as there are, and fewer; the target too."""
    expected = _ids(_graphs(folder, "reference", 3, 2))
    for k, batch in ((7, 4), (3, 2)):
        results = Engine(g := _graphs(folder, "nki", k, batch), engine_config(g.bundle)).run(REQUESTS)
        assert [r.ids for r in results] == expected
        assert 0 < sum(sum(r.accepted) for r in results) < sum(sum(r.drafted) for r in results)
    assert _ids(_graphs(folder, "nki", 3, 2), False) == expected
    g = _graphs(folder, "nki", 3, 2, "bf16")
    assert _ids(g, False, REQUESTS[:3]) == _ids(g, True, REQUESTS[:3])


def test_the_graph_has_the_calls(folder: Path) -> None:
    """Each layer's attention, the noise, the samples and the acceptance are calls by the compiler's name."""
    plans = (make_plan(spec(folder, kernels=kernels).bundle) for kernels in ("nki", "reference"))
    fused, plain = (lower_graph(plan.spec, plan.by_key[GraphKey(Stage.STEP, 3, 128)]) for plan in plans)
    for kernel in ("verify_attention", "gumbel_noise", "coupled_sample", "weights_above", "accept_drafts"):
        assert f'"kernel": "{kernel}"'.encode() in fused
    assert (TARGET.encode() in fused, TARGET.encode() in plain) == (True, False)


@pytest.mark.slow
def test_a_failure_inside_a_call_is_one_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(launch: Launch, arrays: Any) -> Any:
        raise ValueError("the floor is on fire")

    g = _graphs(folder, "nki", 1, 1)
    with monkeypatch.context() as patched:
        patched.setattr(custom_calls, "simulate", broken)
        with pytest.raises(UserError, match="a simulated kernel refused its operands: the floor is on fire"):
            _ids(g)
    assert _ids(g, True, REQUESTS[:1]) == _ids(_graphs(folder, "reference", 3, 2))[:1]
