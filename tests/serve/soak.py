"""`python -m tests.serve.soak --requests N --bundle FOLDER`: random requests, good, abandoned and bad.

Every whole answer must be the one that `LLM` gives offline; memory must not grow; every slot must be free at the end.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from tests.model.demo_bundle import PROMPTS
from tests.serve.server import Server, served
from trnspec.engine.request import Params
from trnspec.llm import LLM

# more than the slots, so that requests wait
_CLIENTS = 8
# ids of the demo pair are below it
_VOCABULARY = 2048
# beginnings of prompts that requests share
_TEXTS = 4
_WORDS = ("the", "and", "one", "10", "return", "is", ",", "a")
_GOOD = {"answered", "left", "gave up", "refused"}
_BAD = (
    {"logprobs": 21},
    {"presence_penalty": 3.0},
    {"logit_bias": {"9999": 1}},
    {"prompt": [9999]},
    {"prompt": [5] * 2000},
    {"seed": -3},
    {"top_p": 0},
    {"extra_body": {"min_tokens": 900}},
    {"extra_body": {"structured_outputs": {"regex": "(("}}},
)


# of the openai package's completions, and vLLM's own
_FIELDS = ("temperature", "top_p", "seed", "presence_penalty", "frequency_penalty")
_EXTRA = ("top_k", "min_p", "repetition_penalty", "allowed_token_ids", "bad_words", "min_tokens")


class Limits(NamedTuple):
    """The most new tokens of a request, and the most ids that a prompt shares with others."""

    longest: int
    shared: int = 0


def random_request(number: int, limits: Limits) -> dict[str, Any]:
    """The request of a number: its kind, what is asked, and the same as `Params`; the same in every run."""
    rng, longest = random.Random(number), limits.longest
    kind = rng.choices(["whole", "stream", "left", "gave up", "bad"], [53, 20, 11, 4, 12])[0]
    length = rng.randint(1, longest)
    request = {
        "kind": kind,
        "prompt": rng.choice(PROMPTS)[: rng.randint(1, 120)],
        "params": _random_params(rng, length),
        "length": length,
        "logprobs": rng.choice([None, None, None, 0, 5, 20]),
        "bad": rng.choice(_BAD),
    }
    if limits.shared and rng.random() < 0.5:
        text = random.Random(rng.randrange(_TEXTS)).choices(range(_VOCABULARY), k=limits.shared)
        own = rng.choices(range(_VOCABULARY), k=rng.choice((1, 20)))
        request["prompt"] = text[: rng.randint(1, limits.shared)] + own
    return request


def _random_params(rng: random.Random, length: int) -> Params:
    """Greedy or drawn, and half of them with one to four of the asks."""
    params = Params()
    if rng.random() < 0.7:
        temperature, top_k = round(rng.uniform(0.2, 1.5), 2), rng.choice([0, 1, 20, 100])
        top_p, min_p = rng.choice([1.0, 0.9, 0.5]), rng.choice([0.0, 0.0, 0.05])
        params = Params(temperature, top_k, top_p, min_p, rng.getrandbits(40))
    asks: dict[str, Any] = {
        "presence_penalty": round(rng.uniform(-0.5, 1.5), 2),
        "frequency_penalty": round(rng.uniform(-0.3, 1.0), 2),
        "repetition_penalty": round(rng.uniform(0.9, 1.4), 2),
        "logit_bias": {token: rng.choice([-100.0, -2.0, 3.0, 6.0]) for token in rng.sample(range(_VOCABULARY), 20)},
        "allowed_token_ids": rng.sample(range(_VOCABULARY), rng.choice([50, 500, 1200])),
        "bad_words": rng.sample(_WORDS, 3),
        "min_tokens": rng.randint(1, length),
    }
    chosen = rng.sample(sorted(asks), rng.randint(1, 4)) if rng.random() < 0.5 else []
    return replace(params, **{name: asks[name] for name in chosen})


class Soak:
    """Random requests against one server, by several clients."""

    def __init__(self, server: Server, limits: Limits) -> None:
        # vendor seam: comes with vLLM
        import openai  # noqa: PLC0415

        self.refusal, self.gave_up = openai.BadRequestError, openai.APITimeoutError
        self.client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=600)
        self.name = self.client.models.list().data[0].id
        self.limits = limits
        self.outcomes: Counter[str] = Counter()
        self.answers: dict[int, list[int]] = {}
        self._lock = threading.Lock()

    def ask(self, number: int) -> None:
        """Send a request; an answer of the wrong kind is counted, never raised."""
        asked = random_request(number, self.limits)
        try:
            outcome = self._ask(number, asked)
        except self.refusal:
            outcome = "refused" if asked["kind"] == "bad" else "refused wrongly"
        except self.gave_up:
            outcome = "gave up" if asked["kind"] == "gave up" else "no answer in time"
        except Exception as error:
            outcome = f"failed: {type(error).__name__}"
        with self._lock:
            self.outcomes[outcome] += 1

    def _ask(self, number: int, asked: dict[str, Any]) -> str:
        p, kind = asked["params"], asked["kind"]
        body = {"prompt": asked["prompt"], "max_tokens": asked["length"], "logprobs": asked["logprobs"]}
        body |= {name: getattr(p, name) for name in _FIELDS} | {"stream": kind in ("stream", "left")}
        body["logit_bias"] = {str(token): bias for token, bias in p.logit_bias.items()}
        bad = asked["bad"] if kind == "bad" else {}
        # an empty list of allowed ids is refused
        extra = {name: getattr(p, name) for name in _EXTRA if getattr(p, name)} | {"return_token_ids": True}
        extra |= bad.get("extra_body", {})
        # gives up soon, most often in the queue
        client = self.client.with_options(timeout=0.05) if kind == "gave up" else self.client
        answer = client.completions.create(model=self.name, **(body | bad | {"extra_body": extra}))
        if kind == "bad":
            return "served what must be refused"
        if kind == "left":
            next(iter(answer), None)
            answer.close()
            return "left"
        chunks = list(answer) if kind == "stream" else [answer]
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
        ids = [token for choice in choices for token in choice.token_ids or ()]
        if asked["logprobs"] is not None and sum(len(c.logprobs.tokens) for c in choices if c.logprobs) != len(ids):
            return "without its log-probabilities"
        self.answers[number] = ids
        return "answered"


def diverged(llm: LLM, answers: dict[int, list[int]], limits: Limits) -> list[int]:
    """The numbers of the requests whose ids are not those of the target alone, offline, equal lengths together."""
    numbers = []
    asked = {number: random_request(number, limits) for number in answers}
    for length in sorted({request["length"] for request in asked.values()}):
        same = [number for number, request in asked.items() if request["length"] == length]
        prompts, params = [asked[n]["prompt"] for n in same], [asked[n]["params"] for n in same]
        outputs = llm.generate(prompts, params, max_new_tokens=length, speculation=False)
        numbers += [n for n, output in zip(same, outputs, strict=True) if list(output.ids) != answers[n]]
    return numbers


def asked_for(numbers: Iterable[int], limits: Limits) -> dict[str, int]:
    """How many of these requests had each parameter that is not at its default."""
    counts: Counter[str] = Counter()
    for request in (random_request(number, limits) for number in numbers):
        params, default = request["params"], Params()
        counts.update(f.name for f in fields(params) if getattr(params, f.name) != getattr(default, f.name))
        counts["logprobs"] += request["logprobs"] is not None
    return dict(counts)


def rss_mb(pid: int) -> dict[str, int]:
    """The resident memory of a process and of all below it, by their names and ids."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    below = {pid}
    while more := {p for p, parent in parents.items() if parent in below} - below:
        below |= more
    return {f"{_line(p, 'Name:')}-{p}": int(_line(p, "VmRSS:").split()[0]) // 1024 for p in sorted(below)}


def _line(pid: int, key: str) -> str:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((line.split(maxsplit=1)[1] for line in lines if line.startswith(key)), "0 kB")


def _gauge(server: Server, metric: str) -> float:
    return sum(float(line.rsplit(" ", 1)[1]) for line in server.get("/metrics").splitlines() if line.startswith(metric))


def soak(server: Server, bundle: Path, requests: int, limits: Limits, pid: int) -> dict[str, Any]:
    """Send requests 0 to N-1 and say what came of them."""
    run, begin, memory = Soak(server, limits), time.monotonic(), {}
    with ThreadPoolExecutor(_CLIENTS) as pool:
        # memory after the first tenth is what later ones are held against
        for part in range(10):
            list(pool.map(run.ask, range(requests * part // 10, requests * (part + 1) // 10)))
            memory[f"after {requests * (part + 1) // 10}"] = rss_mb(pid)
            print(f"{requests * (part + 1) // 10} requests, {dict(run.outcomes)}", file=sys.stderr, flush=True)
            if run.outcomes.keys() - _GOOD:
                raise SystemExit(f"the server failed: {dict(run.outcomes)}; see {server.log}")
    seconds = time.monotonic() - begin
    time.sleep(1)
    at_end = {f"{state}_at_end": _gauge(server, f"vllm:num_requests_{state}{{") for state in ("running", "waiting")}
    at_end |= {name: _gauge(server, f"vllm:{name}") for name in ("prefix_cache_hits_total", "num_preemptions_total")}
    with LLM(bundle) as llm:
        different = diverged(llm, run.answers, limits)
    return {
        "requests": requests,
        "limits": limits._asdict(),
        "wall_s": round(seconds, 1),
        "outcomes": dict(run.outcomes),
        "ids": sum(map(len, run.answers.values())),
        "answered_that_asked": asked_for(run.answers, limits),
        "diverged": different,
        **at_end,
        "rss_mb": memory,
    }


def main(arguments: list[str]) -> None:
    """Soak a server that is started for it, or the one that the environment names, whose process is --pid."""
    parser = argparse.ArgumentParser(prog="python -m tests.serve.soak", description=__doc__)
    parser.add_argument("--bundle", type=Path, required=True, help="folder of the demo bundle")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--longest", type=int, default=90, help="most new tokens that a request asks for")
    parser.add_argument("--shared", type=int, default=0, help="most ids of a prompt that others begin with too")
    parser.add_argument("--blocks", type=int, default=0, help="blocks of the pool, fewer than the bundle's")
    parser.add_argument("--pid", type=int, default=0, help="the process of a server that runs already")
    options = parser.parse_args(arguments)
    folder = options.bundle.with_name("soak-log")
    folder.mkdir(exist_ok=True)
    pool = ["--num-gpu-blocks-override", str(options.blocks)] if options.blocks else []
    with served(options.bundle, folder, *pool) as server:
        pid = server.process.pid if server.process else options.pid
        report = soak(server, options.bundle, options.requests, Limits(options.longest, options.shared), pid)
    print(json.dumps(report))
    if report["diverged"] or report["running_at_end"] or report["waiting_at_end"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
