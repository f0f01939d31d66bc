"""What the runtime changes of a graph on a CPU: every output and every row of every cache has the bits of the graph as
the bundle has it, with whole caches and with nothing said quicker."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from jax._src.interpreters import mlir
from jaxlib.mlir import ir

from model.bundle.graph_spec import GraphSpec, TensorSpec
from model.bundle.opening import Bundle
from model.graph_io import StepInputs, StepOutputs
from model.graph_key import GraphKey, Stage
from model.serving import prefixes, quicker
from model.serving.engine import Engine
from model.serving.ready import shape_of
from model.serving.request import Params, Request
from model.serving.runtime import Graphs
from tests.model.family import graphs


def _cache(name: str = "target_model.kv.0.k") -> TensorSpec:
    return TensorSpec(name, (2, 1, 512, 4), "float32")


def _cut(body: str, result: str) -> str | None:
    """A module of one cache after it was cut to 128 positions; None if it reads the cache in an unknown way."""
    text = f"""func.func @main(%cache: tensor<2x1x512x4xf32>) -> {result} {{ {body} }}"""
    graph = GraphSpec(GraphKey(Stage.STEP, 0, 128), (), (), (_cache(),), (), {})
    with mlir.make_ir_context(), ir.Location.unknown():
        module = ir.Module.parse(text)
        if not prefixes.cut_caches(ir.SymbolTable(module.operation)["main"].regions[0].blocks[0], graph, 128):
            return None
        prefixes.retype(module)
        assert module.operation.verify()
        return str(module)


def test_a_slice_of_the_bucket_is_the_cache_itself() -> None:
    part = "tensor<2x1x128x4xf32>"
    body = f"%a = stablehlo.slice %cache [0:2, 0:1, 0:128, 0:4] : (tensor<2x1x512x4xf32>) -> {part} return %a : {part}"
    cut = _cut(body, part)
    assert cut is not None
    assert "512" not in cut


@pytest.mark.parametrize(
    ("body", "result"),
    [
        (
            "%a = stablehlo.negate %cache : tensor<2x1x512x4xf32> return %a : tensor<2x1x512x4xf32>",
            "tensor<2x1x512x4xf32>",
        ),
        (
            "%a = stablehlo.slice %cache [0:2, 0:1, 128:256, 0:4] : (tensor<2x1x512x4xf32>) -> tensor<2x1x128x4xf32> "
            "return %a : tensor<2x1x128x4xf32>",
            "tensor<2x1x128x4xf32>",
        ),
    ],
    ids=["all-of-it", "a-later-part"],
)
def test_a_graph_that_reads_more_than_its_bucket_is_left_whole(body: str, result: str) -> None:
    assert _cut(body, result) is None


class Recorder(Graphs):
    """Graphs that remember the buckets of what they ran, on cut caches and said quicker, or plain."""

    def __init__(self, bundle: Bundle, cut: bool) -> None:
        super().__init__(bundle)
        self._cut, self.buckets = cut, list[int]()

    def _executable(self, key: GraphKey) -> Any:
        with contextlib.nullcontext() if self._cut else mock.patch.object(quicker, "rewrite"):
            return super()._executable(key)

    def run(self, key: GraphKey, inputs: StepInputs) -> StepOutputs:
        self.buckets.append(key.bucket)
        return super().run(key, inputs)


@pytest.fixture(scope="module")
def both(family: Path) -> tuple[Recorder, Recorder]:
    """The same bundle on cut caches and said quicker, and plain on whole ones."""
    bundle = graphs(family, max_len=256).bundle
    return Recorder(bundle, True), Recorder(bundle, False)


def _prompt(number: int) -> tuple[int, ...]:
    """Of 12 to 32 ids."""
    return tuple((7 * number + 5 * n * n) % 64 for n in range(12 + 3 * number % 21))


def test_buckets_that_come_and_go_change_no_bit(both: tuple[Recorder, Recorder]) -> None:
    """Short answers beside long ones: the bucket grows with the long ones and shrinks when they have left."""
    lengths = (150, 140, 150, 140, 8, 8, 8, 8, 150, 8, 8, 8)
    ids: list[list[list[int]]] = []
    for g in both:
        asked = [Request(_prompt(i), Params(0.8 * (i % 2), seed=i), n) for i, n in enumerate(lengths)]
        ids.append([r.ids for r in Engine(g, shape_of(g.bundle)).run(asked)])
        changes = [b for a, b in itertools.pairwise(g.buckets) if a != b]
        # it grew and shrank again, more than once
        assert min(changes.count(128), changes.count(256)) > 1
    assert both[0]._cut
    assert ids[0] == ids[1]
    _same_states(both)


def test_a_short_prompts_graph_has_the_bits_of_a_long_ones(both: tuple[Recorder, Recorder]) -> None:
    """Prompts of up to 32 ids by their own graph, by that of 64 rows, and by the one of a whole tile: more padding."""
    asked = [Request(_prompt(i), Params(0.8 * (i % 2), seed=i), 20) for i in range(8)]
    ids: list[list[list[int]]] = []
    assert shape_of(both[0].bundle).short_prompts == (32, 64)
    for g, short in ((both[0], (64,)), (both[0], (32, 64)), (both[1], ())):
        g.buckets.clear()
        shape = dataclasses.replace(shape_of(g.bundle), short_prompts=short)
        ids.append([r.ids for r in Engine(g, shape).run(asked)])
        assert g.buckets.count(min(short, default=128)) >= len(asked)
    assert ids[0] == ids[1] == ids[2]
    # every slot's last request has at least so many rows, its newest id's apart
    _same_states(both, min(len(a.ids) for a in asked) + 18)


def _same_states(both: tuple[Recorder, Recorder], rows: int | None = None) -> None:
    """Every state of the two is the same, its caches in the first `rows`."""
    for g in both:
        g._fit(g.bundle.spec.max_len)
    for name, state in both[0]._state.items():
        one, other = (np.asarray(held)[..., :rows, :] for held in (state, both[1]._state[name]))
        assert np.array_equal(one, other), name
