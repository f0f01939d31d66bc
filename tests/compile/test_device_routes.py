"""What the device check asks of every route: a right device passes, and each planted fault is seen."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from compile.device_check import requests, routes
from compile.device_check.judge import Drawing, Judge, _short
from compile.device_check.requests import asked, judged
from compile.neuron import sdk as toolchain
from compile.neuron.eager import EagerRanks
from compile.neuron.flags import FUSED, PREFILL
from compile.neuron.sdk import nxdi_tags
from compile.spec import Recipe
from model.errors import UserError
from model.graph_io import StepInputs, StepOutputs
from model.graph_key import GraphKey, Stage
from tests.model.demo_bundle import ROOT, graphs
from tests.model.family import AsTheyRun, untraced
from trnspec.bundle.opening import read_bundle
from trnspec.bundle.plan import make_plan
from trnspec.runtime.xla import XlaRunner

TARGET = ROOT / "demo/target"
MAX_LEN, BORDER, VOCABULARY = 256, 128, 2048


class Emitted(NamedTuple):
    """The ids (B, N) of a run, their positions, the bucket, and how many ids a prompt has, 0 in a step."""

    ids: np.ndarray
    positions: np.ndarray
    bucket: int
    prompt: int


# the ids that a device gets wrong
FAULTS: dict[str, Callable[[Emitted], Any]] = {
    "from position 40 on": lambda e: e.positions >= 40,
    "after prompts over 25 ids": lambda e: np.full(e.ids.shape, e.prompt > 25),
    "rows 3 and 4": lambda e: np.arange(len(e.ids))[:, None] >= np.full(e.ids.shape, 2),
    "one id": lambda e: e.ids == 221,
    "in the second bucket": lambda e: np.full(e.ids.shape, e.bucket > BORDER),
    # NxDI's host goes no further than this before a step
    "at the last positions": lambda e: e.positions >= MAX_LEN - 8 if e.prompt < 0 else e.positions == MAX_LEN - 1,
}


def _wrong(fault: str, emitted: Emitted) -> np.ndarray:
    ids = emitted.ids
    return np.where((ids >= 0) & FAULTS[fault](emitted), (ids + 1) % VOCABULARY, ids)


class Planted:
    """A bundle's graphs on the CPU, with a fault in what they emit."""

    def __init__(self, held: XlaRunner, fault: str) -> None:
        self.held, self.fault = held, fault

    def run(self, key: GraphKey, inputs: StepInputs) -> StepOutputs:
        if self.fault == "nothing is accepted":
            return self.held.run(key, inputs._replace(k_limits=np.zeros_like(inputs.k_limits)))
        out = self.held.run(key, inputs)
        ids, known = np.asarray(out.accepted), int(np.asarray(inputs.attention_mask)[0].sum())
        first = np.array([[known]]) if key.is_prefill else 1 + np.asarray(inputs.position_ids)[:, :1]
        prompt = known if key.is_prefill else 0
        ids = _wrong(self.fault, Emitted(ids, first + np.arange(ids.shape[1]), key.bucket, prompt))
        count = (ids >= 0).sum(-1, keepdims=True)
        return out._replace(accepted=ids, next_ids=np.take_along_axis(ids, np.maximum(count - 1, 0), -1))

    def draft(self, key: GraphKey, inputs: StepInputs) -> Any:
        assert key.stage is Stage.PREFILL_DRAFT, "no request is asking"
        return self.held.draft(key, inputs)

    def clear(self, slot: int, blocks: Sequence[int]) -> None:
        self.held.clear(slot, blocks)


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> XlaRunner:
    """The bundle that the tests of the server share: k 7, batch 4, length 256, fp32."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "demo_bundles"
    folder.mkdir(exist_ok=True)
    return graphs(folder)


def _judged(held: XlaRunner, fault: str = "") -> dict[str, Any]:
    device = Planted(held, fault) if fault else held
    of_device, of_cpu = (routes.graphs_route(held.bundle, runner) for runner in (device, held))
    return judged(held.bundle.plan, TARGET, of_device, of_cpu)


def test_a_right_device_passes_and_has_drawn_every_id(held: XlaRunner) -> None:
    facts = _judged(held)
    assert facts["different_ids"] == VOCABULARY
    assert facts["near_ties"] <= facts["ids"] / 1000
    assert facts["tolerance"] < 1e-2


@pytest.mark.parametrize("fault", [*FAULTS, "nothing is accepted"])
def test_a_planted_fault_is_seen(fault: str, held: XlaRunner) -> None:
    with pytest.raises(UserError, match=r"short of the drawn one's|steps"):
        _judged(held, fault)


def test_a_right_device_in_bf16_passes_on_any_number_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks round other sums than one: ids differ at near ties, and after them. Of the hot requests one round."""
    monkeypatch.setattr(requests, "asked", lambda plan: islice(asked(plan), 3 * plan.spec.batch))
    two = AsTheyRun(read_bundle(untraced(routes.demo("bf16", tmp_path, tp=2, recipe=Recipe()))))
    facts = _judged(two)
    assert facts["tolerance"] > 1e-2
    assert facts["near_ties"] <= facts["ids"] / 20


