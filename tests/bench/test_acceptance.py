"""Acceptance by position and by k: shares and tokens a step of answers, the control's noise, what must be equal."""

from __future__ import annotations

import re
from typing import Any, cast
from xml.etree import ElementTree

import numpy as np
import pytest

from bench import acceptance as bench
from bench.acceptance import COUPLED, OWN, Asked, OwnNoise
from bench.speedup import ENTROPIES
from model.graph_io import StepInputs
from model.serving.request import Params, Request, Result
from model.serving.runtime import Graphs

ASKED = [Asked("open", Request((1,), Params(t))) for t in (0.0, 0.6)]


def _result(ids: list[int], *accepted: int) -> Result:
    result = Result(ids)
    for count in accepted:
        result.count(2, 2, count)
    return result


# by k, for each of the requests
RESULTS = {
    1: [_result([1, 2, 3, 4, 5], 1, 1), _result([1, 2, 3], 0, 0)],
    2: [_result([1, 2, 3, 4, 5], 2, 0), _result([1, 2, 3], 0, 0)],
}


def test_shares_are_of_the_steps_of_the_largest_k_and_tokens_of_each() -> None:
    greedy, drawn = bench._rows(ASKED, RESULTS)
    assert (greedy["temperature"], greedy["steps"], greedy["by_position"]) == (0.0, 2, [0.5, 0.5])
    assert greedy["tokens_per_step"] == {1: 2.0, 2: 2.0}
    assert (drawn["by_position"], drawn["tokens_per_step"]) == ([0.0, 0.0], {1: 1.0, 2: 1.0})


@pytest.mark.parametrize("different", [False, True])
def test_answers_are_compared_over_drafters_noise_and_k(different: bool) -> None:
    rows = [{"drafter": d} | row for d in ("chain", "medusa") for row in bench._rows(ASKED, RESULTS)]
    if different:
        rows[3]["ids"][1] = [[1, 2, 4]]
    assert bench.differences(rows) == different
    assert "ids" not in rows[0]


def test_the_control_changes_the_drafts_seeds_and_nothing_else() -> None:
    class Recorded:
        def __init__(self) -> None:
            self.seen: list[tuple[str, StepInputs]] = []

        def run(self, tag: str, bucket: int, inputs: StepInputs) -> None:
            self.seen.append((tag, inputs))

        draft = run

    graphs, inputs = Recorded(), StepInputs(*(np.array([[n]]) for n in range(8)))
    noise = OwnNoise(cast("Graphs", graphs))
    noise.draft("draft", 128, inputs)
    noise.run("verify", 128, inputs)
    (_, drafted), (_, verified) = graphs.seen
    assert verified is inputs
    assert (drafted.seeds != inputs.seeds).all()
    assert drafted._replace(seeds=inputs.seeds) == inputs


def test_the_picture_has_a_panel_a_class_and_temperature_and_a_dashed_line_for_the_control() -> None:
    def row(drafter: str, entropy: str, temperature: float, noise: str) -> dict[str, Any]:
        about = {"drafter": drafter, "entropy": entropy, "temperature": temperature, "noise": noise}
        return about | {"tokens_per_step": {1: 1.5, 3: 2.0}, "by_position": [0.5, 0.25]}

    rows = [row(d, e, t, COUPLED) for d in ("chain", "ngram") for e in ENTROPIES for t in (0.0, 0.6)]
    rows += [row("chain", e, 0.6, OWN) for e in ENTROPIES]
    drawing = bench.picture(rows)
    panels = ElementTree.fromstring(drawing).findall("{http://www.w3.org/2000/svg}svg")
    assert len({(p.get("x"), p.get("y")) for p in panels}) == 4
    assert len(re.findall("<polyline[^>]*stroke-dasharray", drawing)) == 2
    assert "| chain | open | 0.6 | its own | 1.50 |  | 2.00 |" in bench.table(rows)
