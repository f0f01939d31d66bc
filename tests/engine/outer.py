"""A scheduler that owns the blocks of an engine, as vLLM's does: pieces of prompts, shared beginnings, preemption.

Its choices are random; a request's ids must not depend on them.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from trnspec.engine.async_engine import AsyncEngine
from trnspec.engine.engine import Event
from trnspec.engine.request import Request

BLOCK = 128


@dataclass
class Running:
    """A request with a place in the engine: its blocks, and how many of its known ids have been scheduled."""

    index: int
    blocks: list[int]
    known: int
    scheduled: int


@dataclass
class Outer:
    """Requests over a pool of few blocks.

    A block whose ids are all computed can be found by them, and by those before them, until it is given away. `spare`
    is the chance that a call takes a place from a request that could keep it.
    """

    engine: AsyncEngine
    requests: Sequence[Request]
    pool: int
    rng: random.Random
    shares: bool = True
    spare: float = 0.05
    drawn: dict[int, list[int]] = field(default_factory=dict)
    hits: int = 0
    preempted: int = 0
    evicted: int = 0
    pieces: int = 0
    drafts: list[int] = field(default_factory=lambda: [0, 0])

    def __post_init__(self) -> None:
        # free blocks, the one that was freed first is given away first
        self.free = OrderedDict[int, None].fromkeys(range(1, self.pool))
        self.users = dict.fromkeys(range(1, self.pool), 0)
        self.by_ids: dict[tuple[int, ...], int] = {}
        self.ids_of: dict[int, tuple[int, ...]] = {}
        self.running: dict[int, Running] = {}
        self.waiting = list(range(len(self.requests)))
        self.drawn = {index: [] for index in self.waiting}

    def run(self) -> list[list[int]]:
        """The ids of each request."""
        while self.waiting or self.running:
            self.call()
        return [self.drawn[index] for index in range(len(self.requests))]

    def call(self) -> None:
        """One step of what runs, pieces of the prompts, and the ids that came."""
        engine, rows = self.engine, self.engine.config.rows
        for number in list(self.running):
            if number in self.running:
                self._schedule(number, rows)
        self._admit()
        if not engine.launched:
            engine.launch(masks=True)
        filling = [(n, r) for n, r in self.running.items() if r.scheduled < r.known]
        for number, request in filling:
            # everything that is left, or a part
            left = request.known - request.scheduled
            piece = left if self.rng.random() < 0.5 else self.rng.randint(1, left)
            request.scheduled += piece
            self.pieces += 1
            engine.prefill(number, request.scheduled)
        if not filling:
            engine.launch_next()
        for event in self._read(bool(filling)):
            self.drafts[0] += event.drafted
            self.drafts[1] += event.accepted
            request = self.running[event.number]
            self.drawn[request.index] += event.ids
            if event.result:
                self._forget(event.number)
        self._cache()
        if not engine.launched and self.rng.random() < 0.8:
            engine.launch()

    def _read(self, filling: bool) -> list[Event]:
        events = self.engine.step() if self.engine.launched else []
        while filling and self.engine.launched:
            events += self.engine.step()
        return events

    def _schedule(self, number: int, rows: int) -> None:
        """Blocks for the next step, from others if there are none."""
        request = self.running[number]
        if self.rng.random() < self.spare:
            self._preempt(number)
            return
        length = len(self.requests[request.index].ids) + len(self.drawn[request.index])
        wanted = self.engine.config.blocks(length + 3 * rows)
        while len(request.blocks) < wanted:
            if not self.free:
                victim = list(self.running)[-1]
                self._preempt(victim)
                if victim == number:
                    return
                continue
            block = self._take()
            request.blocks.append(block)
            self.engine.add_blocks(number, [block])

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.engine.config.batch:
            index = self.waiting[0]
            request = self.requests[index]
            ids = (*request.ids, *self.drawn[index])
            shared = self._shared(ids)
            need = self.engine.config.blocks(len(ids) + 3 * self.engine.config.rows) - len(shared)
            if need > len([b for b in self.free if b not in shared]):
                return
            for block in shared:
                self.free.pop(block, None)
                self.users[block] += 1
            blocks = [*shared, *(self._take() for _ in range(need))]
            self.waiting.pop(0)
            cached = BLOCK * len(shared)
            self.hits += len(shared)
            number = self.engine.admit(request, blocks, cached, self.drawn[index])
            self.running[number] = Running(index, blocks, len(ids), cached)

    def _shared(self, ids: tuple[int, ...]) -> list[int]:
        found = list[int]()
        # at least one id is left to compute
        while self.shares and BLOCK * (len(found) + 1) < len(ids):
            block = self.by_ids.get(ids[: BLOCK * (len(found) + 1)])
            if block is None:
                break
            found.append(block)
        return found

    def _take(self) -> int:
        block, _ = self.free.popitem(last=False)
        if ids := self.ids_of.pop(block, ()):
            del self.by_ids[ids]
            self.evicted += 1
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
        assert self.engine.preempt(number) == self.drawn[request.index]
        self._give(request.blocks)

    def _forget(self, number: int) -> None:
        self.engine.cancel(number)
        self._give(self.running.pop(number).blocks)

    def _cache(self) -> None:
        """Let the blocks be found whose ids are computed: all but the newest one's."""
        for request in self.running.values():
            drawn = self.drawn[request.index]
            ids = (*self.requests[request.index].ids, *drawn)
            done = request.scheduled if request.scheduled < request.known else len(ids) - 1
            for place in range(min(done // BLOCK, len(request.blocks))):
                key, block = ids[: BLOCK * (place + 1)], request.blocks[place]
                if key not in self.by_ids and block not in self.ids_of:
                    self.by_ids[key], self.ids_of[block] = block, key
