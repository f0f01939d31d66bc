"""`python -m tests.serve.soak --requests N --bundle FOLDER`: random requests, complete, abandoned and bad.

Every complete answer must be that of `LLM` offline, and no request may be left at the end.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.model.demo_bundle import PROMPTS
from tests.serve.server import Server, model_name, sample, served
from trnspec.engine.request import Params
from trnspec.llm import LLM

# more than the slots, so that requests wait
_CLIENTS, _LONGEST, _VOCAB_SIZE = 8, 90, 2048
_GOOD = {"answered", "left", "gave up", "refused"}
_BAD: tuple[dict[str, Any], ...] = (
    {"logprobs": 21}, {"presence_penalty": 3.0}, {"logit_bias": {"9999": 1}}, {"prompt": [9999]},
    {"prompt": [5] * 2000}, {"top_p": 0}, {"extra_body": {"min_tokens": 900}},
    {"extra_body": {"structured_outputs": {"regex": "(("}}},
)  # fmt: skip
# of the openai package's completions, and vLLM's
_FIELDS = ("temperature", "top_p", "seed", "presence_penalty", "frequency_penalty")
_EXTRA = ("top_k", "min_p", "repetition_penalty", "allowed_token_ids", "bad_words", "min_tokens")


def random_request(number: int) -> tuple[str, str, Params, int]:
    """Kind, prompt, parameters and length of the request of a number, the same in every run."""
    rng = random.Random(number)
    kind = rng.choices(["complete", "stream", "left", "gave up", "bad"], [53, 20, 11, 4, 12])[0]
    length, values = rng.randint(1, _LONGEST), dict[str, Any]()
    if rng.random() < 0.7:
        values = {"temperature": round(rng.uniform(0.2, 1.5), 2), "top_k": rng.choice([0, 1, 20, 100])}
        values |= {"top_p": rng.choice([1.0, 0.9, 0.5]), "min_p": rng.choice([0.0, 0.05]), "seed": rng.getrandbits(40)}
    more: dict[str, Any] = {
        "presence_penalty": round(rng.uniform(-0.5, 1.5), 2),
        "frequency_penalty": round(rng.uniform(-0.3, 1.0), 2),
        "repetition_penalty": round(rng.uniform(0.9, 1.4), 2),
        "logit_bias": {token: rng.choice([-100.0, -2.0, 3.0, 6.0]) for token in rng.sample(range(_VOCAB_SIZE), 20)},
        "allowed_token_ids": rng.sample(range(_VOCAB_SIZE), rng.choice([50, 500, 1200])),
        "bad_words": rng.sample(("the", "and", "one", "10", "return", "is", ",", "a"), 3),
        "min_tokens": rng.randint(1, length),
    }
    chosen = rng.sample(sorted(more), rng.randint(0, 3))
    return kind, rng.choice(PROMPTS)[: rng.randint(1, 120)], Params(**values | {n: more[n] for n in chosen}), length


class Soak:
    """Random requests against one server."""

    def __init__(self, server: Server) -> None:
        # comes with vLLM
        import openai

        self.refusal, self.timeout = openai.BadRequestError, openai.APITimeoutError
        self.client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=600)
        self.name, self.answers = model_name(server), dict[int, list[int]]()

    def send(self, number: int) -> str:
        """Send a request; what came of it, never an exception."""
        kind, prompt, params, length = random_request(number)
        try:
            return self._send(number, kind, prompt, params, length)
        except self.refusal:
            return "refused" if kind == "bad" else "refused wrongly"
        except self.timeout:
            return "gave up" if kind == "gave up" else "no answer in time"
        except Exception as error:
            return f"failed: {type(error).__name__}"

    def _send(self, number: int, kind: str, prompt: str, params: Params, length: int) -> str:
        body = {name: getattr(params, name) for name in _FIELDS} | {"prompt": prompt, "max_tokens": length}
        body |= {"logit_bias": {str(token): bias for token, bias in params.logit_bias.items()}}
        extra = {name: getattr(params, name) for name in _EXTRA if getattr(params, name)} | {"return_token_ids": True}
        bad = random.Random(number).choice(_BAD) if kind == "bad" else {}
        body |= {"stream": kind in ("stream", "left")} | bad | {"extra_body": extra | bad.get("extra_body", {})}
        # gives up soon, most often in the queue
        client = self.client.with_options(timeout=0.05) if kind == "gave up" else self.client
        answer = client.completions.create(model=self.name, **body)
        if kind == "bad":
            return "served what must be refused"
        if kind == "left":
            next(iter(answer), None)
            answer.close()
            return "left"
        parts = list(answer) if body["stream"] else [answer]
        self.answers[number] = [i for part in parts for choice in part.choices for i in choice.token_ids or ()]
        return "answered"


def main(arguments: list[str]) -> None:
    """Soak a server that is started for it, or the one that the environment names."""
    parser = argparse.ArgumentParser(prog="python -m tests.serve.soak", description=__doc__)
    parser.add_argument("--bundle", type=Path, required=True, help="folder of the demo bundle")
    parser.add_argument("--requests", type=int, default=300)
    options = parser.parse_args(arguments)
    folder = options.bundle.with_name("soak-log")
    folder.mkdir(exist_ok=True)
    with served(options.bundle, folder) as server, ThreadPoolExecutor(_CLIENTS) as pool:
        soak = Soak(server)
        outcomes = Counter(pool.map(soak.send, range(options.requests)))
        time.sleep(1)
        left = sample(server, "vllm:num_requests_running") + sample(server, "vllm:num_requests_waiting")
    with LLM(options.bundle) as llm:
        different = [
            number
            for number, ids in soak.answers.items()
            for _, prompt, params, length in [random_request(number)]
            if list(llm.generate(prompt, params, max_new_tokens=length, speculation=False).ids) != ids
        ]
    print(json.dumps({"outcomes": outcomes, "different": different, "left": left}))
    if different or left or outcomes.keys() - _GOOD:
        raise SystemExit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
