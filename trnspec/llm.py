"""A bundle as an object that continues prompts."""

import operator
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from model.errors import UserError
from trnspec.bundle.opening import read_bundle
from trnspec.engine.config import engine_config
from trnspec.engine.engine import Engine, Event
from trnspec.engine.request import MaskFn, Params, Request, Result, check
from trnspec.engine.text import Detokenizer, encode, ids_of_words, load_tokenizer
from trnspec.engine.warmup import graphs_of, prepare_graphs
from trnspec.runtime.runner import load_runner, platform_of

# text, or token ids
Prompt = str | Sequence[int]
GREEDY = Params()


@dataclass
class Output(Result):
    """The continuation of a prompt: a `Result` with the `text` of its ids."""

    text: str = ""


class TextStream(Iterator[str]):
    """An iterator of text deltas; `output` is set after the last one.

    A stream keeps its slot until it ends, `close`, or garbage collection.
    """

    def __init__(self, deltas: Generator[str, None, Output]) -> None:
        self.output: Output | None = None
        self._deltas = deltas

    def __next__(self) -> str:
        try:
            return next(self._deltas)
        except StopIteration as end:
            self.output = self.output or end.value
            raise

    def close(self) -> None:
        """Cancel the rest."""
        self._deltas.close()


class LLM:
    """A bundle's models on a platform: cpu, neuron (NEFFs by nrtpy), pjrt (JAX's plugin), or auto. Not thread-safe.

    Tokens are a function of prompt, `Params` and bundle only; prompts are served together, up to the bundle's batch.
    Every file is verified as it is read. As a context manager it frees its memory at the end. `load=False` leaves the
    weights to a later `load`. Raises UserError for a folder without a bundle that can run here.
    """

    def __init__(self, bundle: str | Path, platform: str = "auto", load: bool = True) -> None:
        self.bundle = read_bundle(Path(bundle))
        self.platform = platform_of(self.bundle, platform)
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
        # no prompts at all are an empty batch
        single = isinstance(prompt, str) or (len(prompt) > 0 and not isinstance(prompt[0], str | Sequence))
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
        """Continue one prompt, as an iterator of text deltas; `options` are those of `request`.

        Open streams are served together.
        """
        request = self.request(prompt, params, **options)
        text = request.cut or Detokenizer(self.tokenizer)
        return TextStream(self._text(replace(request, cut=text), text))

    def request(
        self, prompt: Prompt, params: Params = GREEDY, stop: str | Sequence[str] = (), speculation: bool = True,
        max_new_tokens: int = 128, k_limit: int | None = None, allowed: MaskFn | None = None,
        logprobs: int | None = None, prompt_logprobs: int | None = None,
    ) -> Request:  # fmt: skip
        """The engine's request for a prompt. Raises UserError if this bundle cannot serve it.

        `stop`: the output ends before the first of these strings. Without `speculation` no drafts are accepted, which
        changes no token. The others are those of `Request`.
        """
        ids = encode(self.tokenizer, prompt) if isinstance(prompt, str) else tuple(map(operator.index, prompt))
        params = replace(params, bad_words=ids_of_words(self.tokenizer, params.bad_words))
        stops, ends = (stop,) if isinstance(stop, str) else tuple(stop), self.bundle.spec.target_config.eos_token_ids
        cut = Detokenizer(self.tokenizer, stops, params.min_tokens) if stops else None
        request = Request(ids, params, max_new_tokens, ends, k_limit, cut, allowed, logprobs, prompt_logprobs)
        check(self.config, request)
        return request if speculation else replace(request, k_limit=0)

    def _text(self, request: Request, text: Any) -> Generator[str, None, Output]:
        for _, output in self._serve([request]):
            if delta := text.rest(output.text) if output else text.delta():
                yield delta
            if output:
                return self._checked(output)
        raise AssertionError("a request ends with an output")

    def _serve(self, requests: list[Request]) -> Iterator[tuple[int, Output | None]]:
        """For each step of a request: its place in the list, and at its end its output."""
        engine = self._engine
        if engine is None:
            raise UserError(f"{self.bundle.path} is not loaded; call load() or open it again")
        prepare_graphs(engine, (key for request in requests for key in graphs_of(engine, request)))
        places, events = {engine.add(request): place for place, request in enumerate(requests)}, deque[Event]()
        self._events |= dict.fromkeys(places, events)
        try:
            while places:
                # events of other prompts wait for their readers
                while not events:
                    if engine is not self._engine:
                        raise UserError(f"{self.bundle.path} was closed before this prompt was done; open it again")
                    for new in engine.step():
                        self._events[new.number].append(new)
                event = events.popleft()
                if (result := event.result) is None:
                    yield places[event.number], None
                    continue
                yield places[event.number], Output(**vars(result), text=self.tokenizer.decode(result.ids))
                del places[event.number], self._events[event.number]
        finally:
            for number in places:
                engine.cancel(number)
                self._events.pop(number, None)

    @staticmethod
    def _checked(output: Output) -> Output:
        if output.error:
            raise UserError(output.error)
        return output
