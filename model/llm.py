"""The front door: a bundle as an object that turns prompts into text."""

from __future__ import annotations

import operator
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, TypeGuard, cast, overload

from model.bundle.opening import open_bundle
from model.errors import UserError
from model.serving.engine import Engine, Event, SpecStep
from model.serving.masks import Allowed
from model.serving.ready import compile_graphs, shape_of
from model.serving.request import Params, Request, Result, check, check_separate
from model.serving.runtime import Graphs
from model.serving.switching import find_table
from model.serving.text import Pieces, load_tokenizer, stop_cut

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

# text, or the ids of its tokens
Prompt = str | Sequence[int]
GREEDY = Params()


class Options(TypedDict, total=False):
    """How to continue a prompt, beside its `Params`. `k_limit` and `speculation` change no token.

    `max_new_tokens`, 128 by default. `stop`: one string or several, before whose first the text is cut. `k_limit`: the
    most drafts to accept in a step, by default the bundle's k. `speculation`: False runs the target alone.
    `allowed`: a function of the new ids that returns the mask of the next one, int32 words of a bit an id, or None if
    the text ends with them; it is asked with drafts behind them too, which may not come. `logprobs`: True for
    `Output.logprobs`. Both need a bundle built with --structured.
    """

    max_new_tokens: int
    stop: str | Sequence[str]
    k_limit: int | None
    speculation: bool
    allowed: Allowed | None
    logprobs: bool


@dataclass(frozen=True)
class Output:
    """What a prompt got.

    `ids` are the new tokens and `text` is theirs. `finish_reason` is eos, stop (a stop string), length
    (max_new_tokens) or context (the bundle's length). `tokens_per_step` counts what a pass of the target emitted on
    average, `acceptance` is the share of drafts accepted at each place of a step. `seconds` is wall time on this
    machine until the prompt was done, compilation apart. `drafts_offered` and `drafts_kept` are counts at each place
    of a step, `steps_of_k` of steps by the k of their graph. `logprobs`, if asked
    for, are the ids' log-probabilities by the target's logits, before temperature and filters.
    """

    ids: tuple[int, ...]
    text: str
    finish_reason: str
    steps: int
    tokens_per_step: float
    acceptance: tuple[float, ...]
    refreshes: int
    seconds: float
    drafts_offered: tuple[int, ...] = ()
    drafts_kept: tuple[int, ...] = ()
    steps_of_k: Mapping[int, int] = field(default_factory=dict)
    logprobs: tuple[float, ...] = ()