class Traced:
    """The model of a build as NxDI's host meets it, run eagerly, with a fault in what it emits."""

    def __init__(self, name: str, work: Path, fault: str = "") -> None:
        self.plan, self.fault = make_plan(routes.demo(name, work).bundle), fault

    def load(self, path: Path, shards: list[dict[str, torch.Tensor]]) -> Traced:
        self.ranks = EagerRanks(self.plan, nxdi_tags(self.plan), shards)
        return self

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        prefill = inputs[0].shape[1] > 1
        ids, *others = self.ranks(PREFILL if prefill else FUSED, inputs)
        if not self.fault:
            return [ids, *others]
        known = int(inputs[1][0].sum())
        first = np.array([[known]]) if prefill else 1 + inputs[2][:, :1].numpy()
        # its host goes less far than ours
        emitted = Emitted(ids.numpy(), first + np.arange(ids.shape[1]), inputs[1].shape[1], known if prefill else -1)
        wrong = torch.from_numpy(_wrong(self.fault, emitted))
        count = (wrong >= 0).sum(-1, keepdim=True)
        return [wrong, wrong.gather(-1, (count - 1).clamp(min=0)), *others[1:]]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """The step `requests` of a build, whose device has a fault or none."""

    def run(name: str, fault: str = "", rounds: int = 2) -> dict[str, Any]:
        monkeypatch.setattr(toolchain, "require", lambda *_: None)
        monkeypatch.setattr(toolchain, "build_model", lambda plan, out, work, flags: out.write_bytes(b"model"))
        monkeypatch.setattr(toolchain, "run_model", Traced(name, tmp_path, fault).load)
        monkeypatch.setattr(requests, "asked", lambda plan: islice(asked(plan), rounds * plan.spec.batch))
        assert routes.model(name, tmp_path)["bytes"] == 5
        return routes.requests(name, tmp_path)

    return run


@pytest.mark.parametrize("name", ["tp 1", "draft groups", "bf16"])
def test_a_right_model_pt_passes(name: str, model: Callable[..., dict[str, Any]]) -> None:
    facts = model(name, rounds=3)
    assert facts["near_ties"] <= facts["ids"] / 20
    assert facts["different_ids"] > 400


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_of_model_pt_is_seen(fault: str, model: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(UserError, match="short of the drawn one's"):
        model("tp 1", fault, rounds=4)


def test_ids_at_a_filter_s_border_may_be_drawn_and_no_others() -> None:
    """Every id behind one prompt: with next to no tolerance only the drawn one, with a wide one some that are near."""
    judge, drawing = Judge(TARGET, "fp32"), Drawing(top_k=20, top_p=0.9, temperature=0.8, seed=(1, 2))
    with torch.no_grad():
        logits_RV = judge._logits(judge._exact, list(range(40, 60)))[-1:].expand(VOCABULARY, -1)
    positions, ids = torch.full((VOCABULARY,), 20), torch.arange(VOCABULARY)
    right, near = (_short(logits_RV, drawing, positions, ids, t) <= t for t in (1e-6, 0.5))
    kept = logits_RV[0] >= logits_RV[0].topk(20).values[-1] - 0.5
    assert int(right.sum()) == 1
    assert 1 < int(near.sum()) <= int(kept.sum())
    assert bool((near & ~kept).any()) is False
    assert "is no id" in judge.fault((1,), [VOCABULARY], drawing)
