"""Through HTTP with the openai client: ids of the offline engine, stops in a block, cancellation, limits, refusals."""

from __future__ import annotations

import concurrent.futures
import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.model.demo_bundle import PROMPTS
from tests.serve.conftest import BATCH, LENGTH, Server

openai = pytest.importorskip("openai", reason="comes with vLLM: make serve-test")
Offline = Callable[..., list[int]]
COUNTING = "Count from 1 to 100: 1, 2, 3,"
RAW = {"return_token_ids": True}


def ask(server: Server, prompt: Any, **options: Any) -> Any:
    """One completion; what the OpenAI API lacks goes into extra_body."""
    known = {k: options.pop(k) for k in ("max_tokens", "temperature", "top_p", "seed", "stop", "n") if k in options}
    return server.client.completions.create(model=server.model, prompt=prompt, extra_body=RAW | options, **known)


def ids_of(answer: Any) -> tuple[list[int], list[int]]:
    """The prompt's ids and the new ones of the first choice."""
    choice = answer.choices[0]
    return choice.prompt_token_ids, choice.token_ids


SAMPLED = [
    {},
    {"temperature": 0.8, "seed": 7},
    {"temperature": 1.1, "top_k": 20, "top_p": 0.9, "seed": 3},
    {"temperature": 1.3, "min_p": 0.05, "seed": 2**63 - 1},
]


@pytest.mark.parametrize("params", SAMPLED, ids=["greedy", "seeded", "top-k and top-p", "min-p, a large seed"])
@pytest.mark.parametrize("prompt", [COUNTING, PROMPTS[13]], ids=["structured", "open"])
def test_ids_are_the_offline_engine_s(server: Server, offline: Offline, prompt: str, params: dict[str, Any]) -> None:
    prompt_ids, ids = ids_of(ask(server, prompt, max_tokens=48, **({"temperature": 0.0} | params)))
    assert ids == offline(prompt_ids, 48, **params)


def test_a_stream_says_the_same_in_blocks(server: Server) -> None:
    whole = ask(server, COUNTING, max_tokens=64, temperature=0).choices[0].text
    stream = server.client.completions.create(
        model=server.model, prompt=COUNTING, max_tokens=64, temperature=0, stream=True
    )
    pieces = [part.choices[0].text for part in stream if part.choices]
    assert "".join(pieces) == whole
    assert len(pieces) < 40, "several tokens a step come in one piece"


def test_more_requests_than_slots_of_uneven_lengths(server: Server, offline: Offline) -> None:
    rng = random.Random(1)
    asked = [
        (
            rng.choice(PROMPTS)[: rng.randint(8, 60)],
            rng.randint(1, 60),
            {"temperature": 0.9, "seed": rng.getrandbits(32)},
        )
        for _ in range(4 * BATCH)
    ]
    with concurrent.futures.ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda a: ids_of(ask(server, a[0], max_tokens=a[1], **a[2])), asked))
    for (_, count, params), (prompt_ids, ids) in zip(asked, answers, strict=True):
        assert ids == offline(prompt_ids, count, **params)


def test_a_stop_string_inside_a_block(server: Server) -> None:
    whole = ask(server, COUNTING, max_tokens=60, temperature=0).choices[0].text
    for stop in (" 9", ", 12", "17,"):
        assert stop in whole
        choice = ask(server, COUNTING, max_tokens=60, temperature=0, stop=stop).choices[0]
        assert (choice.text, choice.finish_reason) == (whole[: whole.index(stop)], "stop")


def test_a_stop_id_inside_a_block(server: Server) -> None:
    _, whole = ids_of(ask(server, COUNTING, max_tokens=60, temperature=0))
    for at in range(3, 20):
        first = whole.index(whole[at])
        answer = ask(server, COUNTING, max_tokens=60, temperature=0, stop_token_ids=[whole[at]])
        assert ids_of(answer)[1] == whole[: first + 1]
        assert answer.choices[0].finish_reason == "stop"


