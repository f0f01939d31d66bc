"""`python -m tests.serve.scheduling --bundle DIR`: ids and log-probabilities under vLLM's scheduler, to the bit.

vLLM's scheduler and KV cache manager run in this process with few blocks: requests are preempted, a request that goes
on from an answer reads blocks with generated ids from the prefix cache, prompts run in chunks, and greedy answers are
scored as prompts. The baseline is our engine with blocks for all, without drafts and without a prefix cache.
"""

from __future__ import annotations

import logging
import random
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import count, product, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from vllm import SamplingParams
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig

from bench.table import markdown
from model.cache import KEY_TILE
from model.dtypes import BY_FLAG
from model.errors import command_line, run_cli
from model.progress import progress
from serve import worker as module
from serve.folder import BUNDLE_VARIABLE, DIGEST_VARIABLE, model_folder
from serve.params import engine_request
from serve.platform import BundlePlatform
from tests.serve.test_vllm import Client, expected_rows, rows_of
from trnspec.bundle.opening import Bundle, open_bundle
from trnspec.engine.config import engine_config
from trnspec.engine.engine import Engine
from trnspec.engine.request import Score
from trnspec.runtime.runner import Runner, load_runner

_BEST, _CHUNKS = 2, (128, 512)
_SAMPLED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.7}, {"temperature": 1.0, "top_k": 40}, {"temperature": 1.3, "min_p": 0.02},
    {"temperature": 0.9, "top_p": 0.9},
)  # fmt: skip


class Case(NamedTuple):
    """A request, and the ids and scores of the baseline; with `scored` they are those of the prompt's last ids."""

    prompt: list[int]
    params: Any
    ids: list[int]
    scores: list[Score]
    scored: bool = False


@dataclass
class Counts:
    """What a run did, and the requests with other ids or log-probabilities than the baseline's."""

    chunk: int
    drafts: bool
    logprobs: bool
    requests: int = 0
    tokens: int = 0
    preemptions: int = 0
    cached: int = 0
    cached_generated: int = 0
    chunks: int = 0
    steps: int = 0
    accepted: int = 0
    different_ids: int = 0
    different_logprobs: int = 0
    seconds: int = 0

    def compare(self, case: Case, outputs: Sequence[Any]) -> None:
        """Count a request and its differences from the baseline."""
        ids = [token for one in outputs for token in one.new_token_ids]
        field = "new_prompt_logprobs_tensors" if case.scored else "new_logprobs"
        rows = [row for one in outputs if (part := getattr(one, field)) for row in rows_of(part, _BEST)]
        if case.scored:
            rows = rows[-len(case.ids) :]
            # a greedy id is the best one
            ids = [best for (_, best, *_), *_ in rows]
        self.requests, self.tokens = self.requests + 1, self.tokens + len(case.ids)
        pairs = (ids, case.ids), (rows, expected_rows(case.ids, case.scores) if self.logprobs else [])
        at = [next((n for n, (a, b) in enumerate(zip_longest(*pair)) if a != b), None) for pair in pairs]
        self.different_ids, self.different_logprobs = (
            number + (place is not None)
            for number, place in zip((self.different_ids, self.different_logprobs), at, strict=True)
        )
        if at != [None, None]:
            kind = "scored" if case.scored else "greedy" if not case.params.temperature else "sampled"
            print(f"{kind}, {len(case.prompt)} ids in the prompt: ids differ at {at[0]}, log-probabilities at {at[1]}")


