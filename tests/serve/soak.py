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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from model.llm import LLM
from model.serving.request import Params
from tests.model.demo_bundle import PROMPTS
from tests.serve.server import Server, served

# more than the slots, so that requests wait
_CLIENTS = 8
_GOOD = {"answered", "left", "gave up", "refused"}
_BAD = (
    {"logprobs": 21},
    {"presence_penalty": 3.0},
    {"logit_bias": {"9999": 1}},
    {"prompt": [9999]},
    {"prompt": [5] * 300},
    {"seed": -3},
    {"top_p": 0},
    {"extra_body": {"min_tokens": 900}},
    {"extra_body": {"structured_outputs": {"regex": "(("}}},
)


def random_request(number: int, longest: int) -> dict[str, Any]:
    """The request of a number: its kind, what is asked, and the same as `Params`; the same in every run."""
    rng = random.Random(number)
    kind = rng.choices(["whole", "stream", "left", "gave up", "bad"], [53, 20, 11, 4, 12])[0]
    params = Params()
    if rng.random() < 0.7:
        temperature, top_k = round(rng.uniform(0.2, 1.5), 2), rng.choice([0, 1, 20, 100])
        top_p, min_p = rng.choice([1.0, 0.9, 0.5]), rng.choice([0.0, 0.0, 0.05])
        params = Params(temperature, top_k, top_p, min_p, rng.getrandbits(40))
    if rng.random() < 0.3:
        presence, repetition = round(rng.uniform(-0.5, 1.5), 2), round(rng.uniform(0.9, 1.4), 2)
        params = replace(params, presence_penalty=presence, repetition_penalty=repetition)
    prompt = rng.choice(PROMPTS)[: rng.randint(1, 120)]
    return {
        "kind": kind,
        "prompt": prompt,
        "params": params,
        "length": rng.randint(1, longest),
        "bad": rng.choice(_BAD),
    }


class Soak:
    """Random requests against one server, by several clients."""

    def __init__(self, server: Server, longest: int) -> None:
        # vendor seam: comes with vLLM
        import openai  # noqa: PLC0415

        self.refusal, self.gave_up = openai.BadRequestError, openai.APITimeoutError
        self.client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=600)
        self.name = self.client.models.list().data[0].id
        self.longest = longest
        self.outcomes: Counter[str] = Counter()
        self.answers: dict[int, list[int]] = {}
        self._lock = threading.Lock()

    def ask(self, number: int) -> None:
        """Send a request; an answer of the wrong kind is counted, never raised."""
        asked = random_request(number, self.longest)
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
        fields = {"prompt": asked["prompt"], "max_tokens": asked["length"], "temperature": p.temperature}
        fields |= {"top_p": p.top_p, "seed": p.seed, "stream": kind in ("stream", "left")}
        fields["presence_penalty"] = p.presence_penalty
        bad = asked["bad"] if kind == "bad" else {}
        extra = {"top_k": p.top_k, "min_p": p.min_p, "repetition_penalty": p.repetition_penalty}
        extra |= {"return_token_ids": True} | bad.get("extra_body", {})
        # gives up soon, most often in the queue
        client = self.client.with_options(timeout=0.05) if kind == "gave up" else self.client
        answer = client.completions.create(model=self.name, **(fields | bad | {"extra_body": extra}))
        if kind == "bad":
            return "served what must be refused"
        if kind == "left":
            next(iter(answer), None)
            answer.close()
            return "left"
        chunks = list(answer) if kind == "stream" else [answer]
        self.answers[number] = [i for c in chunks if c.choices for i in c.choices[0].token_ids or ()]
        return "answered"


def diverged(llm: LLM, answers: dict[int, list[int]], longest: int) -> list[int]:
    """The numbers of the requests whose ids are not those of the target alone, offline, equal lengths together."""
    numbers = []
    asked = {number: random_request(number, longest) for number in answers}
    for length in sorted({request["length"] for request in asked.values()}):
        same = [number for number, request in asked.items() if request["length"] == length]
        prompts, params = [asked[n]["prompt"] for n in same], [asked[n]["params"] for n in same]
        outputs = llm.generate(prompts, params, max_new_tokens=length, speculation=False)
        numbers += [n for n, output in zip(same, outputs, strict=True) if list(output.ids) != answers[n]]
    return numbers


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


def soak(server: Server, bundle: Path, requests: int, longest: int, pid: int) -> dict[str, Any]:
    """Send requests 0 to N-1 and say what came of them."""
    run, begin, memory = Soak(server, longest), time.monotonic(), {}
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
    with LLM(bundle) as llm:
        different = diverged(llm, run.answers, longest)
    return {
        "requests": requests,
        "longest": longest,
        "wall_s": round(seconds, 1),
        "outcomes": dict(run.outcomes),
        "ids": sum(map(len, run.answers.values())),
        "diverged": different,
        "running_at_end": _gauge(server, "vllm:num_requests_running{"),
        "waiting_at_end": _gauge(server, "vllm:num_requests_waiting{"),
        "rss_mb": memory,
    }


def main(arguments: list[str]) -> None:
    """Soak a server that is started for it, or the one that the environment names, whose process is --pid."""
    parser = argparse.ArgumentParser(prog="python -m tests.serve.soak", description=__doc__)
    parser.add_argument("--bundle", type=Path, required=True, help="folder of the demo bundle")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--longest", type=int, default=90, help="most new tokens that a request asks for")
    parser.add_argument("--pid", type=int, default=0, help="the process of a server that runs already")
    options = parser.parse_args(arguments)
    folder = options.bundle.with_name("soak-log")
    folder.mkdir(exist_ok=True)
    with served(options.bundle, folder) as server:
        pid = server.process.pid if server.process else options.pid
        report = soak(server, options.bundle, options.requests, options.longest, pid)
    print(json.dumps(report))
    if report["diverged"] or report["running_at_end"] or report["waiting_at_end"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
