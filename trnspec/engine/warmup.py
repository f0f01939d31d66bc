"""The graphs that a request may run, loaded before its first step."""

from collections.abc import Iterable, Iterator

from model.graph_key import GraphKey
from model.progress import each
from trnspec.engine.engine import Engine
from trnspec.engine.request import Request


def prepare_graphs(engine: Engine, keys: Iterable[GraphKey]) -> None:
    """Load these graphs, so that no token waits for a compiler.

    Each graph also runs once, since a first run is slow, unless requests are active, whose state it would change.
    """
    if missing := [key for key in dict.fromkeys(keys) if key not in engine.runner.loaded]:
        for key in each(missing, "compiling graphs"):
            engine.runner.prepare(key, warm=not engine.busy)


def graphs_of(engine: Engine, request: Request) -> Iterator[GraphKey]:
    """The graphs that a request may run by itself."""
    config, length, full_sampling = engine.config, len(request.ids), request.full_sampling
    ks = engine.ks(request.k_limit, full_sampling, length + request.max_new_tokens >= config.max_len)
    last = min(length + request.max_new_tokens + config.k, config.max_len)
    buckets = [bucket for bucket in config.buckets if length < bucket <= config.bucket(last)]
    prompts = {(c.rows, c.keys) for c in config.chunks(length, request.prompt_logprobs is not None)}
    for key in engine.runner.bundle.plan.by_key:
        if key.is_prefill:
            runs = key.stage is request.prefill and (key.rows, key.bucket) in prompts
        else:
            filters = full_sampling or key.filters == request.params.filters
            runs = key.full_sampling == full_sampling and key.k in ks and key.bucket in buckets and filters
        if runs:
            yield key
