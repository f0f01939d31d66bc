"""`python -m bench.gate`: compares the tokens of random requests with and without speculation.

`--bundle DIR` serves the requests from one bundle, with and without speculation; `--baseline URL --speculative URL`
sends them to two servers. Requests are greedy and sampled, with and without filters, and some limit their drafts. The
exit status is 1 if a token differs.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.demo import prompts
from bench.options import count, output_file, server_url
from bench.provenance import header, sentence, write_result
from bench.serving.servers import Endpoint
from bench.table import markdown
from model.errors import UserError, command_line, run_cli
from model.progress import each
from trnspec.engine.request import Params
from trnspec.llm import LLM

# values of a random request: temperature, top-k, top-p, min-p, limit of drafts
_TEMPERATURES, _TOP_K, _TOP_P, _MIN_P = (0.0, 0.0, 0.6, 1.0), (0, 0, 40), (1.0, 0.95), (0.0, 0.0, 0.05)
_K_LIMITS = (None, None, None, None, 0, 1)


class Question(NamedTuple):
    """A random request, and the limit of drafts per step, if it has one."""

    text: str
    params: Params
    k_limit: int | None


class Difference(NamedTuple):
    """The first difference of two answers: the next ids of both."""

    question: int
    at: int
    baseline: Sequence[Any]
    speculative: Sequence[Any]


def questions(number: int, seed: int = 16) -> list[Question]:
    """Random requests over the demo's prompts: one prompt, or three prompts and the beginning of their repetition."""
    rng, texts, requests = random.Random(seed), [p.text for p in prompts()], []
    for _ in range(number):
        text = rng.choice(texts)
        if rng.random() < 1 / 3:
            lines = "\n".join(rng.sample(texts, 3)).strip()
            text = f"{lines}\n\n{lines[: rng.randint(20, 60)]}"
        values = rng.choice(_TEMPERATURES), rng.choice(_TOP_K), rng.choice(_TOP_P), rng.choice(_MIN_P)
        requests.append(Question(text, Params(*values, rng.getrandbits(63)), rng.choice(_K_LIMITS)))
    return requests


def differences(baseline: Sequence[Sequence[Any]], speculative: Sequence[Sequence[Any]]) -> list[Difference]:
    """The first difference of each pair of answers that differ."""
    firsts = []
    for number, (a, b) in enumerate(zip(baseline, speculative, strict=True)):
        if list(a) != list(b):
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            firsts.append(Difference(number, at, a[at : at + 8], b[at : at + 8]))
    return firsts


def compare_bundle(folder: Path, requests: Sequence[Question], tokens: int) -> dict[str, Any]:
    """A row: a bundle with and without speculation; requests of one limit are served together."""
    with LLM(folder) as llm:
        spec, ids = llm.bundle.spec, dict[tuple[bool, int], tuple[int, ...]]()
        if not spec.k:
            raise UserError(f"{folder} is a target without a drafter (k 0); give the bundle of a pair")
        room, steps, emitted = max(1, spec.max_len - spec.k - tokens), 0, 0
        for limit, speculation in each([(q, s) for q in (None, 0, 1) for s in (False, True)], "sets of requests"):
            numbers = [n for n, q in enumerate(requests) if q.k_limit == limit]
            texts = [llm.tokenizer.encode(requests[n].text).ids[:room] for n in numbers]
            options: dict[str, Any] = {"max_new_tokens": tokens, "speculation": speculation}
            if speculation and limit is not None:
                options["k_limit"] = limit
            outputs = llm.generate(texts, [requests[n].params for n in numbers], **options)
            ids |= {(speculation, n): output.ids for n, output in zip(numbers, outputs, strict=True)}
            if speculation and limit is None:
                steps, emitted = sum(o.steps for o in outputs), sum(len(o.ids) - 1 for o in outputs)
    about = {"drafter": spec.drafter, "k": spec.k, "batch": spec.batch, "dtype": spec.dtype}
    return about | {"tokens_per_step": round(emitted / max(1, steps), 3)} | _row(ids, len(requests))


def compare_endpoints(
    baseline: Endpoint, speculative: Endpoint, requests: Sequence[Question], tokens: int
) -> dict[str, Any]:
    """A row: two servers, in random order for each request; characters are compared if a server returns no ids."""
    rng, answers = random.Random(0), dict[tuple[bool, int], list[Any]]()
    for number, question in each(list(enumerate(requests)), "gate"):
        for way, server in rng.sample([(False, baseline), (True, speculative)], 2):
            answers[way, number] = server.complete(question.text, question.params, tokens)
    return {"drafter": speculative.address} | _row(answers, len(requests))


def _row(answers: Mapping[tuple[bool, int], Sequence[Any]], requests: int) -> dict[str, Any]:
    baseline, speculative = ([answers[way, n] for n in range(requests)] for way in (False, True))
    rows = [d._asdict() for d in differences(baseline, speculative)]
    return {"requests": requests, "tokens": sum(map(len, baseline)), "differences": rows}


def text(row: dict[str, Any]) -> str:
    """The counts and the first differences as text."""
    counts = row | {"differences": len(row["differences"])}
    lines = [markdown(list(counts), [list(map(str, counts.values()))])]
    for d in row["differences"][:10]:
        lines.append(f"request {d['question']} differs at token {d['at']}: {d['baseline']}, {d['speculative']}")
    return "\n".join(lines)


def _options(arguments: list[str]) -> argparse.Namespace:
    about = "Compare the tokens of random requests with and without speculation; exit 1 if one differs."
    parser = command_line("bench.gate", about, "--bundle bundles/demo")
    servers = parser.add_argument_group("what to compare: a bundle, or two servers")
    servers.add_argument("--bundle", type=Path, help="bundle of a target and a drafter")
    servers.add_argument("--baseline", type=server_url, help="address of a server without speculation")
    servers.add_argument("--speculative", type=server_url, help="address of a server with speculation")
    servers.add_argument("--model", default="m", help="name of the model at both servers (default: m)")
    requests = parser.add_argument_group("requests and result")
    requests.add_argument("--requests", type=count(), default=300, help="random requests (default: 300)")
    requests.add_argument("--tokens", type=count(), default=32, help="new tokens of each request (default: 32)")
    requests.add_argument("--out", type=output_file, help="write the result to this JSON file")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    """Print the counts; exit 1 if any id differs."""
    options = _options(arguments)
    urls = (options.baseline, options.speculative)
    if [bool(way) for way in (options.bundle, *urls)] not in ([True, False, False], [False, True, True]):
        raise UserError("one comparison is made; give either --bundle DIR, or --baseline URL and --speculative URL")
    requests, about = questions(options.requests), header("wall")
    baseline, speculative = (Endpoint(url, options.model) for url in urls)
    if options.bundle:
        row = compare_bundle(options.bundle, requests, options.tokens)
    else:
        row = compare_endpoints(baseline, speculative, requests, options.tokens)
    if options.out:
        write_result(options.out, about | {"rows": [row]})
    print(f"{sentence(about)}\n\n{text(row)}")
    if row["differences"]:
        raise SystemExit(1)


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
