"""What is measured and compiled before any request."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trnspec.engine.ready import compile_graphs, engine_config, served_shape, step_seconds

from model.graph_key import GraphKey, Stage
from tests.engine.ahead import Watched
from tests.model.family import caches, some_graphs
from trnspec.bundle.opening import Bundle
from trnspec.engine.engine import Engine
from trnspec.engine.request import Request, Shape


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
    engine, request = Engine(held, engine_config(held.bundle), speculative), Request(tuple(range(40)), **more)
    compile_graphs(held, request, engine)
    engine.run([request])
    assert {*held.keys} <= held.prepared
    assert (Stage.PREFILL_DRAFT in {key.stage for key in held.prepared}) == speculative


# of three sequences the last position of one block, and of the second of two; the target alone runs a second row, which
# has a place behind the first one where the graph has a block for it
LAST_OF_EACH = {(block, 127) for block in (1, 2, 3, 4, 6)}
LAST_AND_NEXT = {*LAST_OF_EACH, (5, 127), (2, 0), (4, 0), (6, 0)}


@pytest.mark.parametrize(
    ("of", "places"), [(engine_config, LAST_OF_EACH), (served_shape, LAST_AND_NEXT)], ids=["every graph", "longest"]
)
def test_a_step_is_timed_at_the_end_of_its_bucket(
    family: Path, of: Callable[[Bundle], Shape], places: set[tuple[int, int]]
) -> None:
    """On a CPU the loop over tiles of keys ends at the last one that a row sees: nearer, all buckets cost the same."""
    held = some_graphs(family, "none", max_len=256)
    assert sorted(step_seconds(held, of(held.bundle))) == [(0, 128, 1), (0, 128, 3), (0, 256, 1), (0, 256, 3)]
    written = caches(held)["target_model.kv.0.k"].any(axis=(1, 3))
    assert set(zip(*(axis.tolist() for axis in written.nonzero()), strict=True)) == places


def test_what_is_served_on_a_cpu_has_no_graphs_for_fewer_keys(family: Path) -> None:
    """All prompts and steps of a request have a graph, to the end of its length; on a device there are all of them."""
    bundle = some_graphs(family, "none", max_len=256).bundle
    every, served = engine_config(bundle), served_shape(bundle)
    assert every.buckets == (128, 256)
    assert served.buckets == (256,)
    assert served.prompts == tuple((rows, 256) for rows in (32, 48, 64, 96, 128))
    assert [key for key in bundle.plan.by_key if served.has(key)] == [k for k in bundle.plan.by_key if k.bucket == 256]
    assert served_shape(bundle, "neuron") == engine_config(bundle, "neuron")
    assert engine_config(bundle, "neuron").prompts == ((128, 128), (128, 256)), "a device takes no smaller chunks"
    small = some_graphs(family, "none").bundle
    assert engine_config(small, "neuron").prompts == small.spec.prompts == ((32, 128),), "unless there are no others"
    for length in (1, 100, 255):
        for shape in (every, served):
            chunks = list(shape.chunks(length))
            assert all((chunk.rows, chunk.keys) in shape.prompts for chunk in chunks)
            assert chunks[-1].last == length
