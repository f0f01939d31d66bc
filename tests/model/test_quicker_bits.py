"""What the runtime changes of a graph on a CPU: every output and every row of every cache has the bits of the graph as
the bundle has it, with nothing said quicker; and a chunk's rows have the bits of any other chunk's."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from model.bundle.opening import Bundle
from model.graph_io import StepInputs, StepOutputs
from model.graph_key import GraphKey
from model.serving import quicker
from model.serving.engine import Engine
from model.serving.request import Params
from model.serving.runtime import Graphs
from tests.model.demo_bundle import PROMPTS, graphs, request, shape_of


class Recorder(Graphs):
    """Graphs that remember the keys of what they ran, said quicker or plain."""

    def __init__(self, bundle: Bundle, quick: bool) -> None:
        super().__init__(bundle)
        self.quick, self.keys = quick, list[GraphKey]()

    def _executable(self, key: GraphKey) -> Any:
        with contextlib.nullcontext() if self.quick else mock.patch.object(quicker, "rewrite"):
            return super()._executable(key)

    def run(self, key: GraphKey, inputs: StepInputs) -> StepOutputs:
        self.keys.append(key)
        return super().run(key, inputs)


@pytest.fixture(scope="module")
def both(base: Path) -> tuple[Recorder, Recorder]:
    """The same bundle said quicker, and plain."""
    bundle = graphs(base, k=2).bundle
    return Recorder(bundle, True), Recorder(bundle, False)


def test_buckets_that_come_and_go_change_no_bit(both: tuple[Recorder, Recorder]) -> None:
    """Short answers beside long ones: the bucket grows with the long ones and shrinks when they have left."""
    lengths = (150, 140, 150, 140, 8, 8, 8, 8, 150, 8, 8, 8)
    ids: list[list[list[int]]] = []
    for g in both:
        asked = [request(g, PROMPTS[i], Params(0.8 * (i % 2), seed=i), n) for i, n in enumerate(lengths)]
        asked = [dataclasses.replace(a, stop_ids=()) for a in asked]
        ids.append([r.ids for r in Engine(g, shape_of(g.bundle)).run(asked)])
        changes = [b.bucket for a, b in itertools.pairwise(g.keys) if a.bucket != b.bucket]
        # it grew and shrank again, more than once
        assert min(changes.count(128), changes.count(256)) > 1
    assert ids[0] == ids[1]
    _same_states(both)


def test_a_short_chunk_has_the_bits_of_a_long_one(both: tuple[Recorder, Recorder]) -> None:
    """Prompts of up to 32 ids by their own graph, and by the one of a whole tile, which pads them with more rows."""
    asked = [request(both[0], PROMPTS[i], Params(0.8 * (i % 2), seed=i), 20) for i in range(4)]
    asked = [dataclasses.replace(a, stop_ids=()) for a in asked]
    assert max(len(a.ids) for a in asked) <= 32
    ids: list[list[list[int]]] = []
    for g, rows in zip(both, (32, 128), strict=True):
        g.keys.clear()
        prompts = tuple(p for p in shape_of(g.bundle).prompts if p[0] == rows)
        ids.append([r.ids for r in Engine(g, dataclasses.replace(shape_of(g.bundle), prompts=prompts)).run(asked)])
        assert [key.rows for key in g.keys if key.is_prefill] == [rows] * len(asked)
    assert ids[0] == ids[1]


def _same_states(both: tuple[Recorder, Recorder]) -> None:
    for name, state in both[0]._state.items():
        assert np.array_equal(np.asarray(state), np.asarray(both[1]._state[name])), name
