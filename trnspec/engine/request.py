"""A request and its result: sampling parameters, prompt, limits; which requests a bundle can serve."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple, get_type_hints

import numpy as np

from model.errors import UserError
from model.graph_key import Stage
from model.logits_processors import MAX_BIASES
from model.logprobs import TOP
from trnspec.engine.config import EngineConfig

_WORD = 1 << 32
# source: _MAX_TEMP of vllm/sampling_params.py (vllm-project/vllm), which raises a lower temperature to it
_MIN_TEMPERATURE = 1e-2
# 1 / T must stay a normal fp32 number
_MAX_TEMPERATURE = 1e30
# the reason of a request that cannot be sampled
ERROR = "error"
CANNOT_SAMPLE = "the logits hold NaN or infinity, or the request's limits exclude every token,"
# (W,) int32 mask of the token after these new ones; None if the output ends with them
MaskFn = Callable[[Sequence[int]], np.ndarray | None]
_PENALTY = (-2, 2, "a number in [-2, 2]")
_BIAS = (-100, 100, "a number in [-100, 100]")


@dataclass(frozen=True)
class Params:
    """Sampling parameters of one request; the defaults are greedy decoding without filters.

    From the penalties on they mean what they mean in vLLM. `bad_words` are text (for `LLM`) or token ids. The ranges
    are the lowest and the highest value, and both as text.
    """

    temperature: Annotated[float, (0, _MAX_TEMPERATURE, "a number from 0 to 1e30")] = 0.0
    top_k: Annotated[int, (0, (1 << 24) - 1, "0 (off) or a count")] = 0
    top_p: Annotated[float, (5e-324, 1, "a number in (0, 1]")] = 1.0
    min_p: Annotated[float, (0, 1, "a number in [0, 1]")] = 0.0
    seed: Annotated[int, (-_WORD * _WORD // 2, _WORD * _WORD - 1, "an integer of 64 bits")] = 0
    presence_penalty: Annotated[float, _PENALTY] = 0.0
    frequency_penalty: Annotated[float, _PENALTY] = 0.0
    repetition_penalty: Annotated[float, (1e-6, 1e6, "a number in [1e-6, 1e6]")] = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    allowed_token_ids: Sequence[int] = ()
    bad_words: Sequence[str | Sequence[int]] = ()
    min_tokens: Annotated[int, (0, float("inf"), "a count")] = 0

    @property
    def seed_words(self) -> tuple[int, int]:
        return self.seed % _WORD, self.seed // _WORD % _WORD

    @property
    def sampling_temperature(self) -> float:
        """The temperature to sample at: as in vLLM at least 0.01 unless 0, so that logits keep their digits."""
        return max(self.temperature, _MIN_TEMPERATURE) if self.temperature else 0.0

    @property
    def filters(self) -> bool:
        """Whether sampling excludes tokens by top-k, top-p or min-p."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def penalties(self) -> tuple[float, float, float]:
        return self.presence_penalty, self.frequency_penalty, self.repetition_penalty

    @property
    def masks(self) -> bool:
        """Whether tokens are excluded by id."""
        return bool(self.allowed_token_ids or self.bad_words or self.min_tokens)

    @property
    def full_sampling(self) -> bool:
        """Whether sampling needs more than temperature and filters."""
        return self.masks or bool(self.logit_bias) or self.penalties != (0.0, 0.0, 1.0)

    def check(self) -> None:
        """Raise UserError for a parameter of a wrong type or outside its range."""
        values: list[Any] = [(name, getattr(self, name), *described) for name, described in _RANGES.items()]
        values += [(f"logit_bias of {token}", bias, float, _BIAS) for token, bias in self.logit_bias.items()]
        for name, value, kind, (lowest, highest, expected) in values:
            if type(value) not in (int, kind) or not lowest <= value <= highest:
                raise UserError(f"{name.replace('_', '-')} is {value!r}; it must be {expected}")


# parameter -> its type and range
_RANGES = {
    name: (hint.__origin__, *hint.__metadata__)
    for name, hint in get_type_hints(Params, include_extras=True).items()
    if hasattr(hint, "__metadata__")
}


@dataclass(frozen=True)
class Request:
    """A prompt as token ids, and how to continue it. An engine serves requests that `check` has passed.

    `k_limit`: the largest number of drafts that a step may accept, by default the bundle's k. `cut`: for stop strings,
    called with all new ids after each one; returns the number of ids to emit if the request ends. `allowed`: a grammar,
    also called with drafts after the new ids. `logprobs`, `prompt_logprobs`: the number of top log-probabilities to
    return with that of each token. `ends`: the ids that `min_tokens` excludes, by default `stop_ids`.
    """

    ids: tuple[int, ...]
    params: Params = Params()
    max_new_tokens: int = 128
    stop_ids: tuple[int, ...] = ()
    k_limit: int | None = None
    cut: Callable[[Sequence[int]], int | None] | None = None
    allowed: MaskFn | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    ends: tuple[int, ...] = ()

    @property
    def prefill(self) -> Stage:
        """The stage of its prompt's graphs."""
        return Stage.PREFILL if self.prompt_logprobs is None else Stage.PREFILL_LOGPROBS

    @property
    def full_sampling(self) -> bool:
        logprobs = self.logprobs is not None or self.prompt_logprobs is not None
        return self.allowed is not None or logprobs or self.params.full_sampling


