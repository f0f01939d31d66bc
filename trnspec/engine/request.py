"""A request and its result: sampling parameters, prompt ids, limits; which requests a bundle can serve."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from model.cache import KEY_TILE
from model.errors import UserError
from model.graph_key import GraphKey
from model.logits_processors import MAX_BIASES
from model.logprobs import TOP
from trnspec.engine.masks import Allowed

_WORD = 1 << 32
# source: _MAX_TEMP of vllm/sampling_params.py (vllm-project/vllm), which raises a lower temperature to it
_LOWEST_TEMPERATURE = 1e-2
# far above it 1 / T is no fp32 number; at it the noise alone decides
_HIGHEST_TEMPERATURE = 1e30
# why a request ended whose model gave no logits to draw from
ERROR = "error"
NO_DRAW = "the model's logits hold NaN or infinity, or leave no id to draw,"
_NO_PENALTIES = (0.0, 0.0, 1.0)


class Chunk(NamedTuple):
    """Some ids of a prompt: `size` from position `first` on, by the graph of `rows` that attend `keys` positions."""

    first: int
    size: int
    rows: int
    keys: int

    @property
    def last(self) -> int:
        """The position after it."""
        return self.first + self.size


@dataclass(frozen=True)
class Shape:
    """The facts of a bundle that an engine needs; `shape_of` in `trnspec/engine/ready.py` makes it."""

    # the k of the steps that draft, rising; none where the target runs alone
    ks: tuple[int, ...]
    batch: int
    max_len: int
    buckets: tuple[int, ...]
    # ids are below it
    vocabulary: int
    # blocks of a pool of caches, block 0 among them
    pool: int
    # whether the host brings the drafts of a step
    host_drafts: bool = False
    # rows and keys of the prompts' graphs, rising; without any, each bucket takes a whole prompt
    prompts: tuple[tuple[int, int], ...] = ()
    # ids before a prompt's end that its last chunk holds
    kept: int = 0
    # whether the draft's part of a prompt is a graph of its own
    apart: bool = False
    # what a chunk of a prompt costs beside its graph's rows, in rows
    beside_rows: int = 0

    @property
    def k(self) -> int:
        """The most drafts of a step."""
        return self.ks[-1] if self.ks else 0

    @property
    def rows(self) -> int:
        """N: the most ids that a step emits for a sequence."""
        return self.k + 1

    def graph_k(self, drafts: int, asking: bool = False) -> int:
        """The k of the smallest graph that can accept this number of drafts; 0 is the target's alone.

        There are asking graphs of 0 and of the largest k.
        """
        return next(k for k in ((0, self.k) if asking else (0, *self.ks)) if k >= drafts)

    def chunk(self, first: int, length: int, most: int | None = None) -> Chunk:
        """The next chunk of ids from position `first` to `length`, of at most `most` of them.

        It is the first of those whose graphs take least time together for the rest: their rows, and what a chunk costs
        beside them.
        """
        first = min(first, max(0, length - self.kept))
        left = min(length - first, most or length)
        if not self.prompts:
            return Chunk(first, left, self.bucket(left), self.bucket(left))
        rows = _first_rows(tuple(sorted({rows for rows, _ in self.prompts})), left, self.beside_rows)
        count = min(left, rows)
        keys = min(keys for r, keys in self.prompts if r == rows and keys >= first + count)
        return Chunk(first, count, rows, keys)

    def has(self, key: GraphKey) -> bool:
        """Whether a request of any length may need this graph, by the keys that it reads."""
        if key.is_prefill and self.prompts:
            return (key.rows, key.bucket) in self.prompts
        return key.bucket in self.buckets

    def blocks(self, length: int) -> int:
        """The blocks of so many positions, at most those of a sequence."""
        return -(-min(length, self.max_len) // KEY_TILE)

    def chunks(self, length: int, first: int = 0, most: int | None = None) -> Iterator[Chunk]:
        """The chunks of a prompt of this length whose first ids are cached."""
        while first < length:
            chunk = self.chunk(first, length, most)
            yield chunk
            first = chunk.last

    def bucket(self, length: int) -> int:
        """The smallest bucket that holds this number of positions, or the largest one."""
        return next((b for b in self.buckets if length <= b), self.max_len)


def _first_rows(sizes: tuple[int, ...], left: int, beside: int) -> int:
    """The rows of the first one, the largest, of the cheapest graphs for so many ids."""
    if left > sizes[-1]:
        return sizes[-1]
    unit = math.gcd(*sizes)
    return _largest_first(sizes, unit, beside)[-(-left // unit)]


@functools.cache
def _largest_first(sizes: tuple[int, ...], unit: int, beside: int) -> list[int]:
    """The largest of the cheapest graphs for each number of units of ids, up to those of the largest size."""
    costs, largest = [0], [0]
    for left in range(1, sizes[-1] // unit + 1):
        of_rows = {rows: rows + beside + costs[max(0, left - rows // unit)] for rows in sizes}
        costs.append(min(of_rows.values()))
        largest.append(max(rows for rows, cost in of_rows.items() if cost == costs[-1]))
    return largest


@dataclass(frozen=True)
class Params:
    """Sampling parameters of one request; the defaults are greedy decoding without filters.

    From the penalties on they mean what they mean in vLLM. `logit_bias` has numbers by id; `allowed_token_ids`, if any,
    are all ids that may be drawn; `bad_words` are never completed, each given as text (to `LLM`) or as ids;
    `min_tokens` new ids come before an end.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    allowed_token_ids: Sequence[int] = ()
    bad_words: Sequence[str | Sequence[int]] = ()
    min_tokens: int = 0

    @property
    def seed_words(self) -> tuple[int, int]:
        """The low and the high word of the seed."""
        return self.seed % _WORD, self.seed // _WORD

    @property
    def draw_temperature(self) -> float:
        """The temperature to draw at: one between 0 and 0.01 is 0.01, as in vLLM, so that logits keep their digits."""
        return max(self.temperature, _LOWEST_TEMPERATURE) if self.temperature else 0.0

    @property
    def filter(self) -> bool:
        """Whether a draw excludes ids by top-k, top-p or min-p."""
        return self.draw_temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def penalties(self) -> tuple[float, float, float]:
        """The presence, frequency and repetition penalty."""
        return self.presence_penalty, self.frequency_penalty, self.repetition_penalty

    @property
    def limits(self) -> bool:
        """Whether ids are forbidden."""
        return bool(self.allowed_token_ids or self.bad_words or self.min_tokens)

    @property
    def asking(self) -> bool:
        """Whether draws need more than temperature and filters."""
        return self.limits or bool(self.logit_bias) or self.penalties != _NO_PENALTIES

    def check(self) -> None:
        """Raise UserError for a parameter outside its range, or of a wrong type."""
        real, whole = (int, float), (int,)
        rules: tuple[tuple[str, Any, tuple[type, ...], Callable[[Any], bool], str], ...] = (
            (
                "temperature",
                self.temperature,
                real,
                lambda v: 0 <= v <= _HIGHEST_TEMPERATURE,
                "a number from 0 to 1e30",
            ),
            ("top-k", self.top_k, whole, lambda v: 0 <= v < 1 << 24, "0 (off) or a count"),
            ("top-p", self.top_p, real, lambda v: 0 < v <= 1, "a number in (0, 1]"),
            ("min-p", self.min_p, real, lambda v: 0 <= v <= 1, "a number in [0, 1]"),
            ("seed", self.seed, whole, lambda v: 0 <= v < _WORD * _WORD, "an integer of 64 bits"),
            ("presence-penalty", self.presence_penalty, real, lambda v: -2 <= v <= 2, "a number in [-2, 2]"),
            ("frequency-penalty", self.frequency_penalty, real, lambda v: -2 <= v <= 2, "a number in [-2, 2]"),
            (
                "repetition-penalty",
                self.repetition_penalty,
                real,
                lambda v: 1e-6 <= v <= 1e6,
                "a number in [1e-6, 1e6]",
            ),
            ("min-tokens", self.min_tokens, whole, lambda v: v >= 0, "a count"),
        )
        rules += tuple(
            (f"logit-bias of {token}", value, real, lambda v: -100 <= v <= 100, "a number in [-100, 100]")
            for token, value in self.logit_bias.items()
        )
        for name, value, types, holds, expected in rules:
            if type(value) not in types or not holds(value):
                raise UserError(f"{name} is {value!r}; it must be {expected}")


