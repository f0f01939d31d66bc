"""Requests beyond sampling parameters over HTTP: ids and log-probabilities are those of vLLM's own engine."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.model.demo_bundle import PROMPTS
from tests.serve.server import NO_VLLM, Server
from tests.serve.test_http import ask, ids_of
from trnspec.engine.request import Params
from trnspec.llm import LLM

pytestmark = pytest.mark.skipif(bool(NO_VLLM), reason=NO_VLLM)
# the demo's end of a text
END = 0
# every ask changes an answer to one of them
ASKED = [PROMPTS[place] for place in (10, 12, 17)]
ASKS: dict[str, dict[str, Any]] = {
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": 0.4},
    "repetition": {"extra_body": {"repetition_penalty": 1.3}},
    "rewards": {"presence_penalty": -0.5, "frequency_penalty": -0.3, "extra_body": {"repetition_penalty": 0.95}},
    "bias": {"logit_bias": {"262": -100, "300": 2.5, "17": 4}},
    "listed": {"extra_body": {"allowed_token_ids": list(range(1, 1200))}},
    "words": {"extra_body": {"bad_words": ["the", "and", "one", "10", "return"]}},
    "ends later": {"logit_bias": {str(END): 12}, "extra_body": {"min_tokens": 20}},
    "all": {
        "presence_penalty": 0.5, "frequency_penalty": 0.2, "logit_bias": {"300": 3, str(END): 8},
        "extra_body": {
            "repetition_penalty": 1.1, "allowed_token_ids": list(range(1500)), "bad_words": ["the"], "min_tokens": 9,
        },
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def stock(stock_server: Server) -> Any:
    # vendor seam: comes with vLLM
    import openai  # noqa: PLC0415

    return openai.OpenAI(base_url=f"{stock_server.url}/v1", api_key="none", max_retries=0, timeout=300)


def _all_at_once(client: Any, name: str, **more: Any) -> list[list[int]]:
    """The ids of every ask for every prompt."""
    with ThreadPoolExecutor(8) as pool:
        asked = [
            pool.submit(ask, client, name, prompt, max_tokens=48, temperature=0.0, **asks, **more)
            for asks in ASKS.values()
            for prompt in ASKED
        ]
        return [ids_of(answer.result()) for answer in asked]


def test_greedy_ids_are_vllm_s_own(client: Any, name: str, stock: Any) -> None:
    """Every ask beside others, which fill the batch; each changes an answer."""
    ours, theirs = _all_at_once(client, name), _all_at_once(stock, "m")
    plain = [ids_of(ask(client, name, p, max_tokens=48, temperature=0.0)) for p in ASKED] * len(ASKS)
    for place, asks in enumerate(ASKS):
        of_ask = slice(3 * place, 3 * place + 3)
        assert ours[of_ask] == theirs[of_ask], asks
        assert ours[of_ask] != plain[of_ask], asks


def test_log_probabilities_are_vllm_s_own(client: Any, name: str, stock: Any) -> None:
    """Of the answer, under a penalty, and with `echo` of the prompt: the numbers, the best ids, the ranks."""
    asked = {"max_tokens": 12, "temperature": 0.0, "logprobs": 5, "echo": True, "frequency_penalty": 0.5}
    for prompt in ASKED:
        mine, other = (
            ask(c, n, prompt, **asked, extra_body={"prompt_logprobs": 2}).choices[0]
            for c, n in ((client, name), (stock, "m"))
        )
        assert list(mine.token_ids) == list(other.token_ids)
        assert mine.logprobs.tokens == other.logprobs.tokens
        assert mine.logprobs.token_logprobs[1:] == pytest.approx(other.logprobs.token_logprobs[1:], abs=2e-3)
        assert [set(best or ()) for best in mine.logprobs.top_logprobs] == [
            set(best or ()) for best in other.logprobs.top_logprobs
        ]
        ranks = [
            [sorted((token, value["rank"]) for token, value in (of_id or {}).items()) for of_id in c.prompt_logprobs]
            for c in (mine, other)
        ]
        assert ranks[0] == ranks[1]


def test_a_likelihood_is_asked_for_without_an_answer(client: Any, name: str, stock: Any) -> None:
    """As lm-eval's multiple choice does."""
    asked = {"max_tokens": 0, "temperature": 0.0, "logprobs": 1, "echo": True}
    for prompt in PROMPTS[:4]:
        mine, other = (ask(c, n, prompt, **asked).choices[0].logprobs for c, n in ((client, name), (stock, "m")))
        assert mine.tokens == other.tokens
        assert mine.token_logprobs[1:] == pytest.approx(other.token_logprobs[1:], abs=2e-3)


def test_drawn_ids_are_the_offline_ones(client: Any, name: str, llm: LLM) -> None:
    params = Params(0.9, seed=3, presence_penalty=0.5, repetition_penalty=1.2, bad_words=("the",), min_tokens=5)
    extra = {"repetition_penalty": 1.2, "bad_words": ["the"], "min_tokens": 5}
    for prompt in PROMPTS[:3]:
        online = ask(
            client, name, prompt, max_tokens=40, temperature=0.9, seed=3, presence_penalty=0.5, extra_body=extra
        )
        assert ids_of(online) == list(llm.generate(prompt, params, max_new_tokens=40).ids)


def test_beam_search_is_refused_by_its_own_name(server: Server, client: Any, name: str) -> None:
    import openai  # noqa: PLC0415

    for number in (1, 2):
        with pytest.raises(openai.BadRequestError, match="use_beam_search is not served"):
            ask(client, name, PROMPTS[0], max_tokens=4, temperature=0.0, n=number, extra_body={"use_beam_search": True})
    assert server.status("/health") == 200
