"""`python -m bench.serving`: throughput and latency of servers with and without speculation under load.

`vllm bench serve` sends each class of prompts to one server after the other, in random order in every round; every
output has --tokens tokens. `--demo` starts three servers on the CPU, fp32, one thread each: the demo target, the demo
pair, and stock vLLM on the target; their CPU time per token is measured too. First the gate (`bench.gate`) sends random
requests to our two servers: if an output differs, no ratio is printed and the exit status is 1.
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
from bench.demo import Prompt
from bench.options import count, input_file, output_file, server_url, vllm_command
from bench.provenance import header, sentence, write_result
from bench.serving.servers import Endpoint, serving
from bench.table import markdown
from model.errors import UserError, command_line, run_cli
from model.progress import each

BASELINE, SPECULATIVE, STOCK = "baseline", "speculative", "stock vLLM"
_DRAFTER, _K, _BATCH, _MAX_LEN, _PORT, _LOAD_S, _SEED = "chain", 7, 4, 512, 8770, 3600, 0
# fields of a saved result of `vllm bench serve`: vllm/benchmarks/serve.py, benchmark() and process_one_metric()
_TIMES = ("ttft", "tpot", "itl", "e2el")
_FIGURES = ("output_throughput", *(f"{value}_{time}_ms" for time in _TIMES for value in ("median", "p99")))
_LENGTH = "spec_decode_acceptance_length"
_STEPS = "spec_decode_num_drafts"
_SHARES = "spec_decode_per_position_acceptance_rates"
Rows = list[dict[str, Any]]


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    about = "Measure throughput and latency of servers with and without speculation; exit 1 if their tokens differ."
    parser = command_line("bench.serving", about, "--demo --vllm .venv-serve/bin/vllm --requests 24")
    servers = parser.add_argument_group("servers: two addresses, or the demo")
    servers.add_argument("--baseline", type=server_url, help="address of a server without speculation")
    servers.add_argument("--speculative", type=server_url, help="address of a server with speculation")
    servers.add_argument("--model", default="m", help="name of the model at both servers (default: m)")
    servers.add_argument("--vllm", type=vllm_command, required=True, help="the vllm command of an environment")
    demo_group = parser.add_argument_group("servers of the demo pair")
    demo_group.add_argument("--demo", action="store_true", help="start servers of the demo pair on this CPU")
    demo_group.add_argument("--folder", type=Path, default=Path("bundles/serving"), help="folder of bundles and logs")
    load = parser.add_argument_group("load")
    load.add_argument("--prompts", type=input_file, help="file with one prompt per line (default: the demo's prompts)")
    load.add_argument("--tokenizer", default="", help="tokenizer of the client (default: that of --model)")
    load.add_argument("--requests", type=count(), default=60, help="per class, round and server (default: 60)")
    load.add_argument("--clients", type=count(), nargs="+", default=[1, 4], help="concurrent requests (default: 1 4)")
    load.add_argument("--rounds", type=count(), default=2, help="rounds in random order (default: 2)")
    load.add_argument("--tokens", type=count(2), default=128, help="new tokens of each request (default: 128)")
    load.add_argument("--gate", type=count(), default=50, help="random requests of the gate (default: 50)")
    load.add_argument("--out", type=output_file, help="write the results to this JSON file, for bench.tune too")
    options = parser.parse_args(arguments)
    urls = [bool(options.baseline), bool(options.speculative)]
    if urls != [not options.demo] * 2:
        raise UserError("two servers are compared; give --baseline URL and --speculative URL, or --demo without them")
    if options.demo:
        options.tokenizer = str(demo.TARGET)
        python = options.vllm.parent / "python"
        test = "import importlib.util as u; assert all(map(u.find_spec, ('vllm', 'pandas')))"
        if not python.is_file() or subprocess.run([python, "-c", test], check=False, capture_output=True).returncode:
            raise UserError(f"the Python next to {options.vllm} lacks vLLM or pandas; run make serve-report")
    return options


def demo_servers(options: argparse.Namespace, stack: ExitStack) -> dict[str, Endpoint]:
    """Start servers of the demo target, of target and drafter, and of stock vLLM, on ports from `_PORT` on."""
    sizes = {"batch": _BATCH, "max_len": _MAX_LEN}
    pair = demo.bundle(options.folder / _DRAFTER, _DRAFTER, _K, **sizes)
    target = demo.bundle(options.folder / "target", "none", 0, **sizes)
    stock = ["--dtype", "float32", "--max-model-len", str(_MAX_LEN), "--max-num-seqs", str(_BATCH),
             "--gpu-memory-utilization", "0.3"]  # fmt: skip
    servers = {BASELINE: ([str(target)], {}), SPECULATIVE: ([str(pair)], {}),
               STOCK: ([str(demo.TARGET), *stock], {"VLLM_TARGET_DEVICE": "cpu"})}  # fmt: skip
    return {
        name: stack.enter_context(
            serving(options.vllm, _PORT + number, arguments, options.folder / f"{name}.log", **environment)
        )
        for number, (name, (arguments, environment)) in enumerate(servers.items())
    }


def client(endpoint: Endpoint, dataset: Path, result: Path, clients: int, options: argparse.Namespace) -> list[str]:
    """The command of `vllm bench serve` over a file of prompts, greedy, with `clients` concurrent requests."""
    flags = {
        "backend": "openai", "endpoint": "/v1/completions", "base-url": endpoint.address, "model": endpoint.model,
        "tokenizer": options.tokenizer or endpoint.model, "dataset-name": "custom", "dataset-path": dataset,
        "custom-output-len": options.tokens, "num-prompts": options.requests, "max-concurrency": clients,
        "num-warmups": clients, "temperature": 0, "seed": _SEED, "percentile-metrics": ",".join(_TIMES),
        "result-filename": result,
    }  # fmt: skip
    named = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    return [str(options.vllm), "bench", "serve", *named, "--skip-chat-template", "--save-result", "--ignore-eos"]


def figures(result: Path, requests: int) -> dict[str, Any]:
    """The figures of a saved result; UserError if a request has no answer."""
    try:
        value = json.loads(result.read_text(encoding="utf-8"))
        answered, row = value["completed"], {name: value.get(name) for name in (*_FIGURES, _LENGTH, _STEPS, _SHARES)}
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise UserError(f"{result} is no result of vllm bench serve ({type(error).__name__}); run it again") from None
    if answered != requests or None in (row[name] for name in _FIGURES):
        raise UserError(f"vllm bench serve got {answered} of {requests} answers; see the server's log and run it again")
    return row


def _run(endpoint: Endpoint, dataset: Path, result: Path, clients: int, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of one run of the client, and the CPU time per token of a server that was started here."""
    before = (endpoint.cpu_seconds(), endpoint.generated_tokens()) if endpoint.pid else (0.0, 0.0)
    result.unlink(missing_ok=True)
    run = client(endpoint, dataset, result, clients, options)
    try:
        done = subprocess.run(run, capture_output=True, text=True, timeout=_LOAD_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{options.vllm} bench serve failed ({error}); check --vllm") from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UserError(f"vllm bench serve failed: {reason}")
    row = figures(result, options.requests)
    if endpoint.pid:
        seconds, tokens = endpoint.cpu_seconds() - before[0], endpoint.generated_tokens() - before[1]
        row["cpu_ms_per_token"] = 1e3 * seconds / tokens
    return row


def load(endpoints: dict[str, Endpoint], prompts: Sequence[Prompt], options: argparse.Namespace, folder: Path) -> Rows:
    """One row for each round, class of prompts, number of clients and server."""
    rng, rows = random.Random(_SEED), Rows()
    cases = list(itertools.product(dict.fromkeys(p.entropy for p in prompts), options.clients))
    jobs = [(n, *case) for n in range(options.rounds) for case in rng.sample(cases, len(cases))]
    for number, entropy, clients in each(jobs, "rounds of prompts"):
        dataset = folder / "prompts.jsonl"
        lines = [json.dumps({"prompt": p.text}) for p in prompts if p.entropy == entropy]
        dataset.write_text("\n".join(lines) + "\n", encoding="utf-8")
        for name in rng.sample(list(endpoints), len(endpoints)):
            row = {"round": number, "prompts": entropy, "clients": clients, "server": name, "source": "wall"}
            rows.append(row | _run(endpoints[name], dataset, folder / "result.json", clients, options))
    return rows


def summary(rows: Rows, identical: bool) -> Rows:
    """Medians over rounds of each class of prompts, number of clients and server.

    `times` are medians over rounds of the throughput relative to the baseline and to stock vLLM, if the outputs of our
    servers are identical.
    """
    by_case = {(r["prompts"], r["clients"], r["server"], r["round"]): r for r in rows}
    medians = Rows()
    for prompts, clients, name in sorted({key[:3] for key in by_case}):
        runs = [r for key, r in by_case.items() if key[:3] == (prompts, clients, name)]
        row: dict[str, Any] = {"prompts": prompts, "clients": clients, "server": name, "rounds": len(runs)}
        for figure in (*_FIGURES, _LENGTH, "cpu_ms_per_token"):
            if values := [r[figure] for r in runs if r.get(figure) is not None]:
                row[figure] = round(statistics.median(values), 4)
        others = [other for other in (BASELINE, STOCK) if other != name] if identical else []
        for other in others:
            pairs = [(r, by_case.get((prompts, clients, other, r["round"]))) for r in runs]
            ratios = [r["output_throughput"] / o["output_throughput"] for r, o in pairs if o]
            if ratios:
                row[f"times {other}"] = round(statistics.median(ratios), 4)
        medians.append(row)
    return medians


def accepted(rows: Rows, drafter: str) -> Rows:
    """Tables for `bench.tune --traces`, from the steps that the speculative server counted."""
    tables = Rows()
    for prompts in dict.fromkeys(r["prompts"] for r in rows):
        runs = [r for r in rows if (r["prompts"], r["server"]) == (prompts, SPECULATIVE) and r.get(_SHARES)]
        if steps := sum(r[_STEPS] for r in runs):
            columns = zip(*([share * r[_STEPS] for share in r[_SHARES]] for r in runs), strict=True)
            shares = [round(sum(column) / steps, 4) for column in columns]
            tables.append({"name": prompts, "draft": drafter, "steps": steps, "unconditional": shares})
    return tables


def table(rows: Rows) -> str:
    """The rows as markdown."""
    figures_of = {"output_throughput": "tokens/s (wall)", "cpu_ms_per_token": "CPU ms a token",
                  "median_ttft_ms": "TTFT ms (wall)", "median_tpot_ms": "TPOT ms (wall)",
                  _LENGTH: "tokens per step", f"times {BASELINE}": f"tokens/s, {BASELINE} = 1",
                  f"times {STOCK}": f"tokens/s, {STOCK} = 1"}  # fmt: skip
    return markdown(["prompts", "clients", "server", *figures_of.values()], [
        [r["prompts"], str(r["clients"]), r["server"], *(f"{r[f]:.2f}" if f in r else "" for f in figures_of)]
        for r in rows
    ])  # fmt: skip


def main(arguments: list[str]) -> None:
    """Gate, load, table; exit 1 if the gate sees a difference."""
    options, made_by = _options(arguments), header("wall")
    prompts, requests = demo.prompts_of(options.prompts), gate.questions(options.gate, _SEED)
    with ExitStack() as stack:
        if options.demo:
            endpoints = demo_servers(options, stack)
        else:
            urls = {BASELINE: options.baseline, SPECULATIVE: options.speculative}
            endpoints = {name: Endpoint(url, options.model) for name, url in urls.items()}
        gated = gate.compare_endpoints(endpoints[BASELINE], endpoints[SPECULATIVE], requests, min(64, options.tokens))
        runs = load(endpoints, prompts, options, Path(stack.enter_context(tempfile.TemporaryDirectory())))
    identical = not gated["differences"]
    rows = summary(runs, identical)
    if options.out:
        about = made_by | {"requests": options.requests, "tokens": options.tokens, "gate": gated, "rows": rows}
        write_result(options.out, about | {"tables": accepted(runs, _DRAFTER if options.demo else "")})
    verdict = "token-identical" if identical else "NOT identical: no ratio is shown"
    print(f"{sentence(made_by)}\n\nGate: {options.gate} random requests, {verdict}.\n\n{table(rows)}")
    if not identical:
        print(f"\n{gate.text(gated)}")
        raise SystemExit(1)


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