def check(config: EngineConfig, request: Request) -> None:
    """Raise UserError for a request that the bundle cannot serve. Entry points call it once, before any compute."""
    params, limit = request.params, request.k_limit
    params.check()
    if not request.ids:
        raise UserError("the prompt is empty; give at least one token")
    _check_graphs(config, request)
    words = [tuple(word) for word in params.bad_words]
    every: dict[str, Iterable[Any]] = {
        "the prompt": request.ids, "logit-bias": params.logit_bias, "allowed-token-ids": params.allowed_token_ids,
        "bad-words": itertools.chain(*words),
    }  # fmt: skip
    for name, token in ((name, token) for name, ids in every.items() for token in ids):
        if type(token) is not int or not 0 <= token < config.vocab_size:
            raise UserError(f"{name} holds the id {token!r}; this bundle's ids are 0 to {config.vocab_size - 1}")
    if len(request.ids) >= config.max_len:
        raise UserError(
            f"the prompt has {len(request.ids)} tokens, the largest bucket is {config.max_len} and "
            "one place is needed for an answer; shorten the prompt or build with a larger --max-len"
        )
    if type(request.max_new_tokens) is not int or request.max_new_tokens < 1:
        raise UserError(f"max-new-tokens is {request.max_new_tokens!r}; it must be a count of at least 1")
    if limit is not None and (type(limit) is not int or not 0 <= limit <= config.k):
        raise UserError(f"k-limit is {limit!r}; this bundle drafts 0 to {config.k} tokens")
    for name, count in (("logprobs", request.logprobs), ("prompt-logprobs", request.prompt_logprobs)):
        if count is not None and (type(count) is not int or not 0 <= count <= TOP):
            raise UserError(f"{name} is {count!r}; it must be a count of at most {TOP}")
    if params.min_tokens > request.max_new_tokens:
        raise UserError(f"min-tokens is {params.min_tokens}, above max-new-tokens {request.max_new_tokens}; lower it")
    if len(params.logit_bias) > MAX_BIASES:
        raise UserError(f"logit-bias has {len(params.logit_bias)} ids; it may have {MAX_BIASES}")
    if not all(words):
        raise UserError("bad-words holds an empty one; leave it out")
    ends = (request.ends or request.stop_ids) if params.min_tokens else ()
    if params.allowed_token_ids and {*params.allowed_token_ids} <= {*ends, *(w[0] for w in words if len(w) == 1)}:
        raise UserError("bad-words or min-tokens excludes every id of allowed-token-ids; leave one of them out")


def _check_graphs(config: EngineConfig, request: Request) -> None:
    if config.greedy and (request.params.filters or request.full_sampling):
        raise UserError(
            "this bundle has greedy graphs: no top-k, top-p, min-p, penalties, masks or log-probabilities; leave them "
            "out, or build it with all graphs"
        )


class Score(NamedTuple):
    """A token's log-probability, its rank from 1 on, and the top tokens with their log-probabilities."""

    logprob: float
    rank: int
    best: tuple[tuple[int, float], ...] = ()


@dataclass
class Result:
    """New tokens of a request, why it ended, and counts of its steps and drafts.

    `finish_reason`: eos, stop (a stop string), length (max_new_tokens), context (the bundle's length), or error, with a
    sentence in `error`. `steps`: target passes after the prefill. `drafted`, `accepted`: drafts by their place in a
    step. `scores`, `prompt_scores`: the log-probabilities of the ids, and of the prompt's ids but the first, before
    penalties, temperature and filters. `seconds`: wall time from the request's admission to the last token.
    """

    ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    error: str = ""
    steps: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    prompt_scores: tuple[Score, ...] = ()
    seconds: float = field(default=0.0, compare=False)

    def count(self, drafted: int, accepted: int) -> None:
        """Count a step with its drafts, and how many were accepted."""
        self.steps += 1
        for counts, number in ((self.drafted, drafted), (self.accepted, accepted)):
            counts.extend([0] * (drafted - len(counts)))
            for place in range(number):
                counts[place] += 1

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a target step emitted on average; the first token is the prefill's."""
        return (len(self.ids) - 1) / self.steps if self.steps else 0.0

    @property
    def acceptance(self) -> tuple[float, ...]:
        """The share of drafts accepted at each place of a step."""
        return tuple(a / d for a, d in zip(self.accepted, self.drafted, strict=True) if d)
