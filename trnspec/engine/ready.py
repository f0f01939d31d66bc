"""A bundle made ready to serve: its shape, its graphs compiled before any clock runs, one request served alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from model.attention import KEY_TILE
from model.graph_io import StepInputs, zeros_of
from model.graph_key import GraphKey, Stage
from trnspec.bundle.opening import Bundle
from trnspec.engine.engine import Engine
from trnspec.engine.request import Request, Result, Shape, check
from trnspec.runtime import xla as runtime
from trnspec.runtime.nrt import NrtGraphs

# on JAX's devices, or as NEFFs
Graphs = runtime.Graphs | NrtGraphs
_ROUNDS = 7
# steps of a round
_IN_A_ROW = 8
# keys from which on graphs of fewer are left out on a CPU, where attention ends at the last key that a row sees: a
# step at 100 ids takes as long in a bucket of 4096 as in one of 128 (LOG.md, 2026-11-28). Its mask has a number a key
_FEWEST_KEYS = 4096
# what a chunk of a prompt costs beside its rows, in rows (LOG.md, 2026-11-25): on a CPU 0 to 27, by the keys before it;
# on a device, which reads all weights for any number of rows, 310 to 345 (simulated)
_BESIDE_CPU, _BESIDE_DEVICE = 16, 320


@dataclass(frozen=True)
class Run:
    """One request served: its result and its wall seconds without compilation."""

    result: Result
    seconds: float


def open_graphs(bundle: Bundle, platform: str = "cpu") -> Graphs:
    """A bundle's graphs on a platform: cpu, neuron (the SDK's plugin in JAX) or nrt (NEFFs, by nrtpy)."""
    return NrtGraphs(bundle) if platform == "nrt" else runtime.Graphs(bundle, platform)


def shape_of(bundle: Bundle, platform: str = "cpu") -> Shape:
    """The facts of a bundle that the engine needs, on a platform: a device takes no chunks of less than a tile."""
    spec = bundle.spec
    on_cpu, whole = platform == "cpu", [(rows, keys) for rows, keys in spec.prompts if rows >= KEY_TILE]
    return Shape(
        spec.ks,
        spec.batch,
        spec.max_len,
        spec.buckets,
        spec.target_config.vocab_size,
        spec.pool,
        spec.host_drafts,
        spec.prompts if on_cpu or not whole else tuple(whole),
        spec.k if any("K" in kept.axes.split() for kept in spec.kind.kept) else 0,
        False,
        _BESIDE_CPU if on_cpu else _BESIDE_DEVICE,
    )


def served_shape(bundle: Bundle, platform: str = "cpu") -> Shape:
    """`shape_of` with the graphs that a server or `LLM` runs: on a CPU none for fewer keys that saves no time."""
    shape = shape_of(bundle, platform)
    if platform != "cpu" or bundle.spec.kernels != "reference":
        return shape
    least = min(_FEWEST_KEYS, shape.max_len)
    prompts = tuple((rows, keys) for rows, keys in shape.prompts if keys >= least)
    return replace(shape, buckets=tuple(b for b in shape.buckets if b >= least), prompts=prompts)


def compile_graphs(graphs: Graphs, request: Request, engine: Engine) -> None:
    """Compile every graph that the request may reach, so that the first token waits for none.

    Only while no request is in the engine: a graph runs once on zeros, into the caches.
    """
    for key in _reachable(graphs.bundle, request, engine):
        graphs.prepare(key)


def _reachable(bundle: Bundle, request: Request, engine: Engine) -> Iterator[GraphKey]:
    shape, ks, length = engine.shape, engine.ks(request.k_limit, request.asking), len(request.ids)
    if length + request.max_new_tokens >= shape.max_len:
        # the last token has no room for drafts
        ks |= {shape.graph_k(k, request.asking) for k in range(max(ks))}
    last = min(length + request.max_new_tokens + shape.k, shape.max_len)
    buckets = [b for b in shape.buckets if length < b <= shape.bucket(last)]
    prompts = {(chunk.rows, chunk.keys) for chunk in shape.chunks(length)}
    for key in bundle.plan.by_key:
        serves = key.asking == request.asking
        if key.is_prefill:
            wanted = (key.rows, key.bucket) in prompts
        else:
            wanted = key.k in ks and key.bucket in buckets and (key.asking or key.filters == request.params.filter)
        if wanted and serves:
            yield key


def step_seconds(graphs: Graphs, shape: Shape) -> dict[tuple[int, int, int], float]:
    """The wall seconds of a step that reaches a bucket's end, by its k, bucket and number of running requests.

    Of one request, and of as many as there are slots, while none is in the caches.

    The least of several rounds, each over every graph: what else runs on the machine meets all of them. Steps follow
    each other, as those of requests do: the host's part of one is hidden behind the one before.
    """
    spec, runs = graphs.bundle.spec, list[tuple[GraphKey, StepInputs]]()
    steps = [(k, b, running) for b in spec.buckets for k in (0, *spec.ks) for running in sorted({1, spec.batch})]
    for k, bucket, running in steps:
        key = GraphKey(Stage.STEP, k, shape.bucket(bucket), filters=False)
        graphs.prepare(key)
        runs.append((key, at_the_end(graphs.bundle, key, running, bucket)))
    rounds = [[graphs.rehearse(key, _IN_A_ROW, inputs) for key, inputs in runs] for _ in range(_ROUNDS)]
    return dict(zip(steps, map(min, zip(*rounds, strict=True)), strict=True))


def at_the_end(bundle: Bundle, key: GraphKey, running: int, end: int) -> StepInputs:
    """A step's inputs whose rows are the last of so many positions, so that those of the running requests see as many
    keys, each in its place; the other slots are idle."""
    inputs = zeros_of(bundle.plan.by_key[key].inputs)
    inputs.positions[:running] = end - key.k - 1
    blocks = 1 + np.arange(inputs.block_table.size).reshape(inputs.block_table.shape)
    inputs.block_table[:running] = blocks[:running] % bundle.spec.pool
    return inputs


def serve(graphs: Graphs, request: Request, speculative: bool, told: Callable[[list[int]], None] | None = None) -> Run:
    """Serve one request alone, with or without speculation; `told` is called with the new ids of each step."""
    engine = Engine(graphs, shape_of(graphs.bundle), speculative)
    check(engine.shape, request)
    compile_graphs(graphs, request, engine)
    begin = time.perf_counter()
    (result,) = engine.run([request], (lambda _, ids: told(ids)) if told else None)
    return Run(result, time.perf_counter() - begin)
