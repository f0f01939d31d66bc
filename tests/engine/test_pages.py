"""Caches of blocks: ids and acceptance are those of slots in one piece, whatever the chunks, blocks and neighbours, and
whether the beginning of a prompt was there or the request has lost its place."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from bench.eager import Eager
from model.backing import REFERENCE
from model.cache import Cache, empty_caches
from model.drafters import Drafter
from model.drafters.chain import Chain
from model.drafters.registry import KINDS
from model.graph_io import StepInputs, StepOutputs
from model.graph_key import GraphKey, Stage
from model.nki import simulated
from model.nki.backing import backing_of
from model.ops import EAGER
from model.parallel import ONE_RANK
from model.qwen3 import Qwen3
from model.speculative import Pair
from tests.engine.outer import BLOCK, Outer
from tests.model.test_acceptance import BATCH, CONFIG, DRAFTERS, K, V
from trnspec.bundle.spec import CHUNKS as BUILT
from trnspec.engine.async_engine import AsyncEngine
from trnspec.engine.engine import Engine
from trnspec.engine.request import Chunk, Params, Request, Shape

LENGTH = 4 * BLOCK
PROMPTS = tuple((rows, keys) for rows in (16, 32, 128, 256) for keys in (max(rows, BLOCK), LENGTH))
# enough for one request and a half
POOL = 8


def _made(drafter: str, blocks: int) -> tuple[Eager, Shape]:
    """A runner on a pool of blocks."""
    target, drafting, kept = DRAFTERS[drafter]()
    target.taps = drafting.taps
    pair, last = Pair(target, drafting, EAGER, LENGTH), K * (drafter == "parallel")
    apart = drafter in KINDS and KINDS[drafter].apart
    shape = Shape((K,), BATCH, LENGTH, (BLOCK, LENGTH), V, blocks, prompts=PROMPTS, kept=last, apart=apart)
    return Eager(pair, kept, blocks, apart), shape


def _requests(count: int, seed: int) -> list[Request]:
    """Prompts of which many begin alike, up to an end inside of a block or at its edge."""
    rng = random.Random(seed)
    texts = [tuple(rng.randrange(1, V) for _ in range(LENGTH)) for _ in range(2)]
    requests = []
    for n in range(count):
        begin = rng.choice(texts)[: rng.choice((1, 60, BLOCK - 1, BLOCK, BLOCK + 1, 200, 2 * BLOCK, 300))]
        ids = (*begin, *(rng.randrange(1, V) for _ in range(rng.choice((0, 1, 20)))))
        requests.append(Request(ids, Params(0.9 * (n % 2), seed=n), rng.randint(1, 60)))
    return requests


class InOnePiece(Eager):
    """The target alone on caches of a slot each, which need no blocks."""

    def __init__(self, target: Qwen3) -> None:
        super().__init__(Pair(target, Drafter(), EAGER), (), 0)
        self.caches = empty_caches(target.config, ONE_RANK, BATCH, LENGTH, torch.float32)

    def run(self, key: GraphKey, inputs: StepInputs) -> StepOutputs:
        return super().run(key, inputs._replace(block_table=None))


def _in_one_piece(target: Qwen3, requests: list[Request]) -> list[list[int]]:
    """The ids by the target alone, on slots in one piece."""
    shape = Shape((), BATCH, LENGTH, (LENGTH,), V, 1 + BATCH * LENGTH // BLOCK)
    return [r.ids for r in Engine(InOnePiece(target), shape).run(requests)]


def _expected(drafter: str, requests: list[Request]) -> list[list[int]]:
    return _in_one_piece(DRAFTERS[drafter]()[0], requests)


def _outer(drafter: str, requests: list[Request], seed: int, **more: Any) -> Outer:
    runner, shape = _made(drafter, POOL)
    engine = AsyncEngine(runner, shape, owns_blocks=False)
    return Outer(engine, requests, POOL, random.Random(seed), **more)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_blocks_pieces_hits_and_preemption_do_not_show(drafter: str) -> None:
    requests = _requests(24, 1)
    outer = _outer(drafter, requests, 2)
    assert outer.run() == _expected(drafter, requests)
    assert min(outer.hits, outer.preempted, outer.evicted) > 3
    assert outer.pieces > len(requests) + outer.preempted


def test_kernels_on_blocks_have_the_reference_s_ids() -> None:
    """Simulated NKI kernels under random pieces, shared beginnings and preemption: the ids of slots in one piece."""
    config, models = replace(CONFIG, head_dim=64), []
    for backing in (REFERENCE, backing_of("nki", simulated.serve), backing_of("nki", simulated.serve)):
        torch.manual_seed(4)
        models.append(Qwen3(config, backing=backing))
        for parameter in models[-1].parameters():
            if parameter.is_floating_point():
                parameter.data = torch.randn(parameter.shape) * 0.5 + (parameter.ndim == 1)
    requests = [replace(r, max_new_tokens=5) for r in _requests(6, 1)]
    expected = _in_one_piece(models[0], requests)
    prompts = ((128, 128), (128, LENGTH), (256, 256), (256, LENGTH))
    shape = Shape((K,), BATCH, LENGTH, (BLOCK, LENGTH), V, POOL, prompts=prompts)
    kept = (torch.zeros(BATCH, 1, 1, dtype=torch.int32),)
    runner = Eager(Pair(models[1], Chain(models[2]), EAGER, LENGTH), kept, POOL)
    outer = Outer(AsyncEngine(runner, shape, owns_blocks=False), requests, POOL, random.Random(2))
    assert outer.run() == expected
    assert min(outer.hits, outer.preempted) > 0
    # the draft is the target: it misses where a row of its cache is wrong
    assert outer.drafts[1] == outer.drafts[0] > 0


def test_a_chain_has_every_draft_accepted_behind_shared_blocks() -> None:
    """Its draft is the target itself, so a row of its cache that is wrong or missing shows."""
    outer = _outer("chain", _requests(16, 3), 4)
    outer.run()
    drafted, accepted = outer.drafts
    assert outer.hits > 3
    assert accepted == drafted > 0


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_an_engine_with_blocks_of_its_own(drafter: str) -> None:
    """Prompts wait for blocks, and run in chunks with steps between them."""
    requests = _requests(12, 5)
    runner, shape = _made(drafter, POOL)
    engine = Engine(runner, shape)
    assert [r.ids for r in engine.run(requests)] == _expected(drafter, requests)
    assert {key.rows for key in runner.keys if key.is_prefill} == {rows for rows, _ in PROMPTS}
    assert engine.blocks is not None
    assert engine.blocks.take(POOL - 1) is not None


def test_a_step_runs_between_the_chunks_of_a_prompt() -> None:
    runner, shape = _made("chain", 2 * POOL)
    engine = Engine(runner, shape)
    engine.add(Request((5, 9), max_new_tokens=60))
    engine.step()
    engine.add(Request((3,) * 384, max_new_tokens=2))
    for _ in range(5):
        engine.step()
    target, draft, step = Stage.PREFILL, Stage.PREFILL_DRAFT, Stage.STEP
    # nobody can share the first prompt, so that its draft's part waits
    assert [key.stage for key in runner.keys] == [target, target, draft, draft, step, target, draft, step, step]


CHUNKS = {
    # first, length -> first, size, rows, keys
    (0, 1): (0, 1, 16, 128),
    (0, 128): (0, 128, 128, 128),
    (0, 129): (0, 128, 128, 128),
    (0, 110): (0, 110, 128, 128),
    (0, 60): (0, 32, 32, 128),
    (128, 400): (128, 256, 256, 512),
    (384, 400): (384, 16, 16, 512),
}


@pytest.mark.parametrize(("ids", "expected"), CHUNKS.items())
def test_the_next_chunk(ids: tuple[int, int], expected: tuple[int, ...]) -> None:
    shape = Shape((K,), 1, LENGTH, (BLOCK, LENGTH), V, 9, prompts=PROMPTS, beside_rows=16)
    assert shape.chunk(*ids) == Chunk(*expected)


def test_without_graphs_of_chunks_a_bucket_takes_a_whole_prompt() -> None:
    shape = Shape((K,), 1, LENGTH, (BLOCK, 2 * BLOCK, LENGTH), V, 9)
    assert [shape.chunk(0, length)[1:] for length in (2, 129, 300)] == [(2, 128, 128), (129, 256, 256), (300, 512, 512)]


@pytest.mark.parametrize("sizes", [(16, 32, 128, 256), tuple(rows for rows in BUILT if rows <= LENGTH)], ids=str)
@pytest.mark.parametrize("beside", [0, 16, 100, 320])
def test_no_other_chunks_are_cheaper(beside: int, sizes: tuple[int, ...]) -> None:
    """Against the best of all sums of rows, the largest of which come first."""
    prompts, best = tuple((rows, LENGTH) for rows in sizes), [0]
    shape = Shape((K,), 1, LENGTH, (BLOCK, LENGTH), V, 9, prompts=prompts, beside_rows=beside)
    for left in range(1, LENGTH + 1):
        best.append(min(rows + beside + best[max(0, left - rows)] for rows in sizes))
        taken = [chunk.rows for chunk in shape.chunks(left)]
        assert sum(rows + beside for rows in taken) == best[left]
        assert taken == sorted(taken, reverse=True)


def test_a_long_prompt_of_many_chunks() -> None:
    """Of small graphs alone, and of small ones beside one for all of it."""
    length = 1 << 15
    for sizes, chunks in (((16,), length // 16), ((16, length), 1)):
        prompts = tuple((rows, length) for rows in sizes)
        shape = Shape((K,), 1, length, (length,), V, 1 + length // BLOCK, prompts=prompts, beside_rows=320)
        assert len(list(shape.chunks(length - 1))) == chunks


def _freed_too_early(outer: Outer) -> None:
    """A block of a running request is free again."""
    admit = outer._admit

    def wrong() -> None:
        admit()
        for request in outer.running.values():
            outer.free[request.blocks[0]] = None

    outer._admit = wrong  # type: ignore[method-assign]


def _border_off_by_one(outer: Outer) -> None:
    """The second chunk of a prompt begins one id late."""
    engine, chunk = outer.engine, outer.engine._chunk

    def wrong(slot: Any, length: int) -> Any:
        slot.cached += 0 < slot.cached < length - 1
        return chunk(slot, length)

    engine._chunk = wrong  # type: ignore[method-assign]


@pytest.mark.parametrize("fault", [_freed_too_early, _border_off_by_one])
def test_a_planted_fault_changes_ids(fault: Callable[[Outer], None]) -> None:
    requests = _requests(24, 1)
    outer = _outer("chain", requests, 2)
    fault(outer)
    assert outer.run() != _expected("chain", requests)


def test_a_stale_block_of_the_draft_is_seen_in_its_acceptance() -> None:
    """The draft's blocks are lost where a prompt's beginning is found: its ids stay, its drafts do not."""
    requests = _requests(16, 3)
    outer = _outer("chain", requests, 4)
    place, runner = outer.engine.place, outer.engine.runner

    def stale(request: Request, blocks: Any = (), cached: int = 0, ids: Any = ()) -> int:
        held = list(blocks)[: cached // BLOCK]
        state = runner.state  # type: ignore[attr-defined]
        caches = [Cache(*(t.index_fill(0, torch.tensor(held, dtype=torch.long), 0.0) for t in c)) for c in state.caches]
        runner.state = state._replace(caches=caches)  # type: ignore[attr-defined]
        return place(request, blocks, cached, ids)

    with mock.patch.object(outer.engine, "place", stale):
        assert outer.run() == _expected("chain", requests)
    assert outer.drafts[1] < outer.drafts[0]
