"""Penalties, biases and excluded tokens over HTTP: tokens and log-probabilities are those of vLLM's engine."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.model.demo_bundle import PROMPTS
from tests.serve.server import OVER_HTTP
from tests.serve.test_http import complete, ids_of

pytestmark = OVER_HTTP
# the demo's end of a text
END = 0
# each of PARAMETERS changes an answer to one of them
SOME_PROMPTS = [PROMPTS[place] for place in (10, 12, 17)]
PARAMETERS: dict[str, dict[str, Any]] = {
    "penalties": {
        "presence_penalty": -0.5, "frequency_penalty": 0.4, "extra_body": {"repetition_penalty": 1.3},
    },
    "bias": {"logit_bias": {"262": -100, "300": 2.5, "17": 4}},
    "ends later": {"logit_bias": {str(END): 12}, "extra_body": {"min_tokens": 20}},
    "all": {
        "presence_penalty": 0.5, "frequency_penalty": 0.2, "logit_bias": {"300": 3, str(END): 8},
        "extra_body": {
            "repetition_penalty": 1.1, "allowed_token_ids": list(range(1500)), "bad_words": ["the"], "min_tokens": 9,
        },
    },
}  # fmt: skip


def _all_at_once(client: Any, name: str, **more: Any) -> list[list[int]]:
    """The ids of all PARAMETERS for every prompt, several at a time."""
    with ThreadPoolExecutor(8) as pool:
        answers = [
            pool.submit(complete, client, name, prompt, max_tokens=48, temperature=0.0, **parameters, **more)
            for parameters in PARAMETERS.values()
            for prompt in SOME_PROMPTS
        ]
        return [ids_of(answer.result()) for answer in answers]


def test_greedy_ids_are_those_of_vllm(client: Any, name: str, stock: Any) -> None:
    ours, stock_ids = _all_at_once(client, name), _all_at_once(stock, "m")
    plain = [ids_of(complete(client, name, p, max_tokens=48, temperature=0.0)) for p in SOME_PROMPTS] * len(PARAMETERS)
    for place, parameters in enumerate(PARAMETERS):
        rows = slice(3 * place, 3 * place + 3)
        assert ours[rows] == stock_ids[rows], parameters
        assert ours[rows] != plain[rows], parameters


def test_log_probabilities_are_those_of_vllm(client: Any, name: str, stock: Any) -> None:
    body = {"max_tokens": 12, "temperature": 0.0, "logprobs": 5, "echo": True, "frequency_penalty": 0.5}
    for prompt in SOME_PROMPTS:
        mine, other = (complete(c, n, prompt, **body).choices[0] for c, n in ((client, name), (stock, "m")))
        assert list(mine.token_ids) == list(other.token_ids)
        assert mine.logprobs.tokens == other.logprobs.tokens
        assert mine.logprobs.token_logprobs[1:] == pytest.approx(other.logprobs.token_logprobs[1:], abs=2e-3)
        assert [set(best or ()) for best in mine.logprobs.top_logprobs] == [
            set(best or ()) for best in other.logprobs.top_logprobs
        ]
