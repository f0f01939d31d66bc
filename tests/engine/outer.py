"""Schedulers for an engine: one launches ahead of what the host has read, one does all that vLLM's does, at random."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from tests.engine.machine import BLOCK
from trnspec.engine.async_engine import AsyncEngine
from trnspec.engine.engine import Event
from trnspec.engine.request import Request, Score


def ids_ahead(engine: AsyncEngine, requests: Sequence[Request]) -> tuple[list[list[int]], int]:
    """The tokens of each request, and how many steps were launched before the one before them was read."""
    numbers, ahead = [engine.add(request) for request in requests], 0
    ids: dict[int, list[int]] = {number: [] for number in numbers}
    while engine.busy:
        engine.launch_next()
        for event in engine.step():
            ids[event.number] += event.ids
        ahead += engine.launched is not None
        if not engine._waiting or engine.slots.full:
            engine.launch()
    return [ids[number] for number in numbers], ahead


@dataclass
class Running:
    """A request with a slot: its blocks, and how many of its known tokens have been scheduled."""

    index: int
    blocks: list[int]
    known: int
    scheduled: int


@dataclass
class Outer:
    """Chunks of prompts, shared prefixes and preemption over a pool of few blocks.

    `sampled`, `scores` and `prompt_scores` are each request's; `scheduled` counts the tokens of chunks.
    """

    engine: AsyncEngine
    requests: Sequence[Request]
    pool: int
    rng: random.Random
    preemption: float = 0.05
    hits: int = 0
    preempted: int = 0
    scheduled: int = 0
    # a request accepted more drafts than it may
    over_limit: bool = False
    drafted: int = 0
    accepted: int = 0

    def __post_init__(self) -> None:
        # the block that was freed first is given away first
        self.free = OrderedDict[int, None].fromkeys(range(1, self.pool))
        self.users = dict.fromkeys(range(1, self.pool), 0)
        self.by_prefix: dict[tuple[int, ...], int] = {}
        self.prefix_of: dict[int, tuple[int, ...]] = {}
        self.running: dict[int, Running] = {}
        self.waiting = list(range(len(self.requests)))
        self.sampled: list[list[int]] = [[] for _ in self.waiting]
        self.scores: list[list[Score]] = [[] for _ in self.waiting]
        self.prompt_scores: list[tuple[Score, ...]] = [() for _ in self.waiting]

    def run(self) -> list[list[int]]:
        """The new tokens of each request."""
        for _ in range(4000):
            if not (self.waiting or self.running):
                return self.sampled
            self._iterate()
        raise AssertionError("the requests do not end")

    def _iterate(self) -> None:
        engine = self.engine
        for number in list(self.running):
            if number in self.running:
                self._schedule(number)
        self._admit()
        if not engine.launched:
            engine.launch(masks=True)
        prefilling = [(n, r) for n, r in self.running.items() if r.scheduled < r.known]
        for number, request in prefilling:
            left = request.known - request.scheduled
            count = self.rng.choice((left, self.rng.randint(1, left), min(left, 2)))
            request.scheduled, self.scheduled = request.scheduled + count, self.scheduled + count
            engine.prefill(number, request.scheduled)
        if not prefilling:
            engine.launch_next()
        for event in self._read(bool(prefilling)):
            self._take(event)
        self._cache()

    def _take(self, event: Event) -> None:
        request = self.running[event.number]
        limit = self.requests[request.index].k_limit
        self.over_limit |= limit is not None and event.accepted > limit
        self.drafted, self.accepted = self.drafted + event.drafted, self.accepted + event.accepted
        self.sampled[request.index] += event.ids
        self.scores[request.index] += event.scores
        self.prompt_scores[request.index] += event.prompt_scores
        if event.result:
            self.engine.cancel(event.number)
            self._give(self.running.pop(event.number).blocks)

    def _read(self, all_of_them: bool) -> list[Event]:
        events = self.engine.step() if self.engine.launched else []
        while all_of_them and self.engine.launched:
            events += self.engine.step()
        return events

    def _schedule(self, number: int) -> None:
        """Blocks for the next step or two, from others if there are none."""
        request = self.running[number]
        if self.rng.random() < self.preemption:
            self._preempt(number)
            return
        length = len(self.requests[request.index].ids) + len(self.sampled[request.index])
        wanted = self.engine.config.blocks(length + self.rng.randint(1, 2) * (self.engine.config.k + 1))
        while len(request.blocks) < wanted:
            if not self.free:
                victim = list(self.running)[-1]
                self._preempt(victim)
                if victim == number:
                    return
                continue
            request.blocks.append(self._new_block())
            self.engine.add_blocks(number, request.blocks[-1:])

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.engine.config.batch:
            index = self.waiting[0]
            ids = (*self.requests[index].ids, *self.sampled[index])
            # a prompt's log-probabilities need all of its rows
            shared = [] if self.requests[index].prompt_logprobs is not None else self._shared(ids)
            need = self.engine.config.blocks(len(ids) + 1) - len(shared)
            if need > len([block for block in self.free if block not in shared]):
                return
            for block in shared:
                self.free.pop(block, None)
                self.users[block] += 1
            blocks = [*shared, *(self._new_block() for _ in range(need))]
            self.waiting.pop(0)
            self.hits += len(shared)
            number = self.engine.admit(self.requests[index], blocks, BLOCK * len(shared), self.sampled[index])
            self.running[number] = Running(index, blocks, len(ids), BLOCK * len(shared))

    def _shared(self, ids: tuple[int, ...]) -> list[int]:
        blocks = list[int]()
        # at least one token is left to compute
        while BLOCK * (len(blocks) + 1) < len(ids):
            block = self.by_prefix.get(ids[: BLOCK * (len(blocks) + 1)])
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _new_block(self) -> int:
        block, _ = self.free.popitem(last=False)
        self.by_prefix.pop(self.prefix_of.pop(block, ()), None)
        self.users[block] = 1
        return block

    def _give(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.users[block] -= 1
            if not self.users[block]:
                self.free[block] = None

    def _preempt(self, number: int) -> None:
        self.preempted += 1
        request = self.running.pop(number)
        self.waiting.insert(0, request.index)
        assert self.engine.preempt(number) == self.sampled[request.index]
        self._give(request.blocks)

    def _cache(self) -> None:
        """Share the blocks whose tokens are all computed: all but the newest one's."""
        for request in self.running.values():
            ids = (*self.requests[request.index].ids, *self.sampled[request.index])
            done = request.scheduled if request.scheduled < request.known else len(ids) - 1
            for place in range(min(done // BLOCK, len(request.blocks))):
                prefix, block = ids[: BLOCK * (place + 1)], request.blocks[place]
                if prefix not in self.by_prefix and block not in self.prefix_of:
                    self.by_prefix[prefix], self.prefix_of[block] = block, prefix
