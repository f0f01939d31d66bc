"""The list of parameters that a bundle serves. Any other that differs from vLLM's default is refused in a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from model.errors import UserError
from model.serving.masks import Allowed
from model.serving.request import Params, Request, Shape, check

# the graphs serve these
_SAMPLED = ("temperature", "top_k", "top_p", "min_p", "seed")
# vLLM serves these itself, from the emitted ids
_BY_VLLM = {
    "n", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "detokenize", "skip_special_tokens",
    "spaces_between_special_tokens", "include_stop_str_in_output", "output_kind", "stream_interval",
    "flat_logprobs", "skip_clone", "output_text_buffer_length", "skip_reading_prefix_cache",
}  # fmt: skip
# graphs of a bundle built with --structured serve these
_BY_MASKS = {"logprobs": (0,), "structured_outputs": ()}
_WHY = {
    "logprobs": "a bundle built with --structured returns the emitted token's alone, which 0 requests",
    "prompt_logprobs": "the bundle's graphs return no probabilities of a prompt; leave it out",
    "structured_outputs": "the bundle was built without --structured, so its graphs take no mask; build one that is",
    "use_beam_search": "it needs the top log-probabilities, which the bundle's graphs do not return; sample n answers",
    "generative scoring": "it needs the log-probabilities of given ids, which the bundle's graphs do not return",
    "min_tokens": "the bundle's graphs cannot hold back an end token; use ignore_eos",
}
_LIST = "a bundle serves temperature, top_k, top_p, min_p, seed, n, max_tokens, stop and stop_token_ids; leave it out"


_NO_MASK: Allowed = lambda ids: None  # noqa: E731


class Refused(UserError):
    """A parameter that a bundle cannot serve, and the sentence that says so."""

    def __init__(self, parameter: str, sentence: str) -> None:
        super().__init__(sentence)
        self.parameter = parameter


def refuse_others(requested: Mapping[str, Any], defaults: Mapping[str, Any], structured: bool = False) -> None:
    """Raise Refused for the first parameter that is neither on the list nor at vLLM's default.

    `structured` says that the bundle has graphs that take masks.
    """
    for name, value in {**requested, **_typed(requested)}.items():
        if structured and name in _BY_MASKS and (not _BY_MASKS[name] or value in _BY_MASKS[name]):
            continue
        on_the_list = name in _SAMPLED or name in _BY_VLLM or name.startswith("_")
        # logprobs=0 requests the emitted token's
        if on_the_list or value is None or value in ([], {}) or value == defaults.get(name):
            continue
        raise Refused(name, f"{name} is not served: {_WHY.get(name, _LIST)}")


def _typed(requested: Mapping[str, Any]) -> dict[str, Any]:
    """What a client typed where vLLM made other parameters of it, which are then at their defaults."""
    extra = requested.get("extra_args") or {}
    typed = {name if name.endswith("_transfer_params") else "vllm_xargs": value for name, value in extra.items()}
    typed["extra_args"] = None
    # vLLM turns its watermark off for these two alone
    if requested.get("watermarking") is False and requested.get("logprobs"):
        scoring = bool(requested.get("logprob_token_ids"))
        typed |= dict.fromkeys(("watermarking", "logprobs", "logprob_token_ids"))
        typed["generative scoring" if scoring else "use_beam_search"] = True
    return typed


def engine_request(shape: Shape, ids: tuple[int, ...], sampling: Any, allowed: Allowed | None = None) -> Request:
    """The engine's request for a prompt and vLLM's sampling parameters, which `check_request` has passed.

    vLLM cuts at stops, ends and limits, so the engine may go on to the context's end. `allowed` are the masks of a
    structured request.
    """
    params = Params(
        float(sampling.temperature),
        max(0, sampling.top_k),
        float(sampling.top_p),
        float(sampling.min_p),
        sampling.seed or 0,
    )
    structured = getattr(sampling, "structured_outputs", None) is not None
    return Request(
        ids,
        params,
        shape.max_len,
        allowed=(allowed or _NO_MASK) if structured else None,
        logprobs=getattr(sampling, "logprobs", None) is not None,
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
