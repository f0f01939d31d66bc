"""What the runtime changes of a graph on a CPU: every output and every row of every cache has the bits of the graph as
the bundle has it, with nothing said quicker but its own exp in attention; and a chunk's rows have the bits of any other
chunk's."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.interpreters import mlir
from jaxlib.mlir import ir

from compile.graph.torchax_seam import interop
from compile.graph.trace import TracedOps
from model.attention import KEY_TILE, attended, verify_attention
from model.cache import Cache, Placement
from model.graph_io import StepInputs, StepOutputs
from model.graph_key import GraphKey, Stage
from model.graph_spec import TensorSpec
from tests.executables import exp_of_the_graph
from tests.model.family import caches, graphs
from trnspec.bundle.opening import Bundle
from trnspec.engine.engine import Engine
from trnspec.engine.ready import shape_of
from trnspec.engine.request import Params, Request
from trnspec.runtime import block_attention, filter_branch, key_columns, quicker, sums
from trnspec.runtime.pjrt import SAME_BITS
from trnspec.runtime.xla import Graphs

pytestmark = pytest.mark.released_code


class Recorder(Graphs):
    """Graphs that remember the keys of what they ran, said quicker or plain, with keys as a bundle has them."""

    def __init__(self, bundle: Bundle, quick: bool) -> None:
        self.quick, self.keys = quick, list[GraphKey]()
        super().__init__(bundle)

    def _by_columns(self, state: TensorSpec) -> bool:
        return self.quick and super()._by_columns(state)

    def _executable(self, key: GraphKey) -> Any:
        quicker_said = (
            (quicker, "rewrite"),
            (block_attention, "take_over"),
            (key_columns, "take_turned"),
            (filter_branch, "branch"),
        )
        with ExitStack() as stack:
            stack.enter_context(exp_of_the_graph())
            for module, name in () if self.quick else quicker_said:
                stack.enter_context(mock.patch.object(module, name))
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
    tops = (1.0, 1.0, 1.0, 0.7)
    asked = [Request(_prompt(i), Params(0.8 * (i % 2), seed=i, top_p=tops[i % 4]), 20) for i in range(8)]
    ids: list[list[list[int]]] = []
    for g, rows in ((both[0], 64), (both[0], 32), (both[1], 128)):
        g.keys.clear()
        prompts = tuple(p for p in shape_of(g.bundle).prompts if p[0] == rows)
        ids.append([r.ids for r in Engine(g, dataclasses.replace(shape_of(g.bundle), prompts=prompts)).run(asked)])
        assert [key.rows for key in g.keys if key.is_prefill] == [rows] * len(asked)
    assert ids[0] == ids[1] == ids[2]


def _over_blocks(quick: bool, *given: np.ndarray, powers: bool = False) -> list[np.ndarray]:
    """Attention of q over pools of keys and values, compiled quicker or plain."""

    def run(q_BHND: Any, k: Any, v: Any, positions_BN: Any, keys_S: Any, table_BL: Any) -> Any:
        return attended(q_BHND, Cache(k, v), Placement(positions_BN, keys_S, table_BL=table_BL), TracedOps(1))

    return _compiled(run, quick, *given, powers=powers)


def _compiled(run: Any, quick: bool, *given: np.ndarray, powers: bool = False) -> list[np.ndarray]:
    """Plain, or quicker: with the weights of the graph, or with powers of two as the runtime has them."""
    lowered = jax.jit(lambda *arrays: interop.call_torch(run, *arrays)).lower(*map(jnp.asarray, given))
    module = lowered.compiler_ir("stablehlo")
    with module.context, ir.Location.unknown():
        if quick:
            with contextlib.nullcontext() if powers else exp_of_the_graph():
                block_attention.take_over(module)
        sums.in_order(module)
        if quick:
            quicker.rewrite(module)
    return [np.asarray(a) for a in lowered.compile(compiler_options=SAME_BITS)(*given)]


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("lasts", [(3, 300), (KEY_TILE, KEY_TILE - 1), (511,), (130, 2, 40)], ids=str)
def test_each_sequence_ends_at_the_last_tile_that_its_rows_see(lasts: tuple[int, ...], dtype: Any) -> None:
    """NaN in the blocks of later tiles shows which were computed."""
    rng, rows, batch, tiles = np.random.default_rng(0), 4, len(lasts), 4
    table_BL = rng.permutation(1 + np.arange(batch * tiles, dtype=np.int32)).reshape(batch, tiles)
    pool = (1 + batch * tiles, 1, KEY_TILE, 32)
    q_BHND, k, v = (rng.normal(0, 1, s).astype(dtype) for s in ((batch, 2, rows, 32), pool, pool))
    positions_BN = np.maximum(np.array(lasts, np.int32)[:, None] + np.arange(1 - rows, 1, dtype=np.int32), 0)
    placed = positions_BN, np.arange(tiles * KEY_TILE, dtype=np.int32), table_BL
    plain = _over_blocks(False, q_BHND, k, v, *placed)
    for row, last in enumerate(lasts):
        v[table_BL[row, last // KEY_TILE + 1 :]] = np.nan
    assert all(map(np.array_equal, _over_blocks(True, q_BHND, k, v, *placed), plain))
    if any(last < (tiles - 1) * KEY_TILE for last in lasts):
        assert np.isnan(_over_blocks(False, q_BHND, k, v, *placed)[0].astype(np.float32)).any()


def test_an_idle_slot_attends_nothing() -> None:
    """NaN in block 0 does not reach a sequence without blocks; the one beside it has its bits."""
    rng, pool = np.random.default_rng(0), (3, 1, KEY_TILE, 32)
    q_BHND, k, v = (rng.normal(0, 1, s).astype(np.float32) for s in ((2, 2, 4, 32), pool, pool))
    positions_BN, keys_S = np.array([[0, 1, 2, 3], [197, 198, 199, 200]], np.int32), np.arange(256, dtype=np.int32)
    placed = positions_BN, keys_S, np.array([[0, 0], [2, 1]], np.int32)
    plain = _over_blocks(False, q_BHND, k, v, *placed)
    k[0] = v[0] = np.nan
    quick = _over_blocks(True, q_BHND, k, v, *placed)
    assert np.array_equal(quick[1], plain[1])
    assert not quick[0].any()


@pytest.mark.parametrize("takes", ["tensor<4xf32>", "tensor<4xf64>", ", ".join(["tensor<4xf32>"] * 6)])
def test_a_function_that_only_has_the_name_is_refused(takes: str) -> None:
    arguments = ", ".join(f"%{number}: {each}" for number, each in enumerate(takes.split(", ")))
    text = f"func.func private @attend_blocks.7({arguments}) {{ return }}"
    said = pytest.raises(ValueError, match=r"attend_blocks\.7 takes something else than attention over blocks")
    with mlir.make_ir_context(), ir.Location.unknown(), said:
        block_attention.take_over(ir.Module.parse(text))


@pytest.mark.parametrize("first", [0, 2 * KEY_TILE, 300])
def test_rows_of_a_chunk_end_at_their_own_last_tile(first: int) -> None:
    """NaN in later blocks does not reach them; a chunk has the bits of its graph, and of one of fewer rows."""
    rng, rows, tiles, own = np.random.default_rng(0), 512, 8, KEY_TILE
    pool_k, pool_v = (rng.normal(0, 1, (1 + tiles, 2, KEY_TILE, 32)).astype(np.float32) for _ in range(2))
    q, k, v = (rng.normal(0, 1, (1, heads, rows, 32)).astype(np.float32) for heads in (4, 2, 2))
    placed = np.arange(tiles * KEY_TILE, dtype=np.int32), 1 + np.arange(tiles, dtype=np.int32)[None]

    def chunk(q_BHND: Any, k: Any, v: Any, pool_k: Any, pool_v: Any, positions_BN: Any, keys_S: Any, table: Any) -> Any:
        placement = Placement(positions_BN, keys_S, table_BL=table)
        return verify_attention(TracedOps(1), q_BHND, (k, v), Cache(pool_k, pool_v), placement)

    def out(rows: int, quick: bool, powers: bool = False) -> np.ndarray:
        positions_BN, given = first + np.arange(rows, dtype=np.int32)[None], [a[:, :, :rows] for a in (q, k, v)]
        return _compiled(chunk, quick, *given, pool_k, pool_v, positions_BN, *placed, powers=powers)[0]

    whole, by_powers = out(rows, True), out(rows, True, powers=True)
    assert np.array_equal(whole, out(rows, False))
    assert np.array_equal(whole[:, :, :own], out(own, True))
    np.testing.assert_allclose(by_powers, whole, rtol=0, atol=3e-6)
    for fewer in (2, 48, own):
        assert np.array_equal(by_powers[:, :, :fewer], out(fewer, True, powers=True))
    if first % KEY_TILE == 0:
        v[:, :, own:] = np.nan
        damaged = out(rows, True)
        assert np.array_equal(damaged[:, :, :own], whole[:, :, :own])
        assert np.isnan(damaged[:, :, own:]).all()
        assert np.isnan(out(rows, False)).all()


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("rows", "heads"), [(48, 4), (40, 8), (192, 4)], ids=str)
def test_tiles_without_a_mask_change_no_bit(rows: int, heads: int, dtype: Any) -> None:
    """Rows of two sequences behind some tiles, in numbers that 128 divides and does not, beside an idle slot."""
    rng, tiles = np.random.default_rng(0), 8
    pool = (1 + 2 * tiles, 2, KEY_TILE, 32)
    q_BHND, k, v = (rng.normal(0, 1, s).astype(dtype) for s in ((3, heads, rows, 32), pool, pool))
    table_BL = np.zeros((3, tiles), np.int32)
    table_BL[[0, 2]] = 1 + rng.permutation(2 * tiles).reshape(2, tiles)
    positions_BN = np.array([[300], [0], [512]], np.int32) + np.arange(rows, dtype=np.int32)
    placed = positions_BN, np.arange(tiles * KEY_TILE, dtype=np.int32), table_BL
    quick, plain = (_over_blocks(quick, q_BHND, k, v, *placed) for quick in (True, False))
    assert all(np.array_equal(quick[b], plain[b]) for b in (0, 2))
    assert np.isfinite(quick[2].astype(np.float32)).all()
    assert not quick[1].any()


def test_weights_are_powers_of_two() -> None:
    """To 1.7e-7 of them, exactly 1 for the largest score and exactly 0 for a masked one."""
    x = -np.concatenate([np.linspace(0, 126, 1_000_001), [127, 1e9, np.inf, np.nan]]).astype(np.float32)
    found = np.asarray(jax.jit(block_attention._power).lower(x).compile(compiler_options=SAME_BITS)(x))
    right = np.exp2(x[:-4].astype(np.float64))
    assert np.abs(found[:-4] / right - 1).max() < 1.7e-7
    assert found[0] == 1
    assert not found[-4:].any()


@pytest.mark.parametrize("damage", [np.nan, np.inf], ids=str)
def test_a_key_that_is_no_number_is_seen(damage: float) -> None:
    """By the rows that attend it and by no others, though its own weight is 0."""
    rng, pool = np.random.default_rng(0), (3, 1, KEY_TILE, 32)
    q_BHND, k, v = (np.abs(rng.normal(0, 1, s)).astype(np.float32) for s in ((1, 2, 70, 32), pool, pool))
    k[1, 0, 100] = damage
    placed = 90 + np.arange(70, dtype=np.int32)[None], np.arange(256, dtype=np.int32), np.array([[1, 2]], np.int32)
    (out,) = _over_blocks(True, q_BHND, k, v, *placed, powers=True)
    out_HND = out.reshape(2, 70, 32)
    assert np.isfinite(out_HND[:, :10]).all()
    assert np.isnan(out_HND[:, 10:]).all()


def _same_states(both: tuple[Recorder, Recorder]) -> None:
    quick, plain = ({**g._state, **caches(g)} for g in both)
    for name, state in quick.items():
        assert np.array_equal(np.asarray(state), np.asarray(plain[name])), name


def test_angles_are_computed_once_a_model(both: tuple[Recorder, Recorder]) -> None:
    """And not in the loops of each layer that read them."""
    plan = both[0].bundle.plan
    key = next(key for key in plan.by_key if key.stage is Stage.PREFILL and key.rows == 64)
    counts = []
    for g in both:
        g.prepare(key)
        counts.append(g._executables[key].hlo_modules()[0].to_string().count(" cosine("))
    assert counts[0] == 1 < counts[1]
