"""The list of parameters that a bundle serves. Any other that differs from vLLM's default is refused in a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from model.errors import UserError
from trnspec.engine.masks import Allowed
from trnspec.engine.request import Params, Request, Shape, check

# the graphs serve these
_BY_GRAPHS = {
    "temperature", "top_k", "top_p", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "allowed_token_ids", "bad_words", "min_tokens", "logprobs", "prompt_logprobs", "structured_outputs",
}  # fmt: skip
# vLLM serves these itself, from the emitted ids
_BY_VLLM = {
    "n", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "detokenize", "skip_special_tokens",
    "spaces_between_special_tokens", "include_stop_str_in_output", "output_kind", "stream_interval",
    "flat_logprobs", "skip_clone", "output_text_buffer_length", "skip_reading_prefix_cache",
}  # fmt: skip
_WHY = {
    "watermarking": "it changes the law that a seed draws from; leave it out",
    "thinking_token_budget": "the bundle's graphs force no id; leave it out",
    "logprob_token_ids": "the bundle's graphs return the best ids; use logprobs",
    "use_beam_search": "a bundle draws one text a request; sample n answers",
    "generative scoring": "it needs the log-probabilities of given ids, which the bundle's graphs do not return",
}
# beside None, its default
_OFF = {"watermarking": False}
_LIST = "a bundle serves OpenAI's sampling parameters, and vLLM's that docs/serving.md lists; leave it out"


_NO_MASK: Allowed = lambda ids: None  # noqa: E731


class Refused(UserError):
    """A parameter that a bundle cannot serve, and the sentence that says so."""

    def __init__(self, parameter: str, sentence: str) -> None:
        super().__init__(sentence)
        self.parameter = parameter


def refuse_others(requested: Mapping[str, Any], defaults: dict[str, Any]) -> None:
    """Raise Refused for the first parameter that is neither on the list nor at vLLM's default."""
    for name, value in {**requested, **_typed(requested)}.items():
        on_the_list = name in _BY_GRAPHS or name in _BY_VLLM or name.startswith("_")
        if on_the_list or value is None or value in ([], {}) or value == (defaults | _OFF).get(name):
            continue
        raise Refused(name, f"{name} is not served: {_WHY.get(name, _LIST)}")


def _typed(requested: Mapping[str, Any]) -> dict[str, Any]:
    """What a client typed where vLLM made other parameters of it, which are then at their defaults."""
    extra = requested.get("extra_args") or {}
    typed = {name if name.endswith("_transfer_params") else "vllm_xargs": value for name, value in extra.items()}
    typed["extra_args"] = None
    # vLLM turns its watermark off for both, and asks for ids alone
    if requested.get("watermarking") is False and requested.get("logprobs"):
        if requested.get("logprob_token_ids"):
            typed |= {"logprob_token_ids": None, "generative scoring": True}
        elif not requested.get("detokenize", True):
            typed["use_beam_search"] = True
    return typed


def engine_request(shape: Shape, ids: tuple[int, ...], sampling: Any, allowed: Allowed | None = None) -> Request:
    """The engine's request for a prompt and vLLM's sampling parameters, which `check_request` has passed.

    vLLM cuts at stop strings; the engine ends at its ids and limits by itself, so that no step runs for a request that
    has its answer. `allowed` are the masks of a structured request.
    """
    params = Params(
        float(sampling.temperature),
        max(0, sampling.top_k),
        float(sampling.top_p),
        float(sampling.min_p),
        sampling.seed or 0,
        float(sampling.presence_penalty),
        float(sampling.frequency_penalty),
        float(sampling.repetition_penalty),
        {token: float(bias) for token, bias in (sampling.logit_bias or {}).items()},
        tuple(sampling.allowed_token_ids or ()),
        tuple(map(tuple, sampling.bad_words_token_ids or ())),
        sampling.min_tokens,
    )
    end = () if sampling.eos_token_id is None else (sampling.eos_token_id,)
    return Request(
        ids,
        params,
        min(sampling.max_tokens or shape.max_len, shape.max_len),
        (*end, *(sampling.stop_token_ids or ())),
        allowed=(allowed or _NO_MASK) if sampling.structured_outputs is not None else None,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        ends=tuple(sampling.all_stop_token_ids),
    )


def check_request(shape: Shape, ids: tuple[int, ...], sampling: Any) -> None:
    """Raise Refused for a prompt or a value of a sampling parameter that the bundle cannot serve."""
    request = engine_request(shape, ids, sampling)
    try:
        request.params.check()
    except UserError as error:
        raise Refused("sampling", str(error)) from error
    try:
        check(shape, request)
    except UserError as error:
        raise Refused("prompt", str(error)) from error
