"""What is measured and compiled before any request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from model.graph_key import GraphKey, Stage
from model.serving.engine import Engine
from model.serving.ready import compile_graphs, shape_of, step_seconds
from model.serving.request import Request
from tests.model.ahead import Watched
from tests.model.family import caches, some_graphs


class Prepared(Watched):
    """Graphs, and the keys of those that were prepared before they ran."""

    def __init__(self, graphs: Any) -> None:
        super().__init__(graphs)
        self.bundle, self.prepared = graphs.bundle, set[GraphKey]()

    def prepare(self, key: GraphKey) -> None:
        self.prepared.add(key)


@pytest.mark.parametrize("more", [{}, {"logprobs": 0}], ids=["plain", "asking"])
@pytest.mark.parametrize("speculative", [True, False], ids=["pair", "alone"])
def test_what_a_request_runs_is_prepared(family: Path, more: dict[str, Any], speculative: bool) -> None:
    held: Any = Prepared(some_graphs(family))
    engine, request = Engine(held, shape_of(held.bundle), speculative), Request(tuple(range(40)), **more)
    compile_graphs(held, request, engine)
    engine.run([request])
    assert {*held.keys} <= held.prepared
    assert (Stage.PREFILL_DRAFT in {key.stage for key in held.prepared}) == speculative


def test_a_step_is_timed_at_the_end_of_its_bucket(family: Path) -> None:
    """On a CPU the loop over tiles of keys ends at the last one that a row sees: nearer, all buckets cost the same."""
    held = some_graphs(family, "none", max_len=256)
    assert sorted(step_seconds(held)) == [(0, 128, 1), (0, 128, 3), (0, 256, 1), (0, 256, 3)]
    written = caches(held)["target_model.kv.0.k"].any(axis=(1, 3))
    # of three sequences: the last position of one block, and of the second of two
    assert written[:, 127].nonzero()[0].tolist() == [1, 2, 3, 4, 6]
    assert not written[:, :127].any()
