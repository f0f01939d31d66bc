"""The front door: a bundle as an object that turns prompts into text."""

from __future__ import annotations

import operator
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, TypeGuard, cast, overload

from model.errors import UserError
from trnspec.bundle.opening import open_bundle
from trnspec.engine.engine import Engine, Event
from trnspec.engine.masks import Allowed
from trnspec.engine.ready import compile_graphs, served_shape
from trnspec.engine.request import Params, Request, Result, Score, check
from trnspec.engine.text import Pieces, ids_of_words, load_tokenizer, stop_cut
from trnspec.runtime.xla import Graphs

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

# text, or the ids of its tokens
Prompt = str | Sequence[int]
GREEDY = Params()


class Options(TypedDict, total=False):
    """How to continue a prompt, beside its `Params`. `k_limit` and `speculation` never change a token.

    `max_new_tokens`, 128 by default. `stop`: one string or several; the text is cut before the first of them.
    `k_limit`: the most drafts to accept in a step, by default the bundle's k. `speculation`: False is a `k_limit` of 0.
    `allowed`: a function of the new ids that returns the mask of the next one, int32 words with a bit for each id, or
    None if the text ends with them; it is also called with drafts behind them, which may be rejected. `logprobs`: for
    `Output.scores`, each with so many of the best ids, at most 20; `prompt_logprobs`: the same of the prompt's ids.
    """

    max_new_tokens: int
    stop: str | Sequence[str]
    k_limit: int | None
    speculation: bool
    allowed: Allowed | None
    logprobs: int | None
    prompt_logprobs: int | None


@dataclass(frozen=True)
class Output:
    """The continuation of a prompt: its new `ids` and their `text`.

    `finish_reason` is eos, stop (a stop string), length (max_new_tokens) or context (the bundle's length). `steps` are
    passes of the target after the prompt's, `seconds` wall time on this machine without compilation. `drafts_offered`
    and `drafts_kept` count drafts by their place in a step. `scores`, if requested, are the ids' log-probabilities by
    the target's logits, before penalties, temperature and filters; `prompt_scores` those of the prompt's ids but the
    first.
    """

    ids: tuple[int, ...]
    text: str
    finish_reason: str
    steps: int
    seconds: float
    drafts_offered: tuple[int, ...] = ()
    drafts_kept: tuple[int, ...] = ()
    scores: tuple[Score, ...] = ()
    prompt_scores: tuple[Score, ...] = ()

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a step emitted on average; the first token is the prompt's."""
        return (len(self.ids) - 1) / self.steps if self.steps else 0.0

    @property
    def acceptance(self) -> tuple[float, ...]:
        """The share of drafts accepted at each place of a step."""
        return tuple(k / o for k, o in zip(self.drafts_kept, self.drafts_offered, strict=True) if o)


class TextStream(Iterator[str]):
    """Pieces of text as they come, which join to the text; `output` is set once they have ended.

    A stream that is left early holds its place in the batch until `close`, or until nothing refers to it.
    """

    def __init__(self, pieces: Generator[str, None, Output]) -> None:
        self.output: Output | None = None
        self._pieces = pieces

    def __next__(self) -> str:
        try:
            return next(self._pieces)
        except StopIteration as end:
            self.output = self.output or end.value
            raise

    def close(self) -> None:
        """Give up the rest."""
        self._pieces.close()