@dataclass(frozen=True)
class Request:
    """A prompt as token ids, and how to continue it. An engine serves requests that `check` has passed.

    `k_limit` is the most drafts that a step may accept, by default the bundle's k. `cut` is called after each step with
    all new ids and returns how many of them to keep, or None to go on: a stop string needs the text. `allowed` returns
    the mask of the id after some new ids, or None if the text ends with them (`trnspec/engine/masks.py`); it is also
    called with drafts behind them. `logprobs` requests the scores of the new ids and as many of the best ids beside
    each, `prompt_logprobs` those of the prompt's. `min_tokens` holds back `stop_ids`, and `ends` where another ends a
    request.
    """

    ids: tuple[int, ...]
    params: Params = Params()
    max_new_tokens: int = 128
    stop_ids: tuple[int, ...] = ()
    k_limit: int | None = None
    cut: Callable[[Sequence[int]], int | None] | None = None
    allowed: Allowed | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    ends: tuple[int, ...] = ()

    @property
    def asking(self) -> bool:
        """Whether it needs asking graphs."""
        scored = self.logprobs is not None or self.prompt_logprobs is not None
        return self.allowed is not None or scored or self.params.asking


def check(shape: Shape, request: Request) -> None:
    """Refuse a request that a bundle of this shape cannot serve. Each door calls it once, before any compute."""
    request.params.check()
    if not request.ids:
        raise UserError("the prompt is empty; give at least one token")
    for token in request.ids:
        if type(token) is not int or not 0 <= token < shape.vocabulary:
            raise UserError(f"the prompt holds the id {token!r}; this bundle's ids are 0 to {shape.vocabulary - 1}")
    if len(request.ids) >= shape.max_len:
        raise UserError(
            f"the prompt has {len(request.ids)} tokens, the largest bucket is {shape.max_len} and "
            "one place is needed for an answer; shorten the prompt or build with a larger --max-len"
        )
    if type(request.max_new_tokens) is not int or request.max_new_tokens < 1:
        raise UserError(f"max-new-tokens is {request.max_new_tokens!r}; it must be a count of at least 1")
    limit = request.k_limit
    if limit is not None and (type(limit) is not int or not 0 <= limit <= shape.k):
        raise UserError(f"k-limit is {limit!r}; this bundle drafts 0 to {shape.k} tokens")
    _check_asked(shape, request)