def conversations(engine: Engine, number: int, tokens: int, logprobs: bool, rng: random.Random) -> list[list[Case]]:
    """At least so many requests: first requests, those that go on from their answers, and scored answers."""
    config, best = engine.config, _BEST if logprobs else None
    # most answers end in another block than their prompts
    near = KEY_TILE - 3 * tokens // 4, KEY_TILE - tokens // 4
    lengths = (1, KEY_TILE // 2), near, near, (2 * KEY_TILE, config.max_len - 4 * tokens)

    def ids(low: int, high: int) -> list[int]:
        return rng.choices(range(1, config.vocab_size), k=rng.randint(low, max(low, high)))

    def answered(prompts: list[list[int]]) -> list[Case]:
        """Requests with the baseline's answers; every second one is greedy."""
        sampled = _SAMPLED[: 1 if config.greedy else None]
        kinds = ({"temperature": 0.0} if n % 2 else rng.choice(sampled) for n in range(len(prompts)))
        params = [
            SamplingParams(**kind, seed=rng.getrandbits(53), max_tokens=rng.randint(tokens // 2, tokens), logprobs=best)
            for kind in kinds
        ]
        requests = [engine_request(config, tuple(p), q) for p, q in zip(prompts, params, strict=True)]
        results = engine.run([replace(request, k_limit=0) for request in requests])
        return [Case(p, q, r.ids, r.scores) for p, q, r in zip(prompts, params, results, strict=True)]

    talks = -(-number * 2 // (5 if logprobs else 4))
    firsts = answered([ids(*lengths[n // 2 % len(lengths)]) for n in range(talks)])
    seconds = answered([[*case.prompt, *case.ids, *ids(1, 20)] for case in firsts])
    scoring = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=best)
    return [
        [first, second]
        + [Case([*first.prompt, *first.ids], scoring, first.ids, first.scores, True)] * bool(logprobs and n % 2)
        for n, (first, second) in enumerate(zip(firsts, seconds, strict=True))
    ]


def worker_of(bundle: Bundle, runner: Runner, blocks: int, counts: Counts, patch: pytest.MonkeyPatch) -> Any:
    """Our worker for this runner, with vLLM's configuration; the limits of drafts alternate from 1 to k."""
    spec, limits = bundle.spec, count()
    patch.setenv(BUNDLE_VARIABLE, str(bundle.path))
    patch.setenv(DIGEST_VARIABLE, bundle.manifest.digest)
    patch.setattr(module, "load_runner", lambda *_: runner)
    if spec.k:
        make = module.engine_request
        patch.setattr(module, "engine_request", lambda *given: replace(make(*given), k_limit=1 + next(limits) % spec.k))
    model = ModelConfig(str(model_folder(bundle)), max_model_len=spec.max_len, dtype=BY_FLAG[spec.dtype].name)
    scheduler = SchedulerConfig(
        max_num_seqs=spec.batch, max_num_batched_tokens=counts.chunk, max_model_len=spec.max_len,
        is_encoder_decoder=False, enable_chunked_prefill=True,
    )  # fmt: skip
    config = VllmConfig(model, CacheConfig(enable_prefix_caching=True), scheduler_config=scheduler)
    config.additional_config = {"speculation": counts.drafts}
    config.cache_config.num_gpu_blocks_override = config.cache_config.num_gpu_blocks = blocks
    # a process of several has no handler of signals
    config.parallel_config._api_process_count = 2
    BundlePlatform.check_and_update_config(config)
    worker: Any = module.BundleWorker.__new__(module.BundleWorker)
    worker.vllm_config = config
    worker.load_model()
    return worker


def serve(bundle: Bundle, runner: Runner, talks: list[list[Case]], blocks: int, counts: Counts) -> None:
    """Serve conversations, each request after the one before it, and count what differs."""
    begin, waiting = time.monotonic(), [(talk, 0) for talk in reversed(talks)]
    with pytest.MonkeyPatch.context() as patch, progress("serving", sum(map(len, talks))) as task:
        client, running = Client(worker_of(bundle, runner, blocks, counts, patch)), dict[str, tuple[list[Case], int]]()
        admit = client.worker.engine.admit
        known = {tuple(case.prompt): len(talk[0].prompt) for talk in talks for case in talk}

        def admitted(request: Any, blocks: Any, cached: int, ids: Any) -> int:
            counts.cached_generated += max(0, cached - known[request.ids])
            return int(admit(request, blocks, cached, ids))

        client.worker.engine.admit = admitted
        while waiting or running:
            while waiting and len(running) < bundle.spec.batch:
                talk, place = waiting.pop()
                running[name := str(len(client.outputs))] = talk, place
                client.add(name, talk[place].prompt, talk[place].params.clone())
            client.step()
            for name in [name for name in running if name not in client.scheduler.requests]:
                talk, place = running.pop(name)
                counts.compare(talk[place], client.outputs[name])
                if place + 1 < len(talk):
                    # soon, while its blocks are cached
                    waiting.append((talk, place + 1))
                task.advance()
    counts.preemptions, counts.cached, counts.accepted = client.preempted, client.cached, client.accepted
    counts.chunks = client.read.pop("prefill_chunks_total")
    counts.steps, counts.seconds = client.read.total(), round(time.monotonic() - begin)


def main(arguments: list[str]) -> None:
    """Print a row for each run; exit 1 if anything differs, or nothing was preempted or cached."""
    does = "Compare ids and log-probabilities under vLLM's scheduler with those of our engine without drafts."
    parser = command_line("tests.serve.scheduling", does, "--bundle bundles/served --requests 300")
    parser.add_argument("--bundle", type=Path, required=True, help="folder of the bundle")
    parser.add_argument("--requests", type=int, default=300, help="of all runs (default: 300)")
    parser.add_argument("--tokens", type=int, default=40, help="most new tokens of a request (default: 40)")
    parser.add_argument("--blocks", type=int, help="KV blocks (default: one more than a sequence needs)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    bundle = open_bundle(options.bundle)
    config, spec = engine_config(bundle), bundle.spec
    blocks = options.blocks or 2 + spec.max_len // KEY_TILE
    chunks = [chunk for chunk in _CHUNKS if chunk <= spec.max_len]
    runs = list(product((False, True)[: 2 - config.greedy], chunks, (False, True)[: 1 + (spec.k > 0)]))
    results = list[Counts]()
    with closing(load_runner(bundle, "cpu")) as runner:
        for number, (logprobs, chunk, drafts) in enumerate(runs):
            results.append(counts := Counts(chunk, drafts, logprobs))
            rng, share = random.Random(options.seed + number), -(-options.requests // len(runs))
            talks = conversations(Engine(runner, config), share, options.tokens, logprobs, rng)
            serve(bundle, runner, talks, blocks, counts)
            print(counts, file=sys.stderr, flush=True)
    rows = [list(map(str, asdict(counts).values())) for counts in results]
    sums = {name: sum(getattr(counts, name) for counts in results) for name in list(asdict(results[0]))[3:]}
    print(f"{bundle.manifest}, kernels {spec.kernels}, {blocks} blocks, seed {options.seed}")
    print(f"{markdown(list(asdict(results[0])), rows)}\n{sums}")
    if sums["different_ids"] or sums["different_logprobs"] or not (sums["preemptions"] and sums["cached_generated"]):
        raise SystemExit(1)


if __name__ == "__main__":
    logging.getLogger("vllm").setLevel(logging.ERROR)
    run_cli(lambda: main(sys.argv[1:]))
