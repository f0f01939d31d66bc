"""The requests of a mixed load: structured prompts beside open ones, or beside those that a draft predicts worst."""

from __future__ import annotations

import random
from dataclasses import dataclass
from string import ascii_lowercase

from bench.quality.__main__ import PROMPTS, load_prompts
from model.serving.engine import Engine
from model.serving.ready import shape_of
from model.serving.request import Params, Request
from model.serving.runtime import Graphs
from model.serving.text import load_tokenizer

# so many prompts of random letters are tried for the hardest
_TRIED = 64
Kinds = tuple[list[Request], list[Request]]


@dataclass(frozen=True)
class Load:
    """Every n-th prompt of a kind, new tokens; `hard` prompts instead of the open ones, if any."""

    tokens: int
    every: int = 1
    open_temperature: float = 1.0
    hard: int = 0


def kinds(graphs: Graphs, load: Load) -> Kinds:
    """Structured requests, answered greedily, and the others."""
    structured, others = (
        [p[2] for p in load_prompts(PROMPTS) if p[1] == kind][:: load.every] for kind in ("structured", "open")
    )
    easy = [_request(graphs, text, Params(seed=i), load.tokens) for i, text in enumerate(structured)]
    if load.hard:
        return easy, hardest(graphs, load)
    params = [Params(load.open_temperature, seed=len(easy) + i) for i in range(len(others))]
    return easy, [_request(graphs, text, p, load.tokens) for text, p in zip(others, params, strict=True)]


def _request(graphs: Graphs, text: str, params: Params, tokens: int) -> Request:
    ids = tuple(load_tokenizer(graphs.bundle.path).encode(text).ids)
    return Request(ids, params, tokens, graphs.bundle.config("target").eos_token_ids)


def _letters(rng: random.Random) -> str:
    line = " ".join("".join(rng.choice(ascii_lowercase) for _ in range(5)) for _ in range(4))
    return f"{line}\n" * 3


def hardest(graphs: Graphs, load: Load) -> list[Request]:
    """Of 64 prompts of random letters the ones with the fewest tokens a step, greedy; chosen, not typical."""
    rng = random.Random(1)
    tried = [_request(graphs, _letters(rng), Params(), load.tokens) for _ in range(_TRIED)]
    results = Engine(graphs, shape_of(graphs.bundle)).run(tried)
    # an answer that ends at once has no steps to judge by
    whole = [i for i, r in enumerate(results) if r.reason == "length"]
    return [tried[i] for i in sorted(whole, key=lambda i: results[i].tokens_per_step)[: load.hard]]


def ordered(of_kinds: Kinds, order: str) -> list[Request]:
    """`grouped` keeps the kinds together; `mixed` spreads each evenly over the load."""
    if order == "grouped":
        return [*of_kinds[0], *of_kinds[1]]
    placed = [((i + 0.5) / len(kind), n, r) for n, kind in enumerate(of_kinds) for i, r in enumerate(kind)]
    return [r for _, _, r in sorted(placed, key=lambda p: p[:2])]