def _check_asked(shape: Shape, request: Request) -> None:
    params = request.params
    for name, count in (("logprobs", request.logprobs), ("prompt-logprobs", request.prompt_logprobs)):
        if count is not None and (type(count) is not int or not 0 <= count <= TOP):
            raise UserError(f"{name} is {count!r}; it must be a count of at most {TOP}")
    if params.min_tokens > request.max_new_tokens:
        raise UserError(f"min-tokens is {params.min_tokens}, above max-new-tokens {request.max_new_tokens}; lower it")
    if len(params.logit_bias) > MAX_BIASES:
        raise UserError(f"logit-bias has {len(params.logit_bias)} ids; it may have {MAX_BIASES}")
    words = [tuple(word) for word in params.bad_words]
    if not all(words):
        raise UserError("bad-words holds an empty one; leave it out")
    for name, ids in (
        ("logit-bias", params.logit_bias),
        ("allowed-token-ids", params.allowed_token_ids),
        ("bad-words", [token for word in words for token in word]),
    ):
        for token in ids:
            if type(token) is not int or not 0 <= token < shape.vocabulary:
                raise UserError(f"{name} holds the id {token!r}; this bundle's ids are 0 to {shape.vocabulary - 1}")


class Score(NamedTuple):
    """An id's log-probability, its rank from 1 on, and the best ids with their log-probabilities."""

    logprob: float
    rank: int
    best: tuple[tuple[int, float], ...] = ()


@dataclass
class Result:
    """New ids of a request, why it ended, and counts of its steps and drafts.

    The `reason` is eos, stop, length, context, or error: the ids are those before logits with NaN or infinity.
    """

    ids: list[int] = field(default_factory=list)
    reason: str = ""
    # why it could not go on, in a sentence; its reason is then "error"
    error: str = ""
    steps: int = 0
    # steps by the k of their graph
    steps_of_k: dict[int, int] = field(default_factory=dict)
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    # of each id, and of the prompt's ids from the second on, if requested
    scores: list[Score] = field(default_factory=list)
    prompt_scores: tuple[Score, ...] = ()

    def count(self, k: int, drafted: int, accepted: int) -> None:
        """Add one step of a graph of k with its drafts and how many were accepted, by position."""
        self.steps += 1
        self.steps_of_k[k] = self.steps_of_k.get(k, 0) + 1
        for tally, reached in ((self.drafted, drafted), (self.accepted, accepted)):
            tally.extend([0] * (drafted - len(tally)))
            for position in range(reached):
                tally[position] += 1

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a target step emitted on average; the prompt's own token is not a step's."""
        return (len(self.ids) - 1) / self.steps if self.steps else 0.0