class LLM:
    """A bundle's models, loaded; prompts are served together, up to the bundle's batch. Not for several threads.

    Every file is checked against the manifest as it is read. Tokens are a function of prompt, `Params` and bundle
    alone. UserError, one sentence, if the folder holds no bundle that can run here. As a context manager it frees its
    memory at the end. `load=False` leaves the weights to a later `load`.
    """

    def __init__(self, bundle: str | Path, load: bool = True) -> None:
        self.bundle = open_bundle(Path(bundle))
        self.tokenizer = load_tokenizer(self.bundle)
        self.shape, self._eos = served_shape(self.bundle), self.bundle.spec.target_config.eos_token_ids
        self._graphs: Graphs | None = None
        self._engine: Engine | None = None
        self._events: dict[int, deque[Event]] = {}
        if load:
            self.load()

    def load(self) -> None:
        """Bring the weights to the devices, if they are not there; graphs are compiled when first needed."""
        if self._graphs is None:
            self._graphs = Graphs(self.bundle)
            self._engine = Engine(self._graphs, self.shape)

    def close(self) -> None:
        """Free weights, caches and compiled graphs; `load` brings them back."""
        if self._graphs is not None:
            self._graphs.close()
        self._graphs = self._engine = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @overload
    def generate(self, prompt: Prompt, params: Params = ..., **options: Unpack[Options]) -> Output: ...  # type: ignore[overload-overlap]

    @overload
    def generate(
        self, prompt: Sequence[Prompt], params: Params | Sequence[Params] = ..., **options: Unpack[Options]
    ) -> list[Output]: ...

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params] = GREEDY,
        **options: Unpack[Options],
    ) -> Output | list[Output]:
        """Continue one prompt, or a list of them together, each with its own `Params` if a list of these is given.

        A prompt is text or token ids. UserError for a prompt, a parameter or an option that the bundle cannot serve,
        and where the model's logits hold NaN or infinity; streams that are open go on.
        """
        if _is_one(prompt):
            if not isinstance(params, Params):
                raise UserError(f"{len(params)} Params came for one prompt; give one")
            return self._generate([prompt], [params], options)[0]
        prompts = cast("Sequence[Prompt]", prompt)
        each = [params] * len(prompts) if isinstance(params, Params) else list(params)
        if len(each) != len(prompts):
            raise UserError(f"{len(each)} Params came for {len(prompts)} prompts; give one for all, or one for each")
        return self._generate(prompts, each, options)

    def stream(self, prompt: Prompt, params: Params = GREEDY, **options: Unpack[Options]) -> TextStream:
        """Continue one prompt, as an iterator of pieces of text. Streams that are open are served together."""
        request, pieces = self.request(prompt, params, options), Pieces(self.tokenizer, _stops(options))
        return TextStream(self._text(request, pieces))

    def request(self, prompt: Prompt, params: Params, options: Options) -> Request:
        """The engine's request for a prompt, checked; UserError if this bundle cannot serve it."""
        if unknown := sorted(options.keys() - Options.__annotations__):
            raise UserError(
                f"there is no option {', '.join(unknown)}; the options are {', '.join(Options.__annotations__)}"
            )
        request = Request(
            tuple(self.tokenizer.encode(prompt).ids if isinstance(prompt, str) else map(operator.index, prompt)),
            replace(params, bad_words=ids_of_words(self.tokenizer, params.bad_words)),
            options.get("max_new_tokens", Request.max_new_tokens),
            self._eos,
            options.get("k_limit"),
            stop_cut(self.tokenizer, _stops(options)),
            options.get("allowed"),
            options.get("logprobs"),
            options.get("prompt_logprobs"),
        )
        check(self.shape, request)
        return request if options.get("speculation", True) else replace(request, k_limit=0)

    def _generate(self, prompts: Sequence[Prompt], params: Sequence[Params], options: Options) -> list[Output]:
        requests = [self.request(p, q, options) for p, q in zip(prompts, params, strict=True)]
        outputs: dict[int, Output] = {}
        for place, _, output in self._serve(requests):
            if output:
                outputs[place] = output
        return [outputs[place] for place in range(len(requests))]

    def _text(self, request: Request, pieces: Pieces) -> Generator[str, None, Output]:
        for _, ids, output in self._serve([request]):
            if piece := pieces.feed(ids) if output is None else pieces.end(output.text):
                yield piece
            if output:
                return output
        raise AssertionError("a request ends with an output")

    def _serve(self, requests: list[Request]) -> Iterator[tuple[int, list[int], Output | None]]:
        """For each step of a request: its place among these, the new ids that it keeps and, at its end, its output."""
        engine, graphs = self._engine, self._graphs
        if engine is None or graphs is None:
            raise UserError(f"{self.bundle.path} is not loaded; call load() or open it again")
        # a graph that is compiled runs once, into the caches
        for request in requests if not engine.busy else ():
            compile_graphs(graphs, request, engine)
        begin, places = time.perf_counter(), {engine.add(request): i for i, request in enumerate(requests)}
        self._events |= {number: deque() for number in places}
        try:
            while places:
                for number in [n for n in places if self._events[n]]:
                    event, place = self._events[number].popleft(), places[number]
                    if event.result:
                        del places[number], self._events[number]
                    seconds = time.perf_counter() - begin
                    yield place, event.ids, self._output(event.result, seconds) if event.result else None
                if places and not any(self._events[n] for n in places):
                    self._step(engine)
        finally:
            for number in places:
                engine.cancel(number)
                self._events.pop(number, None)

    def _step(self, engine: Engine) -> None:
        """One step of all requests that are being served; other prompts' events wait for their readers."""
        if engine is not self._engine:
            raise UserError(f"{self.bundle.path} was closed before this prompt was done; open it again")
        for event in engine.step():
            self._events[event.number].append(event)

    def _output(self, result: Result, seconds: float) -> Output:
        if result.error:
            raise UserError(
                f"{result.error}; look for an overflow of the bundle's dtype, or build it again from a whole checkpoint"
            )
        drafts = tuple(result.drafted), tuple(result.accepted)
        scores = tuple(result.scores), result.prompt_scores
        text = self.tokenizer.decode(result.ids)
        return Output(tuple(result.ids), text, result.reason, result.steps, seconds, *drafts, *scores)


def _is_one(prompt: Prompt | Sequence[Prompt]) -> TypeGuard[Prompt]:
    # no prompts at all are an empty batch
    return isinstance(prompt, str) or (len(prompt) > 0 and not isinstance(prompt[0], str | Sequence))


def _stops(options: Options) -> tuple[str, ...]:
    stop = options.get("stop", ())
    return (stop,) if isinstance(stop, str) else tuple(stop)
