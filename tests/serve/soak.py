"""`python -m tests.serve.soak --requests N`: random requests, good, bad and cancelled, held to the offline ids.

Reports memory of the worker before and after, slots left, requests refused and cancelled, and every divergence.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import random
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import openai
import psutil

from model.serving.engine import Engine
from model.serving.request import Params, Request
from tests.model.demo_bundle import PROMPTS, graphs, shape_of
from tests.serve.conftest import BATCH, LENGTH, K, Server, start

_BAD: tuple[dict[str, Any], ...] = (
    {"logprobs": 1}, {"repetition_penalty": 1.3}, {"seed": -5}, {"min_tokens": 2}, {"max_tokens": 10 * LENGTH},
)  # fmt: skip


def _plan(rng: random.Random) -> dict[str, Any]:
    kind = rng.choices(["whole", "cancelled", "bad"], [8, 1, 1])[0]
    text = rng.choice(PROMPTS)
    params: dict[str, Any] = {"temperature": rng.choice([0.0, 0.0, 0.7, 1.0, 1.3])}
    if params["temperature"]:
        params |= {"seed": rng.getrandbits(62), "top_k": rng.choice([0, 5, 40]), "top_p": rng.choice([1.0, 0.9])}
        params |= {"min_p": rng.choice([0.0, 0.05])}
    return {"kind": kind, "text": text[: rng.randint(4, len(text))], "tokens": rng.randint(1, 60), "params": params}


def _served(server: Server, plan: dict[str, Any], rng: random.Random) -> Any:
    params = dict(plan["params"])
    temperature, seed = params.pop("temperature"), params.pop("seed", None)
    body = {"return_token_ids": True} | params
    common = {"model": server.model, "prompt": plan["text"], "temperature": temperature, "seed": seed}
    if plan["kind"] == "bad":
        bad = rng.choice(_BAD)
        try:
            server.client.completions.create(**common, max_tokens=8, extra_body=body | bad)
        except openai.BadRequestError:
            return "refused"
        return "not refused"
    if plan["kind"] == "cancelled":
        stream = server.client.completions.create(**common, max_tokens=60, extra_body=body, stream=True)
        next(iter(stream))
        stream.close()
        return "cancelled"
    choice = server.client.completions.create(**common, max_tokens=plan["tokens"], extra_body=body).choices[0]
    return choice.prompt_token_ids, choice.token_ids


def _worker(server: Server) -> psutil.Process:
    children = psutil.Process(server.process.pid).children(recursive=True)
    return max(children, key=lambda p: p.memory_info().rss)


def main() -> None:
    """Run the soak and print what came of it; exit 1 if anything diverged, leaked or was served that should not be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--at-once", type=int, default=3 * BATCH)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    g = graphs(folder, k=K, batch=BATCH, max_len=LENGTH)
    rng = random.Random(options.seed)
    plans = [(_plan(rng), random.Random(i)) for i in range(options.requests)]
    server = start(g.bundle.path, folder / "server.log")
    warm, lock, memory = options.requests // 10, threading.Lock(), list[int]()

    def one(item: tuple[dict[str, Any], random.Random]) -> Any:
        answer = _served(server, *item)
        with lock:
            memory.append(_worker(server).memory_info().rss)
        return answer

    try:
        with concurrent.futures.ThreadPoolExecutor(options.at_once) as pool:
            answers = list(pool.map(one, plans))
        left = server.metrics("vllm:num_requests_running") + server.metrics("vllm:num_requests_waiting")
    finally:
        server.process.terminate()
        server.process.wait(timeout=120)
    engine = Engine(g, shape_of(g.bundle), speculative=False)
    whole = [(plan, answer) for (plan, _), answer in zip(plans, answers, strict=True) if plan["kind"] == "whole"]
    asked = [Request(tuple(ids), Params(**plan["params"]), plan["tokens"], (0,)) for plan, (ids, _) in whole]
    expected = [r.ids for r in engine.run(asked)]
    diverged = sum(e != ids for e, (_, (_, ids)) in zip(expected, whole, strict=True))
    other = Counter(a for a in answers if isinstance(a, str))
    grown = (memory[-1] - memory[warm]) / 2**20
    print(f"{options.requests} requests, {options.at_once} at once, {BATCH} slots: {len(whole)} whole, {dict(other)}")
    print(f"diverged from the offline target alone: {diverged}; requests left in the server: {left:.0f}")
    print(f"worker's memory after a tenth and at the end: {memory[warm] / 2**20:.0f}, {memory[-1] / 2**20:.0f} MiB")
    if diverged or left or other["not refused"] or grown > 64:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
