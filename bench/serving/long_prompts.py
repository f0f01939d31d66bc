"""`python -m bench.serving.long_prompts`: the first id of a long prompt, and of those that wait beside it.

Two servers on loopback with one thread each, a bundle of the demo pair and vLLM's own engine for CPUs on the target in
fp32, both with prefix caching and chunked prefill as vLLM has them. The pair's configuration says 1024 positions; here
it says as many as `--max-len`, which changes no cost. Every round sends random prompts to one server after the other,
in random order: one that neither has seen (cold), the same again (repeated), one whose first 90 % it has seen, one
beside three requests whose answers run, and those of four clients, each of which sends one after the other: with
answers from half to one and a half times as long as the others, and of one length, with which a server without drafts
ends all four in one step and computes their next prompts in one. Ratios are taken within a round, those of four clients
of the medians of their requests; beside each median of ratios is the interval that holds such a median 19 times of 20.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from bench import demo
from bench.demo import DEMO, count
from bench.provenance import header, said, write_result
from bench.serving.prompts import uneven
from bench.serving.servers import Endpoint, Server, serving, vllm_command
from bench.table import markdown
from bench.wall.harness import interval, within
from model.errors import UserError, run_cli
from model.progress import each

OURS, STOCK = "ours", "stock vLLM"
COLD, REPEATED, MOST, BESIDE = "cold", "repeated", "repeated 90 %", "beside three requests"
CLIENTS, IN_STEP = "four clients", "four clients, equal answers"
_K, _BATCH, _ANSWER, _RUNNING = 7, 4, 32, 3
# ids of an answer that runs beside a prompt, and of its own prompt
_LONG_ANSWER, _SHORT_PROMPT, _TIMEOUT = 1000, 30, 600
# pieces of each answer before the prompt beside them is sent
_BEGUN = 3
# clients at once, and the requests of each
_AT_ONCE, _EACH = 4, 4
Rows = list[dict[str, Any]]


class Times(NamedTuple):
    """Of one answer: when it was asked for and when each piece came, in seconds of one clock."""

    asked: float
    pieces: list[float]

    @property
    def first_ms(self) -> float:
        return 1e3 * (self.pieces[0] - self.asked)

    def gaps_ms(self, begin: float, end: float) -> list[float]:
        """Between two pieces, as far as they reach into this time."""
        pairs = zip(self.pieces, self.pieces[1:], strict=False)
        return [1e3 * (after - before) for before, after in pairs if after > begin and before < end]


def answer(endpoint: Endpoint, ids: Sequence[int], pieces: list[float], tokens: int) -> Times:
    """Stream an answer of so many ids, greedy; `pieces` grows while it runs."""
    body = {"model": endpoint.model, "prompt": list(ids), "max_tokens": tokens, "temperature": 0, "stream": True,
            "ignore_eos": True}  # fmt: skip
    request = urllib.request.Request(
        f"{endpoint.address}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    asked = time.perf_counter()
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as response:
            pieces += (time.perf_counter() for line in response if line.startswith(b"data: {"))
    except OSError as error:
        raise UserError(f"{endpoint.address} gave no answer ({error}); see the server's log") from None
    if not pieces:
        raise UserError(f"{endpoint.address} gave an empty answer; see the server's log")
    return Times(asked, pieces)


def beside(endpoint: Endpoint, ids: Sequence[int], rng: random.Random) -> dict[str, float]:
    """The prompt's first id while three answers run, and the longest gap in these until then and their p95."""
    running, prompts = [list[float]() for _ in range(_RUNNING)], [_random(rng, _SHORT_PROMPT) for _ in range(_RUNNING)]
    with ThreadPoolExecutor(_RUNNING) as pool:
        asks = [pool.submit(answer, endpoint, *of, _LONG_ANSWER) for of in zip(prompts, running, strict=True)]
        while any(len(pieces) < _BEGUN for pieces in running) and not any(ask.done() for ask in asks):
            time.sleep(0.01)
        times = answer(endpoint, ids, [], 1)
        # raises what has ended one of them
        beside_it = [ask.result() for ask in asks]
    gaps = sorted(gap for other in beside_it for gap in other.gaps_ms(times.asked, times.pieces[0]))
    if not gaps:
        raise UserError("the answers beside a prompt ended before it began; lower --prompt or run it again")
    return {"first_ms": times.first_ms, "gap_ms": gaps[-1], "gap_p95_ms": gaps[int(0.95 * (len(gaps) - 1))]}


