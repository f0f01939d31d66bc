"""`python -m bench.serving.bursts`: does the server choose the right k? Short bursts, one server after the other.

Four servers of the demo pair: the target alone, a bundle without a draft; and one bundle held at k 0, held at 7 drafts,
and choosing by itself. A round sends the same requests to each, in random order, seconds each, so that ratios within a
round are free of what slows the machine for longer. At the end of a burst slots stay empty, longer with drafts, since
requests then end apart: few requests of each client judge that end, many the steps before it. Requests of equal lengths
also end together at every turn of a server without drafts, if there are as many clients as slots; with `--uneven` they
have from half to one and a half times the tokens, as those of people differ. `times the best fixed k` is the median
over rounds of the tokens a second over those of the better one of the two that are held, which is better by its own
median; p20 and p80 are beside it.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.demo import count
from bench.provenance import header, said, write_result
from bench.serving.__main__ import BASELINE, FIXED, NEVER, SPECULATIVE, counts, demo_servers
from bench.serving.prompts import Prompt, prompt_sets, uneven
from bench.serving.servers import Endpoint
from bench.table import markdown
from bench.wall.harness import interval, spread, within
from model.errors import run_cli
from model.progress import each
from trnspec.engine.request import Params

Rows = list[dict[str, Any]]
SERVERS = (BASELINE, NEVER, FIXED, SPECULATIVE)


def burst(endpoint: Endpoint, prompts: Sequence[Prompt], clients: int, tokens: Sequence[int]) -> float:
    """New tokens a second (wall) of these prompts, each with its number of tokens, so many at once, greedy."""
    begin = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        answers = list(
            pool.map(lambda p, count: endpoint.complete(p.text, Params(), count, ignore_eos=True), prompts, tokens)
        )
    return sum(map(len, answers)) / (time.perf_counter() - begin)


def measure(endpoints: dict[str, Endpoint], options: argparse.Namespace) -> Rows:
    """A row for each tier, number of clients and round: tokens a second by endpoint."""
    rng, prompts = random.Random(options.seed), prompt_sets(options.prompt_set, options.seed)
    cases = list(itertools.product(dict.fromkeys(p.tier for p in prompts), options.concurrency))
    rows = []
    for (tier, clients), number in each(list(itertools.product(cases, range(options.rounds + 1))), "rounds"):
        own = [p for p in prompts if p.tier == tier]
        asked = rng.choices(own, k=options.each * clients)
        tokens = [uneven(rng, options.tokens) if options.uneven else options.tokens for _ in asked]
        found = {
            name: burst(endpoints[name], asked, clients, tokens) for name in rng.sample(list(endpoints), len(endpoints))
        }
        # a case's first round warms up
        if number:
            rows.append({"tier": tier, "clients": clients, "round": number, "tokens_s": found})
    return rows


def summary(rows: Rows) -> Rows:
    """Of each tier and number of clients: median tokens a second, and of the ratios within a round p20, p50, p80 and
    between which values their median is."""
    found = []
    for tier, clients in dict.fromkeys((r["tier"], r["clients"]) for r in rows):
        own = [r["tokens_s"] for r in rows if (r["tier"], r["clients"]) == (tier, clients)]
        medians = {name: round(statistics.median(r[name] for r in own), 1) for name in own[0]}
        best = max((NEVER, FIXED), key=lambda name: medians[name])
        each_round = {other: [r[SPECULATIVE] / r[other] for r in own] for other in SERVERS[:-1]}
        ratios = {other: spread(values) for other, values in each_round.items()}
        between = {other: interval(values) for other, values in each_round.items()}
        row = {"tier": tier, "clients": clients, "rounds": len(own), "source": "wall", "tokens_s": medians}
        found.append(row | {"times": ratios, "between": between, "best": best, "of_best": ratios[best]})
    return found


def table(rows: Rows) -> str:
    """A line for each tier and number of clients."""
    heads = [f"{name}, tokens/s (wall)" for name in SERVERS]
    lines = []
    for r in rows:
        cells = [f"{r['tokens_s'][name]:.0f}" for name in SERVERS]
        cells += [within(r["times"][other][1], r["between"][other]) for other in (BASELINE, r["best"])]
        lines.append([r["tier"], str(r["clients"]), *cells])
    return markdown(
        ["prompts", "clients", *heads, "times the baseline (between)", "times the best fixed k (between)"], lines
    )


def main(arguments: list[str]) -> None:
    """Serve, measure, print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.serving.bursts", description=__doc__)
    parser.add_argument("--vllm", type=Path, default=Path(".venv-serve/bin/vllm"), help="the command of vLLM")
    parser.add_argument("--prompt-set", default="demo,random", help="as bench.serving (default: demo,random)")
    parser.add_argument("--concurrency", type=counts, default=[1, 4, 16], help="requests at once (default: 1,4,16)")
    parser.add_argument("--rounds", type=count(), default=20, help="behind one that warms up (default: 20)")
    parser.add_argument("--each", type=count(), default=4, help="requests of each client in a burst (default: 4)")
    parser.add_argument("--tokens", type=count(2), default=128, help="new tokens of each request (default: 128)")
    parser.add_argument("--uneven", action="store_true", help="from half to one and a half times as many, drawn")
    parser.add_argument("--seed", type=count(0), default=0, help="of prompts and orders")
    parser.add_argument("--folder", type=Path, default=Path("bundles/serving"), help="bundles and logs")
    parser.add_argument("--port", type=count(), default=8780, help="the first of four")
    parser.add_argument("--out", type=Path, help="write the results here")
    options, made_by = parser.parse_args(arguments), header("wall")
    with ExitStack() as stack:
        endpoints = demo_servers(options, stack, SERVERS)
        rows = summary(measure(endpoints, options))
    if options.out:
        write_result(
            options.out,
            made_by | {"tokens": options.tokens, "uneven": options.uneven, "each": options.each, "rows": rows},
        )
    print(f"{said(made_by)}\n\n{table(rows)}")


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
