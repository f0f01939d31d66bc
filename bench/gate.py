"""`python -m bench.gate`: does speculation change a single token? Random requests, with it and without, ids compared.

`--bundle DIR` serves them by a bundle with drafts and without; `--baseline URL --speculative URL` sends them to two
servers. They are greedy and sampled, with filters and without, and some limit their drafts. A difference is printed and
the exit status is 1; `--checkpoint` adds the distance of the target's logits of both ids: near zero it is a tie that
rounding decided, otherwise a fault.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from bench.demo import prompts
from bench.options import count, output_file, server_url
from bench.provenance import header, sentence, write_result
from bench.serving.servers import Endpoint
from bench.table import markdown
from model.errors import UserError, run_cli
from model.progress import each
from trnspec.engine.request import Params
from trnspec.llm import LLM

# of a random request: temperature, top-k, top-p, min-p, and the limit of its drafts
_TEMPERATURES, _TOP_K, _TOP_P, _MIN_P = (0.0, 0.0, 0.6, 1.0), (0, 0, 40), (1.0, 0.95), (0.0, 0.0, 0.05)
_K_LIMITS = (None, None, None, None, 0, 1)


class Question(NamedTuple):
    """A random request as text, and the most drafts of its steps."""

    text: str
    params: Params
    k_limit: int | None


class Difference(NamedTuple):
    """Of two answers, the first one: the ids before it, the next ones of both, and the gap of their logits."""

    question: int
    at: int
    before: Sequence[Any]
    baseline: Sequence[Any]
    speculative: Sequence[Any]
    gap: float | None = None


def questions(number: int, seed: int = 16) -> list[Question]:
    """Random requests over the demo's prompts: one, or three and the beginning of their copy."""
    rng, texts, requests = random.Random(seed), [p.text for p in prompts()], []
    for _ in range(number):
        text = rng.choice(texts)
        if rng.random() < 1 / 3:
            lines = "\n".join(rng.sample(texts, 3)).strip()
            text = f"{lines}\n\n{lines[: rng.randint(20, 60)]}"
        drawn = rng.choice(_TEMPERATURES), rng.choice(_TOP_K), rng.choice(_TOP_P), rng.choice(_MIN_P)
        requests.append(Question(text, Params(*drawn, rng.getrandbits(63)), rng.choice(_K_LIMITS)))
    return requests


def differences(baseline: Sequence[Sequence[Any]], speculative: Sequence[Sequence[Any]]) -> list[Difference]:
    """The first difference of each pair of answers that differ."""
    found = []
    for number, (a, b) in enumerate(zip(baseline, speculative, strict=True)):
        if list(a) != list(b):
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            found.append(Difference(number, at, a[:at], a[at : at + 8], b[at : at + 8]))
    return found


def of_bundle(folder: Path, requests: Sequence[Question], tokens: int) -> dict[str, Any]:
    """A row: a bundle with drafts and without; requests of one limit are served together."""
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


def of_endpoints(
    baseline: Endpoint, speculative: Endpoint, requests: Sequence[Question], tokens: int
) -> dict[str, Any]:
    """A row: questions sent to both servers in random order; characters are compared where a server returns no ids."""
    rng, found = random.Random(0), dict[tuple[bool, int], list[Any]]()
    for number, question in each(list(enumerate(requests)), "gate"):
        for way, server in rng.sample([(False, baseline), (True, speculative)], 2):
            found[way, number] = server.complete(question.text, question.params, tokens)
    return {"drafter": speculative.address} | _row(found, len(requests))


def _row(answers: Mapping[tuple[bool, int], Sequence[Any]], requests: int) -> dict[str, Any]:
    baseline, speculative = ([answers[way, n] for n in range(requests)] for way in (False, True))
    found = [d._asdict() for d in differences(baseline, speculative)]
    return {"requests": requests, "tokens": sum(map(len, baseline)), "differences": found}


def add_gaps(row: dict[str, Any], requests: Sequence[Question], checkpoint: Path) -> None:
    """Fill in how far the target's logits (by transformers, fp32) of both ids of a difference are apart."""
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    for found in (d for d in row["differences"] if d["baseline"] and d["speculative"]):
        known = tokenizer.encode(requests[found["question"]].text).ids + list(found["before"])
        with torch.no_grad():
            logits = model(torch.tensor([known])).logits[0, -1]
        found["gap"] = float(logits[found["baseline"][0]] - logits[found["speculative"][0]])


def text(row: dict[str, Any]) -> str:
    """The counts, and the first differences."""
    counts = row | {"differences": len(row["differences"])}
    lines = [markdown(list(counts), [list(map(str, counts.values()))])]
    for d in row["differences"][:10]:
        gap = "" if d["gap"] is None else f", logits apart by {d['gap']:.3g}"
        lines.append(f"request {d['question']} differs at token {d['at']}: {d['baseline']}, {d['speculative']}{gap}")
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    """Print the counts; exit 1 if any id differs."""
    parser = argparse.ArgumentParser(prog="python -m bench.gate", description=__doc__)
    parser.add_argument("--bundle", type=Path, help="bundle of a pair")
    parser.add_argument("--baseline", type=server_url, help="address of a server without drafts")
    parser.add_argument("--speculative", type=server_url, help="address of a server with drafts")
    parser.add_argument("--model", default="m", help="name of the model at both servers (default: m)")
    parser.add_argument("--checkpoint", type=Path, help="folder of the target: explain differences by its logits")
    parser.add_argument("--requests", type=count(), default=300, help="random requests (default: 300)")
    parser.add_argument("--tokens", type=count(), default=32, help="new tokens of each (default: 32)")
    parser.add_argument("--seed", type=count(0), default=16, help="of the requests (default: 16)")
    parser.add_argument("--out", type=output_file, help="write the row here, JSON")
    options = parser.parse_args(arguments)
    urls = (options.baseline, options.speculative)
    if [bool(way) for way in (options.bundle, *urls)] not in ([True, False, False], [False, True, True]):
        raise UserError("one comparison is made; give only --bundle DIR, or --baseline URL and --speculative URL")
    if options.checkpoint and not (options.checkpoint / "config.json").is_file():
        raise UserError(f"{options.checkpoint} holds no checkpoint; give the folder of the target's")
    requests, about = questions(options.requests, options.seed), header("wall")
    baseline, speculative = (Endpoint(url, options.model) for url in urls)
    if options.bundle:
        row = of_bundle(options.bundle, requests, options.tokens)
    else:
        row = of_endpoints(baseline, speculative, requests, options.tokens)
    if row["differences"] and options.checkpoint:
        add_gaps(row, requests, options.checkpoint)
    if options.out:
        write_result(options.out, about | {"rows": [row]})
    print(f"{sentence(about)}\n\n{text(row)}")
    if row["differences"]:
        raise SystemExit(1)


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