def alone(endpoint: Endpoint, ids: Sequence[int], tokens: int = _ANSWER) -> dict[str, float]:
    """The first id, and the wall time of a short answer."""
    times = answer(endpoint, ids, [], tokens)
    return {"first_ms": times.first_ms, "all_ms": 1e3 * (times.pieces[-1] - times.asked)}


def at_once(endpoint: Endpoint, ids: Sequence[int], rng: random.Random, equal: bool = False) -> dict[str, float]:
    """The medians of what clients see that send random prompts of this length, each as soon as it has an answer, and
    the time of all.

    Answers differ in length unless they are to be `equal`.
    """

    def ask() -> tuple[list[int], int]:
        return _random(rng, len(ids)), _ANSWER if equal else uneven(rng, _ANSWER)

    asks, begin = [[ask() for _ in range(_EACH)] for _ in range(_AT_ONCE)], time.perf_counter()
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        of_clients = pool.map(lambda own: [alone(endpoint, *asked) for asked in own], asks)
        answers = [answer for own in of_clients for answer in own]
    medians = {name: statistics.median(answer[name] for answer in answers) for name in answers[0]}
    return medians | {"round_ms": 1e3 * (time.perf_counter() - begin)}


def cases(prompts: Sequence[int], rng: random.Random) -> Iterator[tuple[str, int, list[int]]]:
    """Name, length and ids of each prompt of a round, in the order in which they are sent."""
    for length in prompts:
        ids = _random(rng, length)
        kept = length * 9 // 10
        yield COLD, length, ids
        yield REPEATED, length, ids
        yield MOST, length, ids[:kept] + _random(rng, length - kept)
        yield BESIDE, length, _random(rng, length)
        yield CLIENTS, length, ids
        yield IN_STEP, length, ids


def measure(endpoints: dict[str, Endpoint], prompts: Sequence[int], rounds: int, seed: int) -> Rows:
    """A row for each round, case and endpoint."""
    in_company: dict[str, Callable[[Endpoint, Sequence[int], random.Random], dict[str, float]]] = {
        BESIDE: beside, CLIENTS: at_once, IN_STEP: functools.partial(at_once, equal=True)
    }  # fmt: skip
    rng, rows = random.Random(seed), []
    for number in each(range(rounds + 1), "rounds"):
        for name, length, ids in cases(prompts, rng):
            short = random.Random(rng.random())
            state = short.getstate()
            for endpoint in rng.sample(list(endpoints), len(endpoints)):
                short.setstate(state)
                at, more = endpoints[endpoint], in_company.get(name)
                found = more(at, ids, short) if more else alone(at, ids)
                rows.append({"round": number, "case": name, "prompt": length, "endpoint": endpoint} | found)
    # the first round warms up
    return [row for row in rows if row["round"]]


def summary(rows: Rows) -> Rows:
    """Medians of each case and endpoint; `times` is the median over rounds of stock's time over ours, and `between` the
    interval that it lies in."""
    found = []
    for case, length in dict.fromkeys((r["case"], r["prompt"]) for r in rows):
        here = [r for r in rows if (r["case"], r["prompt"]) == (case, length)]
        stock = {r["round"]: r for r in here if r["endpoint"] == STOCK}
        for endpoint in dict.fromkeys(r["endpoint"] for r in here):
            own = [r for r in here if r["endpoint"] == endpoint]
            figures = [name for name in own[0] if name.endswith("_ms")]
            row = {"case": case, "prompt": length, "endpoint": endpoint, "rounds": len(own), "source": "wall"}
            row |= {name: round(statistics.median(r[name] for r in own), 2) for name in figures}
            if endpoint != STOCK:
                ratios = {name: [stock[r["round"]][name] / r[name] for r in own] for name in figures}
                row["times"] = {name: round(statistics.median(values), 2) for name, values in ratios.items()}
                row["between"] = {name: interval(values) for name, values in ratios.items()}
            found.append(row)
    return found