class TextStream(Iterator[str]):
    """Pieces of text as they come, which join to the text; `output` is there once they have ended.

    One that is left early holds its place in the batch until `close`, or until nothing refers to it.
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

    `tuning` is a table that says when to speculate (by default the bundle's own, if it has one); `record` is told of
    every speculative step. Every file is held against the manifest before anything runs; `verify=False` leaves that
    out, and damaged weights then answer. `separate=True` drafts and verifies by two graphs, the reference of the fused
    step, in a bundle built with --separate. Tokens are a function of prompt, `Params` and bundle alone. UserError, one
    sentence, if the folder holds no bundle that can run here. As a context manager it frees its memory at the end.
    """

    def __init__(
        self,
        bundle: str | Path,
        tuning: str | Path | None = None,
        record: Callable[[SpecStep], None] | None = None,
        load: bool = True,
        verify: bool = True,
        separate: bool = False,
    ) -> None:
        path = Path(bundle)
        self.bundle = open_bundle(path, verify)
        self.tokenizer = load_tokenizer(path)
        self.shape, self.table = shape_of(self.bundle), find_table(path, Path(tuning) if tuning else None)
        check_separate(self.shape, separate)
        self._record, self._separate = record, separate
        self._graphs: Graphs | None = None
        # by whether they speculate
        self._engines: dict[bool, Engine] = {}
        self._events: dict[int, deque[Event]] = {}
        if load:
            self.load()

    def load(self) -> None:
        """Bring the weights to the devices, if they are not there; graphs are compiled when first needed."""
        if self._graphs is None:
            self._graphs = graphs = Graphs(self.bundle)
            self._engines = {
                True: Engine(graphs, self.shape, True, self.table, self._record, separate=self._separate),
                False: Engine(graphs, self.shape, False),
            }

    def close(self) -> None:
        """Free weights, caches and compiled graphs; `load` brings them back."""
        if self._graphs is not None:
            self._graphs.close()
        self._graphs, self._engines = None, {}

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

        A prompt is text or token ids. UserError for a prompt, a parameter or an option that the bundle cannot serve.
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
        return TextStream(self._text(request, pieces, options.get("speculation", True)))

    def request(self, prompt: Prompt, params: Params, options: Options) -> Request:
        """What the engine is asked for a prompt, checked; UserError if this bundle cannot serve it."""
        if unknown := sorted(options.keys() - Options.__annotations__):
            raise UserError(
                f"there is no option {', '.join(unknown)}; the options are {', '.join(Options.__annotations__)}"
            )
        request = Request(
            self._ids(prompt),
            params,
            options.get("max_new_tokens", Request.max_new_tokens),
            self.bundle.config("target").eos_token_ids,
            options.get("k_limit"),
            stop_cut(self.tokenizer, _stops(options)),
            options.get("allowed"),
            options.get("logprobs", False),
        )
        check(self.shape, request)
        return request

    def _ids(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tuple(self.tokenizer.encode(prompt).ids)
        vocabulary = self.bundle.config("target").vocab_size
        for token in (ids := tuple(map(operator.index, prompt))):
            if not 0 <= token < vocabulary:
                raise UserError(f"the prompt holds the id {token}; this bundle's ids are 0 to {vocabulary - 1}")
        return ids

    def _generate(self, prompts: Sequence[Prompt], params: Sequence[Params], options: Options) -> list[Output]:
        requests = [self.request(p, q, options) for p, q in zip(prompts, params, strict=True)]
        outputs: dict[int, Output] = {}
        for place, _, output in self._serve(requests, options.get("speculation", True)):
            if output:
                outputs[place] = output
        return [outputs[place] for place in range(len(requests))]

    def _text(self, request: Request, pieces: Pieces, speculation: bool) -> Generator[str, None, Output]:
        for _, ids, output in self._serve([request], speculation):
            if piece := pieces.feed(ids) if output is None else pieces.end(output.text):
                yield piece
            if output:
                return output
        raise AssertionError("a request ends with an output")

    def _serve(self, requests: list[Request], speculation: bool) -> Iterator[tuple[int, list[int], Output | None]]:
        """The place of a request among these, the ids that it keeps anew and, at its end, its output."""
        engine = self._idle_or_alike(speculation, requests)
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

    def _idle_or_alike(self, speculation: bool, requests: list[Request]) -> Engine:
        """The engine that serves these, with its graphs compiled; one set of caches serves one engine at a time."""
        if self._graphs is None:
            raise UserError(f"{self.bundle.path} is not loaded; call load() or open it again")
        if self._engines[not speculation].busy:
            raise UserError(
                "a stream is open that was asked with the other value of speculation; read it to its end, or close it"
            )
        engine = self._engines[speculation]
        if not engine.busy:
            for request in requests:
                compile_graphs(self._graphs, request, engine)
        return engine

    def _step(self, engine: Engine) -> None:
        """One step of all that is being served; what it did for others waits for them."""
        if engine.runner is not self._graphs:
            raise UserError(f"{self.bundle.path} was closed before this prompt was done; open it again")
        for event in engine.step():
            self._events[event.number].append(event)

    def _output(self, result: Result, seconds: float) -> Output:
        acceptance = tuple(a / d for a, d in zip(result.accepted, result.drafted, strict=True) if d)
        text = self.tokenizer.decode(result.ids)
        steps, rate = result.steps, result.tokens_per_step
        counts = tuple(result.drafted), tuple(result.accepted), dict(sorted(result.steps_of_k.items()))
        told = (result.reason, steps, rate, acceptance, result.refreshes, seconds)
        logprobs = tuple(logprob for logprob, _ in result.scores)
        return Output(tuple(result.ids), text, *told, *counts, logprobs)


def _is_one(prompt: Prompt | Sequence[Prompt]) -> TypeGuard[Prompt]:
    # no prompts at all are an empty batch
    return isinstance(prompt, str) or (len(prompt) > 0 and not isinstance(prompt[0], str | Sequence))


def _stops(options: Options) -> tuple[str, ...]:
    stop = options.get("stop", ())
    return (stop,) if isinstance(stop, str) else tuple(stop)