def test_the_context_s_last_token(server: Server, offline: Offline) -> None:
    prompt = list(range(5, 5 + LENGTH - 30))
    answer = ask(server, prompt, temperature=0, max_tokens=30, ignore_eos=True)
    assert ids_of(answer)[1] == offline(prompt, 1000, stops=())
    assert answer.usage.total_tokens == LENGTH
    assert answer.choices[0].finish_reason == "length"


def test_n_choices_differ_and_are_seeded_one_by_one(server: Server, offline: Offline) -> None:
    answer = ask(server, PROMPTS[13], max_tokens=24, temperature=1.0, seed=40, n=3)
    for choice in answer.choices:
        assert choice.token_ids == offline(
            answer.choices[0].prompt_token_ids, 24, temperature=1.0, seed=40 + choice.index
        )


def test_without_a_seed_each_request_draws_its_own(server: Server) -> None:
    one, other = (ids_of(ask(server, PROMPTS[13], max_tokens=24, temperature=1.0))[1] for _ in range(2))
    assert one != other
    assert server.log.read_text().count("without a seed drew") >= 2


def test_a_dropped_stream_frees_its_slot(server: Server, offline: Offline) -> None:
    for _ in range(2 * BATCH):
        stream = server.client.completions.create(
            model=server.model, prompt=COUNTING, max_tokens=200, temperature=0, stream=True
        )
        next(iter(stream))
        stream.close()
    prompt_ids, ids = ids_of(ask(server, COUNTING, max_tokens=32, temperature=0))
    assert ids == offline(prompt_ids, 32)


REFUSED = [
    ("logprobs", {"logprobs": 2}), ("prompt_logprobs", {"prompt_logprobs": 1}), ("min_tokens", {"min_tokens": 3}),
    ("presence_penalty", {"presence_penalty": 0.5}), ("frequency_penalty", {"frequency_penalty": 0.5}),
    ("repetition_penalty", {"repetition_penalty": 1.2}), ("logit_bias", {"logit_bias": {"5": 1}}),
    ("allowed_token_ids", {"allowed_token_ids": [1, 2]}), ("bad_words", {"bad_words": ["a"]}),
    ("structured_outputs", {"response_format": {"type": "json_object"}}),
    ("structured_outputs", {"structured_outputs": {"regex": "[a-z]+"}}), ("seed", {"seed": -1}),
]  # fmt: skip


@pytest.mark.parametrize(("word", "option"), REFUSED, ids=[f"{w}-{i}" for i, (w, _) in enumerate(REFUSED)])
def test_what_a_bundle_cannot_serve_is_a_400_with_a_sentence(server: Server, word: str, option: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError, match=word):
        ask(server, "The girl", max_tokens=4, **option)
    assert ask(server, "The girl", max_tokens=4, temperature=0).choices[0].text


@pytest.mark.parametrize("prompt", [[5] * LENGTH, [5] * (LENGTH + 40)], ids=["no room for an answer", "longer"])
def test_a_prompt_that_is_too_long(server: Server, prompt: list[int]) -> None:
    with pytest.raises(openai.BadRequestError, match=str(LENGTH)):
        ask(server, prompt, max_tokens=1)


def test_metrics_tell_of_steps_drafts_and_gaps(server: Server) -> None:
    before = {n: server.metrics(n) for n in ("trnspec_tokens_total", "trnspec_sequence_steps_total")}
    ask(server, COUNTING, max_tokens=100, temperature=0)
    tokens, steps = (server.metrics(n) - before[n] for n in before)
    assert tokens / steps > 4, "the demo pair counts in long blocks"
    assert server.metrics("trnspec_host_gap_seconds_count") > 0
    assert server.metrics("vllm:spec_decode_num_accepted_tokens_total") > 0
    assert server.metrics("vllm:num_requests_running") == 0