def table(rows: Rows) -> str:
    """A line for each case and endpoint."""
    names = {"first_ms": "first id ms", "all_ms": f"{_ANSWER} ids ms", "round_ms": "all answers ms",
             "gap_ms": "longest gap ms", "gap_p95_ms": "p95 gap ms"}  # fmt: skip
    lines = []
    for r in rows:
        cells = [f"{r[name]:.1f}" if name in r else "" for name in names]
        times = r.get("times", {})
        cells += [within(times[name], r["between"][name]) if name in times else "" for name in names]
        lines.append([r["case"], str(r["prompt"]), r["endpoint"], *cells])
    heads = [text.format(head) for text in ("{} (wall)", "stock / ours, {} (between)") for head in names.values()]
    return markdown(["case", "prompt", "endpoint", *heads], lines)


def _random(rng: random.Random, length: int) -> list[int]:
    return rng.choices(range(10, demo.tokenizer().get_vocab_size()), k=length)


def _longer(model: Path, out: Path, length: int) -> Path:
    """A copy of a demo model whose configuration says so many positions."""
    copy = Path(shutil.copytree(model, out / model.name))
    config = json.loads((copy / "config.json").read_text(encoding="utf-8"))
    (copy / "config.json").write_text(json.dumps(config | {"max_position_embeddings": length}), encoding="utf-8")
    return copy


def _servers(options: argparse.Namespace, stack: ExitStack) -> dict[str, Endpoint]:
    folder, vllm = Path(stack.enter_context(tempfile.TemporaryDirectory())), vllm_command(options.vllm)
    target, draft = (_longer(DEMO / name, folder, options.max_len) for name in ("target", "draft"))
    made = demo.bundle(folder / "bundle", "chain", _K, str(draft), target=str(target), batch=_BATCH,
                       max_len=options.max_len)  # fmt: skip
    stock = [str(target), "--dtype", "float32", "--max-model-len", str(options.max_len), "--max-num-seqs", str(_BATCH),
             "--gpu-memory-utilization", "0.3"]  # fmt: skip
    found = {}
    for name, port, arguments in ((OURS, options.port, [str(made)]), (STOCK, options.port + 1, stock)):
        server = Server(vllm, port, arguments, own_engine=name == STOCK, caching=True)
        found[name] = Endpoint(stack.enter_context(serving(server, options.logs / f"{name}.log")), "m")
    return found


def main(arguments: list[str]) -> None:
    """Serve, measure, print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.serving.long_prompts", description=__doc__)
    parser.add_argument("--vllm", type=Path, default=Path(".venv-serve/bin/vllm"), help="the command of vLLM")
    parser.add_argument("--max-len", type=count(256), default=4096, help="of a sequence (default: 4096)")
    parser.add_argument("--prompt", type=count(16), nargs="+", default=[30, 500, 3500], help="ids, rising")
    parser.add_argument("--rounds", type=count(), default=5, help="behind one that warms up (default: 5)")
    parser.add_argument("--seed", type=count(0), default=0, help="of prompts and orders")
    parser.add_argument("--port", type=count(), default=8790, help="the first of two")
    parser.add_argument("--logs", type=Path, default=Path("bundles/serving"), help="folder of the servers' logs")
    parser.add_argument("--out", type=Path, help="write the results here")
    options, made_by = parser.parse_args(arguments), header("wall")
    least = max(max(options.prompt) + 3 * _ANSWER // 2, _SHORT_PROMPT + _LONG_ANSWER)
    if least > options.max_len:
        raise UserError(f"--max-len is {options.max_len}; these prompts and their answers need {least}")
    with ExitStack() as stack:
        rows = summary(measure(_servers(options, stack), options.prompt, options.rounds, options.seed))
    if options.out:
        write_result(options.out, made_by | {"max_len": options.max_len, "rows": rows})
    print(f"{said(made_by)}\n\n{table(rows)}")


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
