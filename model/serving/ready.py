"""A bundle's engine made ready: its shape, its graphs compiled before any clock runs, one request served alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from model.bundle.manifest import PREFILL, Bundle
from model.bundle.schema import MASKED, UNFILTERED
from model.serving.engine import Engine
from model.serving.request import Request, Result, Shape, check
from model.serving.runtime import Graphs


@dataclass(frozen=True)
class Run:
    """One request served: its result and its wall seconds, compilation apart."""

    result: Result
    seconds: float


def shape_of(bundle: Bundle) -> Shape:
    """What the engine must know of a bundle."""
    vocabulary = bundle["models"]["target"]["config"]["vocab_size"]
    sizes = (bundle["k"], bundle["batch"], bundle["max_len"], tuple(bundle["buckets"]))
    return Shape(
        *sizes,
        vocabulary,
        fewer=bundle.ks[1:-1],
        structured=bundle.mask_axes > 0,
        row_masks=bundle.mask_axes == 3,
        separate=bundle.separate,
        host_drafts=not bundle.drafting.of_kind.has_model,
        short_prompts=tuple(sorted({g.bucket for g in bundle.graphs if g.bucket < bundle["buckets"][0]})),
    )


def compile_graphs(graphs: Graphs, request: Request, engine: Engine) -> None:
    """Compile every graph that the request may reach, so that the first token waits for none.

    Only while no request is in the engine: a graph runs once on zeros, into the caches.
    """
    shape = shape_of(graphs.bundle)
    ending = ("" if request.params.filter else UNFILTERED) + (MASKED if request.masked else "")
    length = len(request.ids)
    last = min(length + request.max_new_tokens + shape.k, shape.max_len)
    graphs.prepare(PREFILL, shape.prompt_bucket(length), ending)
    lower = 0
    for bucket in shape.buckets:
        if bucket > length and lower <= last:
            for tag in engine.tags(request.most_drafts(shape), ending):
                graphs.prepare(tag, bucket, ending)
            if engine.table and engine.table.refresh is not None:
                graphs.prepare(PREFILL, bucket, ending)
        lower = bucket


def serve(graphs: Graphs, request: Request, speculative: bool, told: Callable[[list[int]], None] | None = None) -> Run:
    """Serve one request alone, with or without speculation."""
    return serve_by(Engine(graphs, shape_of(graphs.bundle), speculative), graphs, request, told)


def serve_by(engine: Engine, graphs: Graphs, request: Request, told: Callable[[list[int]], None] | None = None) -> Run:
    """Serve one request alone by an engine over these graphs."""
    check(engine.shape, request)
    compile_graphs(graphs, request, engine)
    begin = time.perf_counter()
    (result,) = engine.run([request], (lambda _, ids: told(ids)) if told else None)
    return Run(result, time.perf_counter() - begin)
