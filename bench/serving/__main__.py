"""`python -m bench.serving --baseline URL --speculative URL`: two servers under load, and whether they answer alike.

`vllm bench serve` sends each tier of prompts to one endpoint after the other, in random order in every round. Its TPOT
is the time after the first token over the tokens that the server's usage field counts, less one; it reads acceptance
from the server's /metrics. First the gate sends random requests to both endpoints (`bench.gate`): where an answer
differs no speedup is printed and the exit status is 1. `--demo` starts servers of the demo pair: the target alone, one
that always drafts 7, one that chooses the k of each step by itself, and vLLM's own engine for CPUs on the target in
fp32, all without prefix caching (a tier's prompts are sent in every round). The gate asks ours alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench import demo, gate
from bench.demo import count
from bench.provenance import header, said, write_result
from bench.serving.prompts import Prompt, prompt_sets
from bench.serving.servers import Endpoint, Server, serving, vllm_command
from bench.table import markdown
from model.errors import UserError, run_cli
from model.progress import each

_LOAD_SECONDS, _DEMO_K, _DEMO_BATCH, _DEMO_LENGTH = 3600, 7, 4, 512
BASELINE, SPECULATIVE, FIXED, STOCK = "baseline", "speculative", f"always k {_DEMO_K}", "stock vLLM"
# the speculative bundle held at the target's own steps; the baseline's bundle has no draft
NEVER = "always k 0"
# of a saved result of `vllm bench serve`: vllm/benchmarks/serve.py, benchmark() and process_one_metric()
FIGURES = ("output_throughput", "median_ttft_ms", "median_tpot_ms", "median_e2el_ms", "spec_decode_acceptance_length")
_BY_POSITION, _STEPS = "spec_decode_per_position_acceptance_rates", "spec_decode_num_drafts"
Rows = list[dict[str, Any]]


def command(endpoint: Endpoint, dataset: Path, result: Path, clients: int, options: argparse.Namespace) -> list[str]:
    """One run of the public client over a file of prompts, greedy, so many requests at once."""
    chat = ["--backend", "openai-chat", "--endpoint", "/v1/chat/completions",
            "--extra-body", '{"chat_template_kwargs": {"enable_thinking": false}}']  # fmt: skip
    plain = ["--backend", "openai", "--endpoint", "/v1/completions"]
    flags = {
        "base-url": endpoint.address, "model": endpoint.model, "tokenizer": options.tokenizer or endpoint.model,
        "dataset-name": "custom", "dataset-path": dataset, "custom-output-len": options.tokens,
        "num-prompts": options.requests, "max-concurrency": clients, "num-warmups": clients,
        "temperature": 0, "seed": options.seed, "percentile-metrics": "ttft,tpot,e2el", "result-filename": result,
    }  # fmt: skip
    named = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    more = ["--skip-chat-template", "--save-result"] + ["--ignore-eos"] * options.ignore_eos
    return [str(options.vllm), "bench", "serve", *(chat if options.chat else plain), *named, *more]


def figures(result: Path, asked: int) -> dict[str, Any]:
    """The figures of a saved result; UserError unless every request was answered."""
    try:
        value = json.loads(result.read_text(encoding="utf-8"))
        answered = value["completed"]
        found = {name: value.get(name) for name in (*FIGURES, _BY_POSITION, _STEPS)}
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise UserError(f"{result} is no result of vllm bench serve ({type(error).__name__}); run it again") from None
    if answered != asked or None in (found[name] for name in FIGURES[:4]):
        raise UserError(f"vllm bench serve got {answered} of {asked} answers; see the server's log and run it again")
    return found


def load(endpoints: dict[str, Endpoint], prompts: Sequence[Prompt], options: argparse.Namespace, folder: Path) -> Rows:
    """A row for each round, tier, number of clients and endpoint."""
    rng, tiers = random.Random(options.seed), dict.fromkeys(p.tier for p in prompts)
    cases = list(itertools.product(tiers, options.concurrency))
    jobs = [(n, *case) for n in range(options.rounds) for case in rng.sample(cases, len(cases))]
    rows = []
    for number, tier, clients in each(jobs, "rounds of tiers"):
        dataset, result = folder / "prompts.jsonl", folder / "result.json"
        lines = [json.dumps({"prompt": p.text}) for p in prompts if p.tier == tier]
        dataset.write_text("\n".join(lines) + "\n", encoding="utf-8")
        for name in rng.sample(list(endpoints), len(endpoints)):
            result.unlink(missing_ok=True)
            run = command(endpoints[name], dataset, result, clients, options)
            try:
                done = subprocess.run(run, capture_output=True, text=True, timeout=_LOAD_SECONDS, check=False)
            except (OSError, subprocess.TimeoutExpired) as error:
                raise UserError(f"{options.vllm} bench serve did not end well ({error}); check --vllm") from None
            if done.returncode:
                reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
                raise UserError(f"vllm bench serve failed: {reason}")
            row = {"round": number, "tier": tier, "clients": clients, "endpoint": name, "source": "wall"}
            rows.append(row | figures(result, options.requests))
    return rows


def summary(rows: Rows, green: bool) -> Rows:
    """Medians over rounds of each tier, number of clients and endpoint.

    If the gate is green, `speedup` is the median over rounds of the baseline's time per token over the endpoint's, and
    `of_best` that of the tokens a second over those of the better of the two that never change their k.
    """

    def case(row: dict[str, Any]) -> tuple[str, int]:
        return row["tier"], row["clients"]

    found = []
    for tier, clients, name in dict.fromkeys((*case(r), r["endpoint"]) for r in sorted(rows, key=case)):
        here = [r for r in rows if case(r) == (tier, clients)]
        own = {r["round"]: r for r in here if r["endpoint"] == name}
        known = {figure: [r[figure] for r in own.values() if r[figure] is not None] for figure in FIGURES}
        row: dict[str, Any] = {"tier": tier, "clients": clients, "endpoint": name, "rounds": len(own)}
        row |= {figure: statistics.median(values) for figure, values in known.items() if values}

        def over(other: str, figure: str, here: Rows = here, own: dict[int, Any] = own) -> float | None:
            ratios = [own[r["round"]][figure] / r[figure] for r in here if r["endpoint"] == other]
            return statistics.median(ratios) if ratios else None

        if green and name != BASELINE:
            row["speedup"] = 1 / (over(BASELINE, "median_tpot_ms") or 1)
            fixed = [over(other, "output_throughput") for other in (BASELINE, FIXED) if other != name]
            row["of_best"] = min(ratio for ratio in fixed if ratio is not None)
        found.append(row)
    return found


def acceptance(rows: Rows, draft: str) -> Rows:
    """Tables by position for `bench.tune --traces`, from the steps that the server counted."""
    names = {r["endpoint"] for r in rows}
    tables, drafting = [], FIXED if FIXED in names else SPECULATIVE
    for tier in dict.fromkeys(r["tier"] for r in rows):
        own = [r for r in rows if (r["tier"], r["endpoint"]) == (tier, drafting) and r.get(_BY_POSITION)]
        if steps := sum(r[_STEPS] for r in own):
            shares = [
                sum(share * r[_STEPS] for share, r in zip(column, own, strict=True)) / steps
                for column in zip(*(r[_BY_POSITION] for r in own), strict=True)
            ]
            tables.append({"name": tier, "draft": draft, "unconditional": shares, "steps": steps})
    return tables


def table(rows: Rows) -> str:
    """A line for each tier, number of clients and endpoint."""
    heads = ("tokens/s", "TTFT ms", "TPOT ms", "E2E ms", "tokens/step", "times the baseline", "times the best fixed k")
    numbers = (*FIGURES, "speedup", "of_best")
    lines = [
        [r["tier"], str(r["clients"]), r["endpoint"], *(f"{r[name]:.2f}" if name in r else "" for name in numbers)]
        for r in rows
    ]
    return markdown(["prompts", "clients", "endpoint", *(f"{head} (wall)" for head in heads)], lines)


def counts(text: str) -> list[int]:
    """Counts with commas between them."""
    return [count()(part) for part in text.split(",")]


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.serving", description=__doc__)
    parser.add_argument("--baseline", default="", help="URL of the server without speculation, without /v1")
    parser.add_argument("--speculative", default="", help="URL of the server with speculation")
    parser.add_argument("--demo", action="store_true", help="start both servers with the demo pair on loopback")
    parser.add_argument("--vllm", type=Path, default=Path("vllm"), help="the command of vLLM (default: vllm)")
    parser.add_argument("--model", default="m", help="name of the model at both servers (default: m)")
    parser.add_argument("--tokenizer", default="", help="for the client; by default that of --model")
    parser.add_argument("--chat", action="store_true", help="chat completions without thinking, not completions")
    parser.add_argument(
        "--prompt-set", default="demo", help="demo, random, article, pod, synthetic, a file; with commas"
    )
    parser.add_argument("--requests", type=count(), default=60, help="of each tier, round and endpoint (default: 60)")
    parser.add_argument("--concurrency", type=counts, default=[4], help="requests at once; with commas (default: 4)")
    parser.add_argument("--rounds", type=count(), default=2, help="each in random order (default: 2)")
    parser.add_argument("--tokens", type=count(2), default=128, help="new tokens of each request (default: 128)")
    parser.add_argument("--gate", type=count(), default=50, help="random requests of the gate (default: 50)")
    parser.add_argument("--seed", type=count(0), default=0, help="of the orders and the gate")
    parser.add_argument("--ignore-eos", action="store_true", help="let every answer run to --tokens")
    parser.add_argument("--draft", default="", help="name of the draft, for the acceptance tables")
    parser.add_argument("--folder", type=Path, default=Path("bundles/serving"), help="demo: bundles and logs")
    parser.add_argument("--port", type=count(), default=8770, help="demo: the first of four")
    parser.add_argument("--out", type=Path, help="write the results here, JSON; acceptance is in `tables`")
    options = parser.parse_args(arguments)
    if options.demo == bool(options.baseline or options.speculative) or bool(options.baseline) != bool(
        options.speculative
    ):
        raise UserError("two servers are compared; give --baseline URL and --speculative URL, or --demo alone")
    return options


def demo_servers(options: argparse.Namespace, stack: ExitStack, names: Sequence[str]) -> dict[str, Endpoint]:
    """Servers of the demo pair by these names, on ports from `options.port` on."""
    found, vllm = {}, vllm_command(options.vllm)
    always, never = (["--additional-config", json.dumps({"k": k})] for k in (_DEMO_K, 0))
    stock = ["--dtype", "float32", "--max-model-len", str(_DEMO_LENGTH), "--max-num-seqs", str(_DEMO_BATCH),
             "--gpu-memory-utilization", "0.3"]  # fmt: skip
    ways: tuple[tuple[str, int | None, list[str]], ...]
    ways = ((BASELINE, 0, []), (SPECULATIVE, _DEMO_K, []), (FIXED, _DEMO_K, always), (NEVER, _DEMO_K, never),
            (STOCK, None, stock))  # fmt: skip
    for number, (name, k, more) in enumerate(way for way in ways if way[0] in names):
        model = demo.TARGET
        if k is not None:
            model = demo.bundle(options.folder / f"k{k}", "chain", k, batch=_DEMO_BATCH, max_len=_DEMO_LENGTH)
        server = Server(vllm, options.port + number, [str(model), *more], own_engine=k is None)
        found[name] = Endpoint(stack.enter_context(serving(server, options.folder / f"{name}.log")), "m")
    return found


def main(arguments: list[str]) -> None:
    """Gate, load, table; exit 1 on a red gate."""
    options, made_by = _options(arguments), header("wall")
    prompts = prompt_sets(options.prompt_set, options.seed)
    with ExitStack() as stack:
        urls = {BASELINE: options.baseline, SPECULATIVE: options.speculative}
        endpoints = {name: Endpoint(url.rstrip("/").removesuffix("/v1"), options.model) for name, url in urls.items()}
        if options.demo:
            options.tokenizer, options.draft, options.ignore_eos = str(demo.TARGET), "demo/draft", True
            endpoints = demo_servers(options, stack, (BASELINE, SPECULATIVE, FIXED, STOCK))
        asked = gate.questions(options.gate, options.seed)
        gated = [
            gate.of_endpoints(endpoints[BASELINE], endpoint, asked, min(64, options.tokens))
            for name, endpoint in endpoints.items()
            if name not in (BASELINE, STOCK)
        ]
        runs = load(endpoints, prompts, options, Path(stack.enter_context(tempfile.TemporaryDirectory())))
    green = not any(found["differences"] for found in gated)
    rows = summary(runs, green)
    if options.out:
        about = made_by | {"prompts": options.prompt_set, "requests": options.requests, "tokens": options.tokens}
        about |= {"concurrency": options.concurrency, "gate": gated, "rows": rows}
        write_result(options.out, about | {"tables": acceptance(runs, options.draft)})
    verdict = "token-identical" if green else "NOT identical: no speedup is shown"
    print(f"{said(made_by)}\n\nGate: {options.gate} random requests, {verdict}.\n\n{table(rows)}")
    if not green:
        print(f"\n{gate.table(gated)}")
        raise SystemExit(1)


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
