"""A bundle as an object that turns prompts into text."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model.errors import UserError
from trnspec.bundle.opening import read_bundle
from trnspec.engine.config import engine_config
from trnspec.engine.engine import Engine, Event
from trnspec.engine.request import MaskFn, Params, Request, Result, Score, check
from trnspec.engine.text import Detokenizer, encode, ids_of_words, load_tokenizer
from trnspec.engine.warmup import prepare_graphs
from trnspec.runtime.runner import load_runner

if TYPE_CHECKING:
    from typing_extensions import Self

# text, or token ids
Prompt = str | Sequence[int]
GREEDY = Params()


@dataclass(frozen=True)
class Output:
    """The continuation of a prompt: its new `ids` and their `text`.

    `finish_reason`: eos, stop (a stop string), length (max_new_tokens), context (the bundle's length), or error, with
    a sentence in `error`. `steps`: target passes after the prefill. `seconds`: wall time from the prompt's admission to
    the last token. `drafts_offered`, `drafts_kept`: drafts by their place in a step. `scores`, `prompt_scores`: the
    log-probabilities of the ids, and of the prompt's ids but the first, before penalties, temperature and filters.
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
    error: str = ""

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a step emitted on average; the first token is the prefill's."""
        return (len(self.ids) - 1) / self.steps if self.steps else 0.0

    @property
    def acceptance(self) -> tuple[float, ...]:
        """The share of drafts accepted at each place of a step."""
        return tuple(k / o for k, o in zip(self.drafts_kept, self.drafts_offered, strict=True) if o)


class TextStream(Iterator[str]):
    """Pieces of text as they come, which join to the text; `output` is set after the last one.

    A stream keeps its slot until it ends, `close`, or garbage collection.
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
        """Cancel the rest."""
        self._pieces.close()


class LLM:
    """A bundle's models on a platform: cpu, neuron (JAX's plugin) or nrt (NEFFs). Not thread-safe.

    Tokens are a function of prompt, `Params` and bundle only; prompts are served together, up to the bundle's batch.
    Every file is verified as it is read. As a context manager it frees its memory at the end. `load=False` leaves the
    weights to a later `load`. Raises UserError for a folder without a bundle that can run here.
    """

    def __init__(self, bundle: str | Path, platform: str = "cpu", load: bool = True) -> None:
        if platform not in ("cpu", "neuron", "nrt"):
            raise UserError(f"platform is {platform!r}; it must be cpu, neuron or nrt")
        self.bundle, self.platform = read_bundle(Path(bundle)), platform
        self.tokenizer, self.config = load_tokenizer(self.bundle), engine_config(self.bundle)
        self._engine: Engine | None = None
        self._events: dict[int, deque[Event]] = {}
        if load:
            self.load()

    def load(self) -> None:
        """Load the weights, if they are not loaded; graphs are compiled when first needed."""
        if self._engine is None:
            self._engine = Engine(load_runner(self.bundle, self.platform), self.config)

    def close(self) -> None:
        """Free weights, caches and compiled graphs; `load` brings them back."""
        if self._engine is not None:
            self._engine.runner.close()
        self._engine = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self, prompt: Prompt | Sequence[Prompt], params: Params | Sequence[Params] = GREEDY, **options: Any
    ) -> Any:
        """Continue one prompt, or a list of prompts together; returns an Output, or a list of them.

        A prompt is text or token ids; `params` are for all prompts or one for each; `options` are those of `request`.
        Raises UserError for what the bundle cannot serve, and if a single prompt ends with an error.
        """
        single = _is_single(prompt)
        prompts: Sequence[Any] = [prompt] if single else prompt
        if single and not isinstance(params, Params):
            raise UserError(f"{len(params)} Params came for one prompt; give one")
        each = [params] * len(prompts) if isinstance(params, Params) else list(params)
        if len(each) != len(prompts):
            raise UserError(f"{len(each)} Params came for {len(prompts)} prompts; give one for all, or one for each")
        requests = [self.request(p, q, **options) for p, q in zip(prompts, each, strict=True)]
        outputs = {place: output for place, output in self._serve(requests) if output}
        return self._checked(outputs[0]) if single else [outputs[place] for place in range(len(requests))]

    def stream(self, prompt: Prompt, params: Params = GREEDY, **options: Any) -> TextStream:
        """Continue one prompt, as an iterator of pieces of text; `options` are those of `request`.

        Open streams are served together.
        """
        request = self.request(prompt, params, **options)
        text = request.cut or Detokenizer(self.tokenizer)
        return TextStream(self._text(replace(request, cut=text), text))

    def request(
        self,
        prompt: Prompt,
        params: Params = GREEDY,
        *,
        max_new_tokens: int = Request.max_new_tokens,
        stop: str | Sequence[str] = (),
        k_limit: int | None = None,
        speculation: bool = True,
        allowed: MaskFn | None = None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
    ) -> Request:
        """The engine's request for a prompt. Raises UserError if this bundle cannot serve it.

        `stop`: strings before the first of which the text is cut. `k_limit`: the most drafts to accept in a step, none
        without `speculation`; neither changes a token. `allowed`: a function of the new ids that returns the mask of
        the next one, int32 words with a bit for each id, or None if the text ends with them; it is also called with
        drafts after them. `logprobs`, `prompt_logprobs`: for scores of the new or the prompt's ids, each with so many
        of the top ids, at most 20.
        """
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        request = Request(
            encode(self.tokenizer, prompt) if isinstance(prompt, str) else tuple(map(operator.index, prompt)),
            replace(params, bad_words=ids_of_words(self.tokenizer, params.bad_words)),
            max_new_tokens,
            self.bundle.spec.target_config.eos_token_ids,
            k_limit,
            Detokenizer(self.tokenizer, stops, params.min_tokens) if stops else None,
            allowed,
            logprobs,
            prompt_logprobs,
        )
        check(self.config, request)
        return request if speculation else replace(request, k_limit=0)

    def _text(self, request: Request, text: Any) -> Generator[str, None, Output]:
        for _, output in self._serve([request]):
            if piece := text.rest(output.text) if output else text.piece():
                yield piece
            if output:
                return self._checked(output)
        raise AssertionError("a request ends with an output")

    def _serve(self, requests: list[Request]) -> Iterator[tuple[int, Output | None]]:
        """For each step of a request: its place in the list, and at its end its output."""
        engine = self._engine
        if engine is None:
            raise UserError(f"{self.bundle.path} is not loaded; call load() or open it again")
        prepare_graphs(engine, requests)
        places = {engine.add(request): place for place, request in enumerate(requests)}
        self._events |= {number: deque() for number in places}
        try:
            while places:
                for number in [n for n in places if self._events[n]]:
                    event, place = self._events[number].popleft(), places[number]
                    if event.result:
                        del places[number], self._events[number]
                    yield place, self._output(event.result) if event.result else None
                if places and not any(self._events[n] for n in places):
                    self._step(engine)
        finally:
            for number in places:
                engine.cancel(number)
                self._events.pop(number, None)

    def _step(self, engine: Engine) -> None:
        """One step of all requests; events of other prompts wait for their readers."""
        if engine is not self._engine:
            raise UserError(f"{self.bundle.path} was closed before this prompt was done; open it again")
        for event in engine.step():
            self._events[event.number].append(event)

    def _output(self, result: Result) -> Output:
        return Output(
            tuple(result.ids), self.tokenizer.decode(result.ids), result.reason, result.steps, result.seconds,
            tuple(result.drafted), tuple(result.accepted), tuple(result.scores), result.prompt_scores, result.error,
        )  # fmt: skip

    @staticmethod
    def _checked(output: Output) -> Output:
        if output.error:
            raise UserError(output.error)
        return output


def _is_single(prompt: Prompt | Sequence[Prompt]) -> bool:
    # no prompts at all are an empty batch
    return isinstance(prompt, str) or (len(prompt) > 0 and not isinstance(prompt[0], str | Sequence))
