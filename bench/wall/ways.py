"""Ways to serve a request, and the sets of them that are compared.

A way takes a request and returns its ids, wall seconds, target steps and seconds to the first token. The first way of a
set is our target alone: every other way's ids are compared with its ids.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench.demo import DEMO, TARGET, bundle
from bench.serving.servers import Endpoint, Server, serving, vllm_command
from model.errors import UserError
from model.progress import each
from trnspec.bundle.opening import open_bundle
from trnspec.engine.config import engine_config
from trnspec.engine.engine import Engine
from trnspec.engine.request import Request
from trnspec.engine.warmup import prepare_graphs
from trnspec.runtime.xla import XlaRunner

ALONE, OURS = "our target alone", "ours, speculation"
GREEDY, ASSISTED, LOOK_UP = "transformers greedy", "transformers assisted", "transformers look-up"
VLLM, VLLM_DRAFTS = "vLLM, target alone", "vLLM, 7 drafts"


@dataclass(frozen=True)
class Answer:
    """One request served: new ids and wall seconds; 0 if unknown: target steps, tokens of a step, seconds to the first
    token."""

    ids: list[int]
    seconds: float
    steps: int = 0
    tokens_per_step: float = 0.0
    first: float = 0.0


Way = Callable[[Request], Answer]


@dataclass(frozen=True)
class Ways:
    """Ways by name, and their settings in words; times are also given as multiples of those of the `references`.

    Ways of `own_noise` draw other texts than ours where the temperature is not 0.
    """

    of: dict[str, Way]
    settings: str
    references: tuple[str, ...] = (ALONE,)
    own_noise: frozenset[str] = frozenset()


def ours(graphs: XlaRunner, speculative: bool) -> Way:
    """A bundle served in this process, one request at a time."""

    def way(request: Request) -> Answer:
        engine, times = Engine(graphs, engine_config(graphs.bundle), speculative), list[float]()
        prepare_graphs(engine, [request])
        begin = time.perf_counter()
        (result,) = engine.run([request], lambda *_: times.append(time.perf_counter() - begin))
        return Answer(result.ids, times[-1], result.steps, result.tokens_per_step, times[0])

    return way


def theirs(target: Any, **options: Any) -> Way:
    """A target of transformers with further options of its `generate`; its steps are its passes, the prompt's too."""
    passes = 0

    def counted(*_: Any) -> None:
        nonlocal passes
        passes += 1

    target.register_forward_hook(counted)

    def way(request: Request) -> Answer:
        nonlocal passes
        ids, params = torch.tensor([request.ids]), request.params
        drawn = {"temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k}
        how = {"do_sample": True, **drawn} if params.temperature else {"do_sample": False}
        torch.manual_seed(params.seed)
        begin, passes = time.perf_counter(), 0
        out = target.generate(ids, max_new_tokens=request.max_new_tokens, **how, **options)
        seconds, new = time.perf_counter() - begin, out[0, ids.shape[1] :].tolist()
        return Answer(new, seconds, passes, len(new) / max(1, passes))

    return way


def served(endpoint: Endpoint, batch: int = 1) -> Way:
    """A server: `batch` equal requests at once, timed until the last one has ended."""
    pool = ThreadPoolExecutor(batch)

    def way(request: Request) -> Answer:
        begin = time.perf_counter()
        ids, *_ = pool.map(lambda one: endpoint.complete(one.ids, one.params, one.max_new_tokens), [request] * batch)
        return Answer(ids, time.perf_counter() - begin)

    return way


def _transformers(*names: str, look_up: int = 0) -> dict[str, Way]:
    target, draft = (
        AutoModelForCausalLM.from_pretrained(DEMO / name, dtype=torch.float32) for name in ("target", "draft")
    )
    options: dict[str, dict[str, Any]] = {
        GREEDY: {}, ASSISTED: {"assistant_model": draft}, LOOK_UP: {"prompt_lookup_num_tokens": look_up}
    }  # fmt: skip
    return {name: theirs(target, **options[name]) for name in names}


def _readme(options: argparse.Namespace, stack: ExitStack) -> Ways:
    found = open_bundle(options.bundle)
    spec = found.spec
    if not spec.k:
        raise UserError(f"{options.bundle} is a target alone (k 0): there is nothing to compare; give a pair's bundle")
    graphs = XlaRunner(found)
    stack.callback(graphs.close)
    own = {ALONE: ours(graphs, False), OURS: ours(graphs, True)}
    settings = f"k {spec.k}, batch 1, {spec.dtype}"
    others = _transformers(GREEDY, ASSISTED)
    return Ways(own | others, settings, (ALONE, ASSISTED), frozenset(others))


def bundled(names: dict[str, tuple[str, int, str]], folder: Path, stack: ExitStack) -> dict[str, Way]:
    """Ways of bundles of one slot by (drafter, k, its model's folder), beside the target alone."""
    ways = {}
    for name, (drafter, k, model) in each([(ALONE, ("none", 0, "")), *names.items()], "bundles"):
        graphs = XlaRunner(open_bundle(bundle(folder / f"{model or drafter}-k{k}", drafter, k, model)))
        stack.callback(graphs.close)
        ways[name] = ours(graphs, k > 0)
    return ways


def _drafters(options: argparse.Namespace, stack: ExitStack) -> Ways:
    names = {f"{drafter}, k {k}": (drafter, k, "") for drafter in options.drafters for k in options.ks}
    others = _transformers(GREEDY, ASSISTED, LOOK_UP, look_up=max(options.ks))
    return Ways(bundled(names, options.folder, stack) | others, "batch 1, fp32", (ALONE,), frozenset(others))


def _vllm(options: argparse.Namespace, stack: ExitStack) -> Ways:
    vllm = vllm_command(options.vllm)
    engine = ["--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", str(options.batch)]
    engine += ["--generation-config", "vllm"]
    drafting = {"method": "draft_model", "model": str(DEMO / "draft"), "num_speculative_tokens": 7}
    commands = {
        name: [str(bundle(options.folder / f"k{k}-b{options.batch}", "chain", k, batch=options.batch, max_len=512))]
        for name, k in ((ALONE, 0), (OURS, 7))
    }
    commands[VLLM] = [str(TARGET), *engine]
    commands[VLLM_DRAFTS] = [str(TARGET), *engine, "--speculative-config", json.dumps(drafting)]
    ways = {}
    for number, (name, command) in enumerate(commands.items()):
        server = Server(vllm, options.port + number, command, own_engine=name in (VLLM, VLLM_DRAFTS))
        log = options.folder / f"{name.replace(', ', '-').replace(' ', '-')}.log"
        ways[name] = served(Endpoint(stack.enter_context(serving(server, log)), "m"), options.batch)
    settings = f"batch {options.batch}, fp32"
    return Ways(ways, settings, (ALONE, VLLM, VLLM_DRAFTS), frozenset((VLLM, VLLM_DRAFTS)))


SETS: dict[str, Callable[[argparse.Namespace, ExitStack], Ways]] = {
    "readme": _readme, "drafters": _drafters, "vllm": _vllm
}  # fmt: skip
