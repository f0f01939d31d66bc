"""The sampling parameters that a bundle serves; any other that differs from vLLM's default is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from model.errors import UserError
from trnspec.engine.config import EngineConfig
from trnspec.engine.request import MaskFn, Params, Request, check

_NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
# served by the graphs
_BY_GRAPHS = {
    *_NUMBERS, "top_k", "seed", "logit_bias", "allowed_token_ids", "bad_words", "min_tokens", "logprobs",
    "prompt_logprobs", "structured_outputs",
}  # fmt: skip
# served by vLLM from the output tokens
_BY_VLLM = {
    "n", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "detokenize", "skip_special_tokens",
    "spaces_between_special_tokens", "include_stop_str_in_output", "output_kind", "stream_interval",
    "flat_logprobs", "skip_clone", "output_text_buffer_length", "skip_reading_prefix_cache",
}  # fmt: skip
# values other than None that mean off
_OFF = {"watermarking": False}


class UnsupportedParam(UserError):
    """A parameter that a bundle cannot serve, and the sentence that says so."""

    def __init__(self, parameter: str, sentence: str) -> None:
        super().__init__(sentence)
        self.parameter = parameter


def reject_unsupported(requested: Mapping[str, Any], defaults: dict[str, Any]) -> None:
    """Raise UnsupportedParam for the first parameter that is neither served nor at vLLM's default."""
    for name, value in requested.items():
        served = name in _BY_GRAPHS or name in _BY_VLLM or name.startswith("_")
        if not (served or value is None or value in ([], {}) or value == (defaults | _OFF).get(name)):
            raise UnsupportedParam(
                name, f"{name} is not served; leave it out: docs/serving.md lists the parameters that are"
            )


def engine_request(
    config: EngineConfig, ids: tuple[int, ...], sampling: Any, allowed: MaskFn | None = None, cut: Any = None
) -> Request:
    """The engine's request for prompt token ids and vLLM's SamplingParams, with its grammar and its stop strings."""
    params = Params(
        **{name: float(getattr(sampling, name)) for name in _NUMBERS},
        top_k=max(0, sampling.top_k),
        seed=sampling.seed or 0,
        logit_bias={token: float(bias) for token, bias in (sampling.logit_bias or {}).items()},
        allowed_token_ids=tuple(sampling.allowed_token_ids or ()),
        bad_words=tuple(map(tuple, sampling.bad_words_token_ids or ())),
        min_tokens=sampling.min_tokens,
    )
    end = () if sampling.eos_token_id is None else (sampling.eos_token_id,)
    return Request(
        ids,
        params,
        min(sampling.max_tokens or config.max_len, config.max_len),
        (*end, *(sampling.stop_token_ids or ())),
        cut=cut,
        allowed=allowed,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        ends=tuple(sampling.all_stop_token_ids),
    )


def check_request(config: EngineConfig, ids: tuple[int, ...], sampling: Any) -> None:
    """Raise UnsupportedParam for a prompt or a value of a sampling parameter that the bundle cannot serve."""
    allowed = None if sampling.structured_outputs is None else (lambda ids: None)
    try:
        check(config, engine_request(config, ids, sampling, allowed))
    except UserError as error:
        raise UnsupportedParam("sampling parameters or prompt", str(error)) from error
