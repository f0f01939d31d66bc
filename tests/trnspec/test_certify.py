"""`python -m trnspec certify`: equal runs pass, a planted difference is noticed where it is, the page."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from model.errors import UserError
from model.graph_io import StepInputs, StepOutputs
from model.graph_key import GraphKey, Stage
from model.logprobs import TOP
from tests.engine import machine
from tests.engine.machine import CONFIG, Machine
from trnspec.__main__ import main
from trnspec.certify import page
from trnspec.certify.comparisons import Comparison, certify, random_requests
from trnspec.engine.request import Params, Request


def score_of(visible: list[int], token: int) -> np.ndarray:
    """The token is the best one, by a margin of 1."""
    logprob = -random.Random(f"{visible} {token}").random()
    best = [(token + place) % machine.V for place in range(TOP)]
    return np.array([logprob, 1, *(logprob - place for place in range(TOP)), *best], np.float32)


def _wrong_ids(outputs: StepOutputs) -> StepOutputs:
    ids_BN = outputs.accepted_tokens
    return outputs._replace(accepted_tokens=np.where(ids_BN < 0, ids_BN, (ids_BN + 1) % machine.V))


def _last_bit(outputs: StepOutputs) -> StepOutputs:
    scores = outputs.scores.copy()
    scores[..., 0] = np.nextafter(scores[..., 0], np.float32(0))
    return outputs._replace(scores=scores)


DRAFTS = [f"drafts, at most {limit}" for limit in (1, 2, 3)]
BATCHES = [f"full batches in another order, {name}" for name in ("no drafts", "drafts of each limit")]
RECOMPUTED = [f"recomputed by prefill of {rows} rows" for rows in (128, 256)]
CACHED = [f"steps of {k} drafts as a cached prefix" for k in (0, *CONFIG.ks)]
Fault = Callable[[GraphKey, StepInputs], bool]
# the runs that are wrong, how, and the comparisons that differ
FAULTS: dict[str, tuple[Fault, Callable[[StepOutputs], StepOutputs], list[str]]] = {
    "none": (lambda key, _: False, _wrong_ids, []),
    "a step that returns scores": (
        lambda key, inputs: key.stage is Stage.VERIFY and not inputs.k_limits.any(), _wrong_ids,
        ["log-probabilities returned"],
    ),
    "a step of one draft": (
        lambda key, _: (key.stage, key.k) == (Stage.STEP, 1), _wrong_ids, [DRAFTS[0]],
    ),
    "a step of three drafts": (
        lambda key, _: (key.stage, key.k) == (Stage.STEP, 3), _wrong_ids, [*DRAFTS[1:], BATCHES[1], *RECOMPUTED],
    ),
    "a step of several requests": (
        lambda key, inputs: not key.is_prefill and (inputs.block_table[:, 0] > 0).sum() > 1, _wrong_ids,
        [*BATCHES, *RECOMPUTED],
    ),
    "a bit of 256 rows": (
        lambda key, _: (key.stage, key.rows) == (Stage.PREFILL, 256), _last_bit,
        [RECOMPUTED[1], "answers scored as prompts"],
    ),
    "a bit after a cached prefix": (
        lambda key, inputs: key.stage is Stage.PREFILL and inputs.num_tokens[0] == 1 and inputs.positions[0] % 128 > 0,
        _last_bit, CACHED,
    ),
    "a bit of prompts' scores": (
        lambda key, _: key.stage is Stage.PREFILL_LOGPROBS, _last_bit, ["answers scored as prompts"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_what_differs_is_noticed_where_it_differs(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, change, expected = FAULTS[fault]

    class Faulty(Machine):
        def run(self, key: GraphKey, inputs: StepInputs) -> StepOutputs:
            outputs = super().run(key, inputs)
            return change(outputs) if where(key, inputs) else outputs

    monkeypatch.setattr(machine, "score_of", score_of)
    rng = random.Random(1)
    requests = list(random_requests(CONFIG, 6, 8, rng))
    comparisons = certify(Faulty(), CONFIG, requests, rng)  # type: ignore[arg-type]
    different = {one.name for one in comparisons if one.ids or one.scores}
    worst = {one.name for one in comparisons if one.ids} or different
    assert [one.name for one in comparisons] == [
        "log-probabilities returned", *DRAFTS, *BATCHES, *RECOMPUTED, *CACHED, "answers scored as prompts",
    ]  # fmt: skip
    assert different >= {*expected}, different
    if change is _last_bit or not expected:
        assert different == {*expected}
        assert not any(one.ids for one in comparisons)
    assert all(one.first[1] == "1" for one in comparisons if one.name in different)
    assert all(name in page.verdict(comparisons) for name in worst)


@pytest.mark.slow
def test_a_bundle_passes(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["certify", str(bundle), "--requests", "2", "--tokens", "4", "--out", str(tmp_path / "page.md")])
    text = capsys.readouterr().out
    assert text == (tmp_path / "page.md").read_text(encoding="utf-8")
    assert text.endswith("with log-probabilities that are equal to the bit.\n")


def test_what_is_lacking_differs_or_is_refused(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "BATCH", 1)
    greedy = replace(CONFIG, greedy=True, batch=1, ks=(), prompts=((128, 512),))
    lacking = certify(Machine(greedy), greedy, [Request((5,), Params(), 3)], random.Random(0))  # type: ignore[arg-type]
    assert [one.row[1].partition(":")[0] for one in lacking] == ["skipped"] * 4 + ["2", "1", "skipped"]
    monkeypatch.setattr(page, "certify", lambda *_: [*lacking, Comparison("drafts", scores=1)])
    with pytest.raises(SystemExit, match="1"):
        main(["certify", str(tiny)])
    assert "| skipped: the bundle serves one request at a time |" in capsys.readouterr().out
    with pytest.raises(UserError, match="--tokens is 65; give a number from 2 to 64"):
        main(["certify", str(tiny), "--tokens", "65"])
    with pytest.raises(SystemExit, match="0"):
        main(["certify", "--help"])
    assert "example: python -m trnspec certify bundles/demo" in capsys.readouterr().out
