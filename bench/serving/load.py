"""The load: which requests go where and when, one endpoint at a time, in a random order of endpoints."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import httpx2

from bench.serving.client import Endpoint, Prompt, ask, body
from bench.serving.options import Options
from bench.serving.sample import Sample

Seen = Callable[[Sample], None]


@dataclass(frozen=True)
class Block:
    """Requests of one prompt sent to one endpoint without a pause; `indices` number them within the prompt."""

    variant: str
    prompt: Prompt
    indices: tuple[int, ...]
    arrival_seed: int


@dataclass(frozen=True)
class BlockResult:
    """What a block's requests gave, and how long they took together, in seconds."""

    block: Block
    samples: tuple[Sample, ...]
    seconds: float


def plan(options: Options, prompts: Sequence[Prompt]) -> list[Block]:
    """Blocks in the order in which they run: in every round the prompts are shuffled, and for each
    prompt the endpoints, so that neither a slow drift of a server nor its caches favour one side.

    Both endpoints get the same requests and the same arrivals.
    """
    rng = random.Random(options.seed)
    blocks = []
    for number in range(options.rounds):
        indices = tuple(range(number, options.requests, options.rounds))
        for prompt in rng.sample(prompts, len(prompts)):
            arrival_seed = rng.getrandbits(32)
            variants = list(options.endpoints)
            for variant in rng.sample(variants, len(variants)):
                blocks.append(Block(variant, prompt, indices, arrival_seed))
    return blocks


async def run_block(
    client: httpx2.AsyncClient, options: Options, endpoint: Endpoint, block: Block, seen: Seen
) -> BlockResult:
    """Run a block: a fixed number of requests under way, or Poisson arrivals when there is a rate."""

    async def one(index: int, due: float | None) -> Sample:
        request = body(options, endpoint, block.prompt, index, options.temperature)
        sample = await within(ask(client, endpoint, request, due), options.timeout, endpoint.variant)
        sample = dataclasses.replace(sample, case=block.prompt.name, index=index)
        seen(sample)
        return sample

    begin = time.monotonic()
    if options.rate:
        samples = await _arriving(block, options.rate, one)
    else:
        samples = await _closed(block, options.concurrency, one)
    return BlockResult(block, tuple(samples), time.monotonic() - begin)


async def within(asked: Awaitable[Sample], timeout_s: float, variant: str) -> Sample:
    """The sample, or one that says that its time was over."""
    try:
        return await asyncio.wait_for(asked, timeout_s)
    except asyncio.TimeoutError:
        return Sample(variant, "", 0, error=f"no complete answer within {timeout_s:g} s")


async def _closed(
    block: Block, concurrency: int, one: Callable[[int, float | None], Awaitable[Sample]]
) -> list[Sample]:
    waiting, samples = list(reversed(block.indices)), []

    async def worker() -> None:
        while waiting:
            samples.append(await one(waiting.pop(), None))

    await asyncio.gather(*(worker() for _ in range(min(concurrency, len(block.indices)))))
    return sorted(samples, key=lambda s: s.index)


async def _arriving(block: Block, rate: float, one: Callable[[int, float | None], Awaitable[Sample]]) -> list[Sample]:
    rng, due, running = random.Random(block.arrival_seed), time.monotonic(), []
    for index in block.indices:
        due += rng.expovariate(rate)
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        # latencies count from the time at which the request was due, so a stalled client hides nothing
        running.append(asyncio.ensure_future(one(index, due)))
    return list(await asyncio.gather(*running))
