"""The comparisons of a certificate: runs of the same requests whose positions are computed in different ways.

The baseline is one request at a time without drafts. The same requests run with drafts, in full batches, and with a
part of their answers in the prompt, as after a preemption or a prefix hit; then their answers are scored as prompts.
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from model.errors import UserError
from model.progress import each
from trnspec.engine.async_engine import AsyncEngine
from trnspec.engine.config import EngineConfig
from trnspec.engine.engine import Engine
from trnspec.engine.request import Params, Request, Result, Score
from trnspec.runtime.runner import Runner

# of sampled requests: without filters, which greedy graphs serve too, and with them
_PLAIN = Params(0.7), Params(1.0), Params(1.5)
_FILTERED = Params(1.0, top_k=40), Params(0.8, top_p=0.9), Params(1.3, min_p=0.02), Params(1.0, 100, 0.95, 0.01)
# top log-probabilities of a token; their difference is its margin
_BEST = 2
_NO_SCORES = "the bundle has greedy graphs, without log-probabilities"


class Case(NamedTuple):
    """A request, and the ids and scores that the baseline has in its place; bundles of greedy graphs have no scores.

    With `prompt`, steps without log-probabilities have computed the ids after so many, and their blocks are read.
    """

    request: Request
    ids: Sequence[int]
    scores: Sequence[Score]
    prompt: int = 0


@dataclass
class Comparison:
    """Groups of cases that run together, in prefill graphs of `rows` rows or of any, and the counts of differences.

    `ids`, `scores`: requests with different ones. `first`: position and margin of the first difference that was seen.
    """

    name: str
    groups: list[list[Case]] = field(default_factory=list)
    rows: int = 0
    skipped: str = ""
    requests: int = 0
    tokens: int = 0
    ids: int = 0
    scores: int = 0
    first: tuple[str, str] = ("", "")
    drafted: int = 0
    accepted: int = 0

    def count(self, case: Case, result: Result) -> None:
        """Count a result and its differences from the baseline."""
        request, ids, scores, start = case.request, result.ids, result.scores, len(case.request.ids)
        if request.prompt_logprobs is not None:
            # the answer is the end of the prompt; a greedy id is the best one
            start, scores = start - len(case.ids), list(result.prompt_scores[-len(case.ids) :])
            ids = list(case.ids) if request.params.temperature else [score.best[0][0] for score in scores]
        at = [_first_difference(ids, case.ids), _first_difference(scores, case.scores) if scores else None]
        self.requests, self.tokens = self.requests + 1, self.tokens + len(case.ids)
        self.ids, self.scores = self.ids + (at[0] is not None), self.scores + (at[1] is not None)
        self.drafted, self.accepted = self.drafted + sum(result.drafted), self.accepted + sum(result.accepted)
        if not self.first[0] and (places := [place for place in at if place is not None]):
            best = case.scores[min(places)].best if case.scores else ()
            self.first = str(start + min(places)), f"{best[0][1] - best[1][1]:.3g}" if best else "unknown"

    @property
    def row(self) -> list[str]:
        if self.skipped:
            return [self.name, f"skipped: {self.skipped}", "", "", "", "", ""]
        return [self.name, *map(str, (self.requests, self.tokens, self.ids, self.scores)), *self.first]


def _first_difference(values: Sequence[object], others: Sequence[object]) -> int | None:
    pairs = enumerate(itertools.zip_longest(values, others))
    return next((at for at, (value, other) in pairs if value != other), None)


def random_requests(config: EngineConfig, count: int, tokens: int, rng: random.Random) -> Iterator[Request]:
    """Greedy and sampled requests over all buckets; a prompt is random ids and their repetition, for drafters."""
    sampled = _PLAIN if config.greedy else _PLAIN + _FILTERED
    for number in range(count):
        place = number // 2 % len(config.buckets)
        longest = max(1, config.buckets[place] - tokens - 1)
        length = rng.randint(min(longest, config.buckets[place - 1] if place else 1), longest)
        ids = rng.choices(range(config.vocab_size), k=rng.randint(1, length))
        params = replace(rng.choice(sampled), seed=rng.getrandbits(63)) if number % 2 else Params()
        yield Request(tuple(itertools.islice(itertools.cycle(ids), length)), params, tokens, k_limit=0)


def certify(runner: Runner, config: EngineConfig, requests: Sequence[Request], rng: random.Random) -> list[Comparison]:
    """Run the baseline and every comparison. Raises UserError if the baseline ends with an error."""
    engine, scored = Engine(runner, config), [] if config.greedy else [_scored(request) for request in requests]
    plain, others = (
        [engine.run([request])[0] for request in each(some, f"baseline{what}")]
        for some, what in ((requests, ""), (scored, " with log-probabilities"))
    )
    if errors := [result.error for result in plain if result.error]:
        raise UserError(f"a request of the baseline ends with an error: {errors[0]}")
    scores = [result.scores for result in others] or [[]] * len(requests)
    cases = [Case(request, result.ids, of) for request, result, of in zip(requests, plain, scores, strict=True)]
    first = Comparison("log-probabilities returned", skipped=_NO_SCORES * config.greedy)
    for case, result in zip(cases, others, strict=False):
        first.count(case, result)
    made = list(_comparisons(config, cases, rng))
    prompts = {n: tuple(p for p in config.prompts if n in (0, p[0])) for n in {comparison.rows for comparison in made}}
    engines = {n: Engine(runner, replace(config, prompts=some)) for n, some in prompts.items()}
    for comparison, group in each([(one, group) for one in made for group in one.groups], "comparing"):
        if group[0].prompt:
            results = [_after_steps(runner, config, case) for case in group]
        else:
            results = engines[comparison.rows].run([case.request for case in group])
        for case, result in zip(group, results, strict=True):
            comparison.count(case, result)
    return [first, *made]


def _after_steps(runner: Runner, config: EngineConfig, case: Case) -> Result:
    """The result of a request that reads the blocks of another one, as after a prefix hit on its new tokens."""
    engine, request, length = AsyncEngine(runner, config, owns_blocks=False), case.request, len(case.request.ids)
    before = replace(request, ids=request.ids[: case.prompt], max_new_tokens=length - case.prompt + 1, logprobs=None)
    results, blocks = list[Result](), range(1, 1 + config.blocks(length + config.k + 1))
    for one, cached in (before, 0), (request, length - 1):
        engine.admit(one, blocks, cached)
        while engine.busy:
            results += [event.result for event in engine.step() if event.result]
    return results[-1]


def _comparisons(config: EngineConfig, cases: list[Case], rng: random.Random) -> Iterator[Comparison]:
    full, limits = cases * -(-config.batch // len(cases)), itertools.cycle(range(config.k + 1))

    def both(some: list[Case]) -> list[list[Case]]:
        """The cases, and again with log-probabilities, whose steps have other graphs."""
        return [some] + [[case._replace(request=_scored(case.request)) for case in some]] * (not config.greedy)

    def rest(case: Case, t: int) -> Case:
        ids, left = (*case.request.ids, *case.ids[:t]), len(case.ids) - t
        return Case(replace(case.request, ids=ids, max_new_tokens=left), case.ids[t:], case.scores[t:])

    def answer(case: Case) -> Case:
        ids = *case.request.ids, *case.ids
        return case._replace(request=replace(case.request, ids=ids, max_new_tokens=1, prompt_logprobs=_BEST))

    for limit in range(1, config.k + 1):
        single = [[case] for group in both([_limited(case, limit) for case in cases]) for case in group]
        yield Comparison(f"drafts, at most {limit}", single)
    if not config.k:
        yield Comparison("drafts", skipped="the bundle has no drafter")
    for name, some in ("no drafts", full), ("drafts of each limit", [_limited(case, next(limits)) for case in full]):
        lacking = "the bundle serves one request at a time" * (config.batch == 1)
        groups = [] if lacking else both(rng.sample(some, len(some)))
        yield Comparison(f"full batches in another order, {name}", groups, skipped=lacking)
    for rows in sorted({rows for rows, _ in config.prompts}):
        parts = [rest(case, t) for case in cases for t in {1, rng.randint(1, len(case.ids) - 1), len(case.ids) - 1}]
        yield Comparison(
            f"recomputed by prefill of {rows} rows", both([_limited(c, next(limits)) for c in parts]), rows
        )
    for k in (0, *config.ks):
        lasts = (_limited(rest(case, len(case.ids) - 1), k) for case in cases)
        after = [last._replace(prompt=len(case.request.ids)) for case, last in zip(cases, lasts, strict=True)]
        yield Comparison(f"steps of {k} drafts as a cached prefix", [[case] for case in both(after)[-1]])
    answers = [] if config.greedy else [list(map(answer, cases))]
    yield Comparison("answers scored as prompts", answers, skipped=_NO_SCORES * config.greedy)


def _scored(request: Request) -> Request:
    return replace(request, logprobs=_BEST)


def _limited(case: Case, limit: int) -> Case:
    return case._replace(request=replace(case.request, k_limit=limit))
