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
from tests.serve.server import OVER_HTTP, Server, sample, served
from tests.serve.test_grammar import SCHEMA
from tests.serve.test_http import complete, ids_of
from trnspec.engine.request import Params
from trnspec.llm import LLM

pytestmark = OVER_HTTP
REGEX = "[A-C]{2}-[0-9]{3}( or [A-C]{2}-[0-9]{3})?"
# a small model may go on with blanks between a schema's parts until its tokens are used up
DENSE = {"backend": "xgrammar", "disable_any_whitespace": True}
# seven drafts at every step, counted in the answer
OPTIONS = {"k": 7, "acceptance": "detailed"}


@pytest.fixture(scope="module")
def bundle(demo_bundles: Path) -> Path:
    return graphs(demo_bundles, k="3,7", max_len=128).bundle.path


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
def test_every_output_parses_and_some_drafts_are_accepted(client: Any, name: str, server: Server, form: str) -> None:
    (extra, holds), accepted = FORMS[form], sample(server, "vllm:spec_decode_num_accepted_tokens_total")
    bodies = [{"temperature": 0.0}, *({"temperature": 1.2, "seed": seed} for seed in (2, 3))]
    with ThreadPoolExecutor(3) as pool:
        answers = [
            pool.submit(complete, client, name, PROMPTS[2], max_tokens=70, extra_body=extra, **b) for b in bodies
        ]
    for answer in answers:
        choice = answer.result().choices[0]
        assert choice.finish_reason == "stop", choice.text
        assert holds(choice.text), choice.text
    assert sample(server, "vllm:spec_decode_num_accepted_tokens_total") > accepted


DEAD_ENDS: dict[str, dict[str, Any]] = {
    "at once": {"structured_outputs": {"json": {"$ref": "#"}}},
    "at the second token": {"structured_outputs": {"grammar": 'root ::= "a" x\nx ::= x "b"'}},
}


@pytest.mark.parametrize("form", DEAD_ENDS)
def test_a_mask_that_allows_no_token_ends_that_request_only(
    client: Any, name: str, server: Server, llm: LLM, form: str
) -> None:
    # comes with vLLM
    import openai

    extras = [DEAD_ENDS[form] if i % 2 else {} for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        answers = [
            pool.submit(complete, client, name, prompt, max_tokens=20, temperature=0.8, seed=1, extra_body=extra)
            for prompt, extra in zip(PROMPTS, extras, strict=False)
        ]
    for prompt, extra, answer in zip(PROMPTS, extras, answers, strict=False):
        if extra:
            with pytest.raises(openai.InternalServerError, match="exclude every token"):
                answer.result()
        else:
            assert ids_of(answer.result()) == list(llm.generate(prompt, Params(0.8, seed=1), max_new_tokens=20).ids)
    assert server.status("/health") == 200
    assert sample(server, "vllm:num_requests_running") == 0
    if server.log:
        assert "exclude every token" in server.log.read_text()


def test_an_answer_reports_its_acceptance(client: Any, name: str, llm: LLM) -> None:
    answer = complete(client, name, PROMPTS[0], max_tokens=20, temperature=0.9, seed=3, extra_body={"ignore_eos": True})
    offline = llm.generate(PROMPTS[0], Params(0.9, seed=3), max_new_tokens=20)
    assert len(answer.metrics["speculative_decoding"]["per_step_accepted"]) == offline.steps
