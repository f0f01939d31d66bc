"""Structured output, log-probabilities and several k over HTTP: outputs parse, and neighbours do not notice."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.model.demo_bundle import PROMPTS, graphs
from tests.serve.server import NO_VLLM, URL_VARIABLE, Server, sample, served
from tests.serve.test_grammar import grammar_of
from tests.serve.test_http import ask, ids_of
from trnspec.engine.request import Params
from trnspec.llm import LLM

pytestmark = pytest.mark.skipif(bool(NO_VLLM), reason=NO_VLLM)
SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["name", "count", "kind"],
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,6}$"},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["odd", "even"]},
    },
}  # fmt: skip
REGEX = "[A-C]{2}-[0-9]{3}( or [A-C]{2}-[0-9]{3})?"
# a small model may go on with blanks between a schema's parts until its tokens are used up
DENSE = {"backend": "xgrammar", "disable_any_whitespace": True}
# seven drafts at every step, counted in the answer
OPTIONS = {"k": 7, "acceptance": "detailed"}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.getbasetemp().parent / "demo_bundles"
    folder.mkdir(exist_ok=True)
    return graphs(folder, k="3,7", max_len=128).bundle.path


@pytest.fixture(scope="module")
def server(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ["--additional-config", json.dumps(OPTIONS), "--structured-outputs-config", json.dumps(DENSE)]
    with served(bundle, tmp_path_factory.mktemp("masked"), *options) as running:
        yield running


def parses(text: str) -> bool:
    value = json.loads(text)
    name = re.fullmatch("[a-z]{1,6}", value["name"])
    return bool(name) and 0 <= value["count"] <= 99 and value["kind"] in ("odd", "even") and len(value) == 3


FORMS: dict[str, tuple[dict[str, Any], Any]] = {
    "schema": ({"structured_outputs": {"json": SCHEMA}}, parses),
    "response-format": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}}, parses,
    ),
    "regex": ({"structured_outputs": {"regex": REGEX}}, lambda text: re.fullmatch(REGEX, text)),
    "choice": ({"structured_outputs": {"choice": ["north", "south"]}}, lambda text: text in ("north", "south")),
    "grammar": ({"structured_outputs": {"grammar": 'root ::= "(" ("x" | "[" "y" "]") ")"'}},
                lambda text: text in ("(x)", "([y])")),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_every_output_parses_beside_neighbours_that_do_not_notice(
    client: Any, name: str, llm: LLM, form: str, temperature: float
) -> None:
    extra, holds = FORMS[form]
    with ThreadPoolExecutor(4) as pool:
        free = [
            pool.submit(ask, client, name, PROMPTS[i], max_tokens=40, temperature=0.8 * (i % 2), seed=i) for i in (0, 1)
        ]
        bound = [
            pool.submit(ask, client, name, PROMPTS[i], max_tokens=70, temperature=temperature, seed=i, extra_body=extra)
            for i in (2, 3)
        ]
    for answer in bound:
        choice = answer.result().choices[0]
        assert choice.finish_reason == "stop", choice.text
        assert holds(choice.text), choice.text
    for i, answer in enumerate(free):
        offline = llm.generate(PROMPTS[i], Params(0.8 * (i % 2), seed=i), max_new_tokens=40)
        assert ids_of(answer.result()) == list(offline.ids)


def test_the_same_seed_gives_the_same_structured_bytes(client: Any, name: str) -> None:
    asked = {"max_tokens": 60, "temperature": 1.0, "seed": 5, "extra_body": FORMS["schema"][0]}
    alone = ask(client, name, PROMPTS[4], **asked).choices[0].text
    with ThreadPoolExecutor(4) as pool:
        texts = [pool.submit(ask, client, name, PROMPTS[4], **asked) for _ in range(4)]
    assert {t.result().choices[0].text for t in texts} == {alone}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafts_under_a_schema_change_no_id(
    client: Any, name: str, server: Server, llm: LLM, temperature: float
) -> None:
    """With seven drafts a step, against one token a step offline."""
    kept = sample(server, "trnspec_drafts_kept_total")
    for seed, prompt in enumerate(PROMPTS[:3]):
        asked = {"max_tokens": 60, "temperature": temperature, "seed": seed, "extra_body": FORMS["schema"][0]}
        ids = ids_of(ask(client, name, prompt, **asked))
        allowed = grammar_of(SCHEMA, llm.bundle.spec.target_config.eos_token_ids)
        params = Params(temperature, seed=seed)
        offline = llm.generate(prompt, params, max_new_tokens=60, speculation=False, allowed=allowed)
        assert ids == list(offline.ids)
    assert sample(server, "trnspec_drafts_kept_total") > kept, "a test of drafts must keep some"


def test_the_emitted_tokens_log_probabilities_are_the_offline_ones(client: Any, name: str, llm: LLM) -> None:
    """Beside a request that asks for none."""
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(ask, client, name, PROMPTS[1], max_tokens=30, temperature=0.0)
        choice = ask(client, name, PROMPTS[0], max_tokens=30, temperature=0.9, seed=3, logprobs=0).choices[0]
    offline = llm.generate(PROMPTS[0], Params(0.9, seed=3), max_new_tokens=30, logprobs=0)
    assert list(choice.token_ids) == list(offline.ids)
    assert choice.logprobs.token_logprobs == pytest.approx([score.logprob for score in offline.scores], abs=1e-5)
    assert other.result().choices[0].logprobs is None
    messages = [{"role": "user", "content": PROMPTS[0]}]
    chat = client.chat.completions.create(model=name, messages=messages, max_tokens=5, temperature=0, logprobs=True)
    assert all(token.logprob <= 0 for token in chat.choices[0].logprobs.content)


def test_a_grammar_that_is_none_is_refused(client: Any, name: str) -> None:
    import openai  # noqa: PLC0415

    with pytest.raises(openai.BadRequestError):
        ask(client, name, PROMPTS[0], max_tokens=5, extra_body={"structured_outputs": {"regex": "(("}})


DEAD_ENDS: dict[str, dict[str, Any]] = {
    "at once": {"structured_outputs": {"json": {"$ref": "#"}}},
    "response-format": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": {"anyOf": [{"$ref": "#"}]}}}
    },
    "at the second id": {"structured_outputs": {"grammar": 'root ::= "a" x\nx ::= x "b"'}},
}


@pytest.mark.parametrize("form", DEAD_ENDS)
def test_a_mask_that_allows_nothing_ends_that_request_alone(
    client: Any, name: str, server: Server, llm: LLM, form: str
) -> None:
    import openai  # noqa: PLC0415

    with ThreadPoolExecutor(8) as pool:
        dead = [
            pool.submit(ask, client, name, PROMPTS[i], max_tokens=20, seed=i, extra_body=DEAD_ENDS[form])
            for i in range(4)
        ]
        free = [pool.submit(ask, client, name, PROMPTS[i], max_tokens=40, temperature=0.8, seed=i) for i in range(4)]
    for answer in dead:
        with pytest.raises(openai.InternalServerError):
            answer.result()
    for i, answer in enumerate(free):
        assert ids_of(answer.result()) == list(llm.generate(PROMPTS[i], Params(0.8, seed=i), max_new_tokens=40).ids)
    assert server.status("/health") == 200
    assert sample(server, "vllm:num_requests_running") == 0
    if server.log:
        assert "ends with an error: its grammar allows no id here" in server.log.read_text()


def test_a_dead_end_in_a_stream_is_an_error_in_it(client: Any, name: str) -> None:
    import openai  # noqa: PLC0415

    extra = DEAD_ENDS["at the second id"]
    stream = ask(client, name, PROMPTS[0], max_tokens=20, temperature=0, stream=True, extra_body=extra)
    texts = list[str]()
    with pytest.raises(openai.APIError, match="Internal server error"):
        texts += [part.choices[0].text for part in stream]
    assert "".join(texts) in ("", "a")


def test_an_answer_tells_its_own_acceptance(client: Any, name: str, llm: LLM) -> None:
    """Alone on the server: the counts are those of the same request offline."""
    answer = ask(client, name, PROMPTS[0], max_tokens=20, temperature=0.9, seed=3, extra_body={"ignore_eos": True})
    told = answer.metrics["speculative_decoding"]
    ids = llm.bundle.spec.target_config.eos_token_ids
    offline = llm.generate(PROMPTS[0], Params(0.9, seed=3), max_new_tokens=20)
    assert not set(ids) & set(offline.ids), "the request ended early: pick another seed"
    assert len(told["per_step_accepted"]) == offline.steps
    # drafts behind the last id are not counted
    cut = sum(offline.drafts_kept) + 1 + offline.steps - len(offline.ids)
    assert told["per_step_drafted"] == [7] * (offline.steps - 1) + [7 - cut]
    assert sum(told["per_step_accepted"]) == sum(offline.drafts_kept) - cut


def test_the_k_of_steps_is_in_the_metrics(server: Server) -> None:
    lines = server.get("/metrics").splitlines()
    of_k = {m[1] for line in lines if (m := re.match(r'trnspec_steps_total\{.*k="(\d)"', line))}
    assert of_k == {"7"}


@pytest.mark.skipif(URL_VARIABLE in os.environ, reason=f"{URL_VARIABLE} names a server that others use")
def test_ctrl_c_lets_every_request_that_came_end(client: Any, name: str, server: Server) -> None:
    """A terminal sends it to every process. More requests than slots: some have come and not reached the engine yet.

    It is the last test: the server has ended after it.
    """
    assert server.process is not None

    def stream(seed: int) -> tuple[int, str]:
        asked = {"max_tokens": 100, "temperature": 0.9, "seed": seed, "extra_body": {"ignore_eos": True}}
        usage = {"stream_options": {"include_usage": True}}
        parts = list(ask(client, name, PROMPTS[0], stream=True, **asked, **usage))
        return parts[-1].usage.completion_tokens, parts[-2].choices[0].finish_reason

    with ThreadPoolExecutor(24) as pool:
        answers = [pool.submit(stream, seed) for seed in range(24)]
        time.sleep(0.5)
        os.killpg(server.process.pid, signal.SIGINT)
        time.sleep(0.2)
        assert server.status("/health") == 503
        # one that came after the signal
        refused = [str(answer.exception()) for answer in answers if answer.exception()]
    assert [answer.result() for answer in answers if not answer.exception()] == [(100, "length")] * (24 - len(refused))
    assert all("shutting down" in error for error in refused), refused
    assert len(refused) < 12
    assert server.process.wait(60) == 0
