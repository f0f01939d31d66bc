"""What a request may ask of a bundle: a list; whatever else differs from vLLM's default is refused with a sentence."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec
from vllm import SamplingParams

from model.serving.request import Params

# served by the graphs
_SAMPLED = {"temperature", "top_k", "top_p", "min_p", "seed"}
# served by vLLM itself, from the ids that come out
_BY_VLLM = {
    "n", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "detokenize", "skip_special_tokens",
    "spaces_between_special_tokens", "include_stop_str_in_output", "output_kind", "stream_interval", "flat_logprobs",
    "skip_clone", "output_text_buffer_length", "skip_reading_prefix_cache",
}  # fmt: skip
_WHY = {
    "logprobs": "the bundle's graphs return ids and no probabilities",
    "prompt_logprobs": "the bundle's graphs return ids and no probabilities",
    "structured_outputs": "the bundle's graphs take no mask of allowed ids",
    "min_tokens": "the bundle's graphs cannot hold back an end token; use ignore_eos",
}
_DEFAULTS = {f.name: f for f in msgspec.structs.fields(SamplingParams)}


def refusal(params: SamplingParams) -> tuple[str, str] | None:
    """The parameter that a bundle cannot serve and a sentence that says so, or None."""
    for name, field in _DEFAULTS.items():
        if name in _SAMPLED | _BY_VLLM or name.startswith("_"):
            continue
        value = getattr(params, name)
        if value and value != field.default:
            why = _WHY.get(name, "a bundle serves " + ", ".join(sorted(_SAMPLED)) + ", stops, max_tokens and n")
            return name, f"{name} is not served: {why}; leave it out"
    if params.seed is not None and not 0 <= params.seed < 1 << 64:
        return "seed", f"seed is {params.seed}; it must be an integer from 0 to 2^64 - 1"
    return None


def draw_seed(params: SamplingParams) -> int | None:
    """Give a request that samples and names no seed one of 32 bits; the seed, or None if none was drawn."""
    if params.seed is not None or params.temperature == 0:
        return None
    params.seed = secrets.randbits(32)
    return params.seed


def engine_params(params: Any) -> Params:
    """Our sampling parameters of vLLM's."""
    return Params(params.temperature, max(0, params.top_k), params.top_p, params.min_p, params.seed or 0)
