"""What the runtime changes of a graph on a CPU: every output and every row of every cache has the bits of the graph as
the bundle has it, with nothing said quicker; and a chunk's rows have the bits of any other chunk's."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxlib.mlir import ir

from compile.graph.torchax_seam import interop
from compile.graph.trace import TracedOps
from model.attention import KEY_TILE, ROW_TILE, verify_attention, weighted
from model.bundle.opening import Bundle
from model.cache import Cache, Placement
from model.graph_io import StepInputs, StepOutputs
from model.graph_key import GraphKey
from model.serving import pjrt, quicker, sums
from model.serving.engine import Engine
from model.serving.pjrt import SAME_BITS
from model.serving.ready import shape_of
from model.serving.request import Params, Request
from model.serving.runtime import Graphs
from tests.executables import COMPILE
from tests.model.family import graphs

pytestmark = pytest.mark.released_code


class Recorder(Graphs):
    """Graphs that remember the keys of what they ran, said quicker or plain."""

    def __init__(self, bundle: Bundle, quick: bool) -> None:
        super().__init__(bundle)
        self.quick, self.keys = quick, list[GraphKey]()

    def _executable(self, key: GraphKey) -> Any:
        if self.quick:
            return super()._executable(key)
        # not shared: the session has the graph as it is said quicker
        with mock.patch.object(quicker, "rewrite"), mock.patch.object(pjrt, "compile_hlo", COMPILE):
            return super()._executable(key)

    def run(self, key: GraphKey, inputs: StepInputs) -> StepOutputs:
        self.keys.append(key)
        return super().run(key, inputs)


@pytest.fixture(scope="module")
def both(family: Path) -> tuple[Recorder, Recorder]:
    """The same bundle said quicker, and plain."""
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
        changes = [b.bucket for a, b in itertools.pairwise(g.keys) if a.bucket != b.bucket]
        # it grew and shrank again, more than once
        assert min(changes.count(128), changes.count(256)) > 1
    assert ids[0] == ids[1]
    _same_states(both)


def test_a_short_chunk_has_the_bits_of_a_long_one(both: tuple[Recorder, Recorder]) -> None:
    """Prompts of up to 32 ids by their own graph, by that of 64 rows, and by the one of a whole tile: more padding."""
    asked = [Request(_prompt(i), Params(0.8 * (i % 2), seed=i), 20) for i in range(8)]
    ids: list[list[list[int]]] = []
    for g, rows in ((both[0], 64), (both[0], 32), (both[1], 128)):
        g.keys.clear()
        prompts = tuple(p for p in shape_of(g.bundle).prompts if p[0] == rows)
        ids.append([r.ids for r in Engine(g, dataclasses.replace(shape_of(g.bundle), prompts=prompts)).run(asked)])
        assert [key.rows for key in g.keys if key.is_prefill] == [rows] * len(asked)
    assert ids[0] == ids[1] == ids[2]


def _weighted(quick: bool, *given: np.ndarray) -> list[np.ndarray]:
    """Attention's sums of q, keys and values, compiled quicker or plain."""

    def run(q_BHND: Any, k: Any, v: Any, positions_BN: Any, keys_S: Any) -> Any:
        return weighted(q_BHND, Cache(k, v), Placement(positions_BN, keys_S), TracedOps(1))

    return _compiled(run, quick, *given)


def _compiled(run: Any, quick: bool, *given: np.ndarray) -> list[np.ndarray]:
    lowered = jax.jit(lambda *arrays: interop.call_torch(run, *arrays)).lower(*map(jnp.asarray, given))
    module = lowered.compiler_ir("stablehlo")
    with module.context, ir.Location.unknown():
        sums.in_order(module)
        if quick:
            quicker.rewrite(module)
    return [np.asarray(a) for a in lowered.compile(compiler_options=SAME_BITS)(*given)]


@pytest.mark.parametrize("last", [3, KEY_TILE - 1, KEY_TILE, 2 * KEY_TILE + 50])
def test_tiles_that_no_row_sees_are_left_out(last: int) -> None:
    """NaN in them shows which were computed; of two sequences the longer one counts."""
    rng, rows, seen = np.random.default_rng(0), 4, KEY_TILE * (last // KEY_TILE + 1)
    shape = (2, 1, 4 * KEY_TILE, 32)
    q_BHND, k, v = (rng.normal(0, 1, s).astype(np.float32) for s in ((2, 2, rows, 32), shape, shape))
    positions_BN = np.array([[0] * rows, range(last + 1 - rows, last + 1)], np.int32)
    placed = positions_BN, np.arange(4 * KEY_TILE, dtype=np.int32)
    plain = _weighted(False, q_BHND, k, v, *placed)
    v[:, :, seen:] = np.nan
    assert all(map(np.array_equal, _weighted(True, q_BHND, k, v, *placed), plain))
    assert np.isnan(_weighted(False, q_BHND, k, v, *placed)[0]).all()


def test_a_chunk_s_first_rows_end_at_their_own_last_tile() -> None:
    """NaN in the values of later rows does not reach them, and they have the bits of a chunk without these."""
    rng, slots = np.random.default_rng(0), 2 * ROW_TILE
    q, k, v = (rng.normal(0, 1, (1, heads, slots, 32)).astype(np.float32) for heads in (4, 2, 2))
    v[:, :, ROW_TILE:] = np.nan
    nothing = np.zeros_like(k)

    def chunk(q_BHND: Any, k: Any, v: Any, cache_k: Any, cache_v: Any, positions_BN: Any, keys_S: Any) -> Any:
        return verify_attention(TracedOps(1), q_BHND, (k, v), Cache(cache_k, cache_v), Placement(positions_BN, keys_S))

    def out(rows: int, quick: bool) -> np.ndarray:
        placed = np.arange(rows, dtype=np.int32)[None], np.arange(slots, dtype=np.int32)
        return _compiled(chunk, quick, *(a[:, :, :rows] for a in (q, k, v)), nothing, nothing, *placed)[0]

    whole, first = out(slots, True), out(ROW_TILE, True)
    assert np.array_equal(whole[:, :, :ROW_TILE], first)
    assert np.isfinite(first).all()
    assert np.isnan(whole[:, :, ROW_TILE:]).all()
    assert np.isnan(out(slots, False)).all()


def _same_states(both: tuple[Recorder, Recorder]) -> None:
    for name, state in both[0]._state.items():
        assert np.array_equal(np.asarray(state), np.asarray(both[1]._state[name])), name
