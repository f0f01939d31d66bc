"""Structured output over HTTP: every output parses, drafts under masks change no token, other requests go on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.model.demo_bundle import PROMPTS, graphs
from tests.serve.server import NO_VLLM, Server, sample, served
from tests.serve.test_grammar import SCHEMA, grammar_of
from tests.serve.test_http import complete, ids_of
from trnspec.engine.request import Params
from trnspec.llm import LLM

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(NO_VLLM), reason=NO_VLLM)]
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
    return bool(re.fullmatch("[a-z]{1,6}", value["name"])) and value["kind"] in ("odd", "even") and len(value) == 2


FORMS: dict[str, tuple[dict[str, Any], Any]] = {
    "schema": ({"structured_outputs": {"json": SCHEMA}}, parses),
    "regex": ({"structured_outputs": {"regex": REGEX}}, lambda text: re.fullmatch(REGEX, text)),
    "choice": ({"structured_outputs": {"choice": ["north", "south"]}}, lambda text: text in ("north", "south")),
    "grammar": ({"structured_outputs": {"grammar": 'root ::= "(" ("x" | "[" "y" "]") ")"'}},
                lambda text: text in ("(x)", "([y])")),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_every_output_parses_and_other_requests_do_not_change(
    client: Any, name: str, llm: LLM, form: str, temperature: float
) -> None:
    extra, holds = FORMS[form]
    with ThreadPoolExecutor(4) as pool:
        free = [
            pool.submit(complete, client, name, PROMPTS[i], max_tokens=40, temperature=0.8 * (i % 2), seed=i)
            for i in (0, 1)
        ]
        bound = [
            pool.submit(
                complete, client, name, PROMPTS[i], max_tokens=70, temperature=temperature, seed=i, extra_body=extra
            )
            for i in (2, 3)
        ]
    for answer in bound:
        choice = answer.result().choices[0]
        assert choice.finish_reason == "stop", choice.text
        assert holds(choice.text), choice.text
    for i, answer in enumerate(free):
        offline = llm.generate(PROMPTS[i], Params(0.8 * (i % 2), seed=i), max_new_tokens=40)
        assert ids_of(answer.result()) == list(offline.ids)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafts_under_a_schema_change_no_token(
    client: Any, name: str, server: Server, llm: LLM, temperature: float
) -> None:
    """With seven drafts a step, against one token a step offline."""
    kept = sample(server, "vllm:spec_decode_num_accepted_tokens_total")
    for seed, prompt in enumerate(PROMPTS[:3]):
        body = {"max_tokens": 60, "temperature": temperature, "seed": seed, "extra_body": FORMS["schema"][0]}
        ids = ids_of(complete(client, name, prompt, **body))
        allowed = grammar_of(SCHEMA, llm.bundle.spec.target_config.eos_token_ids)
        params = Params(temperature, seed=seed)
        offline = llm.generate(prompt, params, max_new_tokens=60, speculation=False, allowed=allowed)
        assert ids == list(offline.ids)
    assert sample(server, "vllm:spec_decode_num_accepted_tokens_total") > kept, "a test of drafts must keep some"


DEAD_ENDS: dict[str, dict[str, Any]] = {
    "at once": {"structured_outputs": {"json": {"$ref": "#"}}},
    "at the second token": {"structured_outputs": {"grammar": 'root ::= "a" x\nx ::= x "b"'}},
}


@pytest.mark.parametrize("form", DEAD_ENDS)
def test_a_mask_that_allows_no_token_ends_that_request_only(
    client: Any, name: str, server: Server, llm: LLM, form: str
) -> None:
    import openai  # noqa: PLC0415

    with ThreadPoolExecutor(8) as pool:
        dead = [
            pool.submit(complete, client, name, PROMPTS[i], max_tokens=20, seed=i, extra_body=DEAD_ENDS[form])
            for i in range(4)
        ]
        free = [
            pool.submit(complete, client, name, PROMPTS[i], max_tokens=40, temperature=0.8, seed=i) for i in range(4)
        ]
    for answer in dead:
        with pytest.raises(openai.InternalServerError):
            answer.result()
    for i, answer in enumerate(free):
        assert ids_of(answer.result()) == list(llm.generate(PROMPTS[i], Params(0.8, seed=i), max_new_tokens=40).ids)
    assert server.status("/health") == 200
    assert sample(server, "vllm:num_requests_running") == 0
    if server.log:
        assert "leave no id to draw" in server.log.read_text()


def test_an_answer_reports_its_acceptance(client: Any, name: str, llm: LLM) -> None:
    answer = complete(client, name, PROMPTS[0], max_tokens=20, temperature=0.9, seed=3, extra_body={"ignore_eos": True})
    offline = llm.generate(PROMPTS[0], Params(0.9, seed=3), max_new_tokens=20)
    assert len(answer.metrics["speculative_decoding"]["per_step_accepted"]) == offline.steps
