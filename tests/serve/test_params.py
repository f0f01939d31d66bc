"""Sampling parameters: those that are served pass, any other is refused with its name."""

from types import SimpleNamespace
from typing import Any

import pytest

from serve.params import UnsupportedParam, check_request, engine_request, reject_unsupported
from trnspec.engine.config import EngineConfig
from trnspec.engine.request import Params

DEFAULTS: dict[str, Any] = {
    "n": 1, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": None, "stop": [], "stop_token_ids": [],
    "max_tokens": 16, "min_tokens": 0, "logprobs": None, "prompt_logprobs": None, "presence_penalty": 0.0,
    "frequency_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": None, "bad_words": None, "extra_args": None,
    "structured_outputs": None, "allowed_token_ids": None, "_eos_token_id": None, "watermarking": None,
    "detokenize": True, "logprob_token_ids": None, "thinking_token_budget": None,
}  # fmt: skip
SERVED = {
    "n": 3, "temperature": 0.5, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 7, "stop": ["x"],
    "stop_token_ids": [5], "max_tokens": 99, "bad_words": [], "extra_args": {}, "_eos_token_id": 0,
    "logprobs": 20, "prompt_logprobs": 1, "min_tokens": 2, "presence_penalty": 0.5, "frequency_penalty": 0.5,
    "repetition_penalty": 1.1, "logit_bias": {1: 1.0}, "structured_outputs": object(), "allowed_token_ids": [1],
    "watermarking": False,
}  # fmt: skip
# a parameter of a later vLLM is refused too
NOT_SERVED = {
    "extra_args": {"a": 1}, "watermarking": True, "logprob_token_ids": [5], "thinking_token_budget": 4,
    "of_a_later_vllm": True,
}  # fmt: skip
CONFIG = EngineConfig((7,), 4, 256, (128, 256), 2048, 9, ((128, 256),))


def sampling(**changes: Any) -> SimpleNamespace:
    """vLLM's parameters: words and ends come as ids."""
    ids = {"bad_words_token_ids": None, "all_stop_token_ids": {0}, "eos_token_id": 0}
    return SimpleNamespace(**ids | DEFAULTS | changes)


@pytest.mark.parametrize("name", SERVED)
def test_a_served_parameter_passes(name: str) -> None:
    reject_unsupported(DEFAULTS | {name: SERVED[name]}, DEFAULTS)


@pytest.mark.parametrize("name", NOT_SERVED)
def test_any_other_parameter_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedParam, match=f"^{name} is not served; leave it out: docs/serving.md") as refused:
        reject_unsupported(DEFAULTS | {name: NOT_SERVED[name]}, DEFAULTS)
    assert refused.value.parameter == name


def test_the_engine_gets_the_parameters_and_ends_where_vllm_does() -> None:
    request = engine_request(CONFIG, (1, 2), sampling(temperature=0.8, top_k=-1, top_p=0.9, min_p=0.1, seed=7))
    assert request.params == Params(0.8, 0, 0.9, 0.1, 7)
    assert (request.ids, request.max_new_tokens, request.stop_ids, request.cut) == ((1, 2), 16, (0,), None)
    ended = engine_request(CONFIG, (1, 2), sampling(eos_token_id=None, stop_token_ids=[5, 6], max_tokens=None))
    assert (ended.max_new_tokens, ended.stop_ids) == (256, (5, 6)), "ignore_eos leaves vLLM no eos_token_id"
    assert not ended.full_sampling
    assert engine_request(CONFIG, (1,), sampling(max_tokens=300)).max_new_tokens == 256
    penalties = {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1}
    more = {"logit_bias": {3: 2.0}, "allowed_token_ids": [3, 4], "bad_words_token_ids": [[5], [6, 7]], "min_tokens": 2}
    request = engine_request(CONFIG, (1,), sampling(logprobs=3, prompt_logprobs=0, seed=1, **penalties, **more))
    assert request.params == Params(1.0, 0, 1.0, 0.0, 1, 0.5, -0.5, 1.1, {3: 2.0}, (3, 4), ((5,), (6, 7)), 2)
    assert (request.logprobs, request.prompt_logprobs, request.ends, request.allowed) == (3, 0, (0,), None)
    masked = engine_request(CONFIG, (1,), sampling(), lambda ids: None, len)
    assert (masked.allowed and masked.allowed([5]), masked.cut and masked.cut([5])) == (None, 1)


@pytest.mark.parametrize(("ids", "changes"), [((1, 2048), {}), ((1,) * 256, {}), ((1,), {"logprobs": 21})], ids=str)
def test_what_the_bundle_cannot_serve_is_refused(ids: tuple[int, ...], changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedParam):
        check_request(CONFIG, ids, sampling(**changes))
    check_request(CONFIG, (1,), sampling())
