"""The calls that clients make, through the openai package and plain HTTP: what is answered, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve.calls import Client, calls
from tests.serve.server import NO_VLLM, Server, served

pytestmark = pytest.mark.skipif(bool(NO_VLLM), reason=NO_VLLM)
# of every other call the answer has what was asked for; stock vLLM answers the first four of these
REFUSED = {
    "use_beam_search": "400: use_beam_search is not served",
    "vllm_xargs": "400: vllm_xargs is not served",
    "kv_transfer_params": "400: kv_transfer_params is not served",
    "generative_scoring": "400: generative scoring is not served",
    "thinking_token_budget": "400: thinking_token_budget",
    "suffix": "400: suffix is only supported",
    "prompt_embeds": "400: You must set `--enable-prompt-embeds`",
    "an image": "400: m is not a multimodal model",
    "embeddings": "404",
    "score": "404",
}


@pytest.fixture(scope="module")
def client(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    tools = ("--served-model-name", "m", "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    running: Server
    with served(bundle, tmp_path_factory.mktemp("clients"), *tools) as running:
        yield Client(running.url)


def test_every_call_is_answered_or_refused_by_name(client: Client) -> None:
    outcomes = {call.name: client.outcome(call) for call in calls()}
    unexpected = {}
    for name, outcome in outcomes.items():
        expected = REFUSED.get(name.split(": ")[-1], "yes")
        if not outcome.startswith(expected) or (expected == "yes") != (outcome == "yes"):
            unexpected[name] = outcome
    assert unexpected == {}
    assert sum(outcome == "yes" for outcome in outcomes.values()) == 102
