"""`python -m bench.gate`: does speculation change a single token? Random requests, with it and without, ids compared.

`--bundle DIR` serves the requests by a bundle with drafts and by its target alone; `--drafters` does so for bundles of
the demo target with each drafter, in fp32 and bf16; `--baseline URL --speculative URL` compares two servers. Requests
are greedy and drawn, with filters and without, and some limit their drafts. A difference is printed and the exit status
is 1. With `--checkpoint` a difference also shows the distance of the target's logits of both ids: near zero it is a tie
that rounding decided, otherwise a fault.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from bench.demo import MODELS, bundle, count, prompts
from bench.provenance import header, said, write_result
from bench.serving.servers import Endpoint
from bench.table import markdown
from model.errors import UserError, run_cli
from model.progress import progress
from trnspec.engine.request import Params
from trnspec.llm import LLM, Output

# k and batch of the bundles that share a drafter's requests
SHAPES, DTYPES = ((3, 1), (7, 4), (15, 8)), ("fp32", "bf16")
# of a random request: temperature, top-k, top-p, min-p, and its most drafts
_TEMPERATURES, _TOP_K, _TOP_P, _MIN_P = (0.0, 0.0, 0.6, 1.0), (0, 0, 40), (1.0, 0.95), (0.0, 0.0, 0.05)
_LIMITS = (None, None, None, None, 0, 1)


class Question(NamedTuple):
    """A random request as text; `limit` is its most drafts in a step."""

    text: str
    params: Params
    limit: int | None


class Difference(NamedTuple):
    """Two answers' first difference: the ids before it, both from there on, `gap` in the target's logits if known."""

    question: int
    at: int
    before: Sequence[Any]
    alone: Sequence[Any]
    speculative: Sequence[Any]
    gap: float | None = None


def questions(number: int, seed: int = 16) -> list[Question]:
    """Random requests over the demo's prompts: whole, or several lines and the beginning of their copy."""
    rng, texts = random.Random(seed), [p.text for p in prompts()]
    asked = []
    for _ in range(number):
        text = rng.choice(texts)
        if rng.random() < 1 / 3:
            lines = "\n".join(rng.sample(texts, 3)).strip()
            text = f"{lines}\n\n{lines[: rng.randint(20, 60)]}"
        filters = rng.choice(_TOP_K), rng.choice(_TOP_P), rng.choice(_MIN_P)
        params = Params(rng.choice(_TEMPERATURES), *filters, rng.getrandbits(63))
        asked.append(Question(text, params, rng.choice(_LIMITS)))
    return asked


def differences(alone: Sequence[Sequence[Any]], speculative: Sequence[Sequence[Any]]) -> list[Difference]:
    """The first difference of each pair of answers that differ."""
    found = []
    for number, (a, s) in enumerate(zip(alone, speculative, strict=True)):
        if list(a) != list(s):
            at = next((i for i, (x, y) in enumerate(zip(a, s, strict=False)) if x != y), min(len(a), len(s)))
            found.append(Difference(number, at, a[:at], a[at : at + 8], s[at : at + 8]))
    return found


def answers(llm: LLM, asked: Sequence[Question], tokens: int, speculation: bool) -> list[Output]:
    """The questions served by a bundle, those of one limit together; a prompt is cut to the bundle's length."""
    k = llm.bundle.spec.k
    room = llm.bundle.spec.max_len - k - tokens
    prompts = [llm.tokenizer.encode(q.text).ids[:room] for q in asked]
    found: dict[int, Output] = {}
    for limit in dict.fromkeys(q.limit for q in asked):
        own = [n for n, q in enumerate(asked) if q.limit == limit]
        options: Any = {"max_new_tokens": tokens, "speculation": speculation}
        if speculation and limit is not None:
            options["k_limit"] = min(limit, k)
        outputs = llm.generate([prompts[n] for n in own], [asked[n].params for n in own], **options)
        found |= dict(zip(own, outputs, strict=True))
    return [found[n] for n in range(len(asked))]


def compared(asked: Sequence[Question], alone: Sequence[Output], outputs: Sequence[Output]) -> dict[str, Any]:
    """A row: requests, differences, tokens a step of the requests without a limit."""
    found = differences([o.ids for o in alone], [o.ids for o in outputs])
    free = [o for q, o in zip(asked, outputs, strict=True) if q.limit is None]
    per_step = sum(len(o.ids) - 1 for o in free) / max(1, sum(o.steps for o in free))
    return {"requests": len(asked), "tokens": sum(len(o.ids) for o in alone), "tokens_per_step": round(per_step, 3),
            "differences": [d._asdict() for d in found]}  # fmt: skip


def of_bundle(folder: Path, asked: Sequence[Question], tokens: int) -> dict[str, Any]:
    """A row: the bundle against its target alone."""
    with LLM(folder) as llm:
        spec = llm.bundle.spec
        if not spec.k:
            raise UserError(f"{folder} is a target alone (k 0), with nothing to compare; give the bundle of a pair")
        with progress(f"{len(asked)} requests, both ways"):
            alone, outputs = (answers(llm, asked, tokens, way) for way in (False, True))
    about = {"drafter": spec.drafter, "k": spec.k, "batch": spec.batch, "dtype": spec.dtype}
    return about | compared(asked, alone, outputs)


def of_drafters(
    drafters: Sequence[str], dtypes: Sequence[str], asked: Sequence[Question], tokens: int
) -> Iterator[dict[str, Any]]:
    """A row for each bundle of the demo target: its part of the questions against a bundle of the target alone."""
    with tempfile.TemporaryDirectory() as name:

        def served(drafter: str, k: int, batch: int, dtype: str, part: Sequence[Question]) -> list[Output]:
            folder = bundle(Path(name) / f"{drafter}-{k}-{batch}-{dtype}", drafter, k, batch=batch, dtype=dtype)
            with LLM(folder) as llm, progress(f"{drafter}, k {k}, batch {batch}, {dtype}: {len(part)} requests"):
                return answers(llm, part, tokens, k > 0)

        for dtype in dtypes:
            alone = served("none", 0, 8, dtype, asked)
            for drafter, (n, (k, batch)) in itertools.product(drafters, enumerate(SHAPES)):
                part = slice(n, None, len(SHAPES))
                row = compared(asked[part], alone[part], served(drafter, k, batch, dtype, asked[part]))
                yield {"drafter": drafter, "k": k, "batch": batch, "dtype": dtype} | row


def of_endpoints(baseline: Endpoint, speculative: Endpoint, asked: Sequence[Question], tokens: int) -> dict[str, Any]:
    """A row: every question sent to both servers in random order, one after the other.

    Ids are compared, or characters where a server returns none.
    """
    rng, found = random.Random(0), {}
    with progress("gate", 2 * len(asked), "answers") as task:
        for number, question in enumerate(asked):
            for endpoint in rng.sample((baseline, speculative), 2):
                found[endpoint, number] = endpoint.complete(question.text, question.params, tokens)
                task.advance()
    alone, other = ([found[endpoint, n] for n in range(len(asked))] for endpoint in (baseline, speculative))
    about = {"drafter": speculative.address, "requests": len(asked), "tokens": sum(map(len, alone))}
    return about | {"differences": [d._asdict() for d in differences(alone, other)]}


def gaps(rows: Sequence[dict[str, Any]], asked: Sequence[Question], checkpoint: Path) -> None:
    """Fill in how far the target's logits (by transformers, fp32) of both ids of a difference are apart."""
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    for found in (d for row in rows for d in row["differences"] if d["alone"] and d["speculative"]):
        known = tokenizer.encode(asked[found["question"]].text).ids + list(found["before"])
        with torch.no_grad():
            logits = model(torch.tensor([known])).logits[0, -1]
        found["gap"] = float(logits[found["alone"][0]] - logits[found["speculative"][0]])


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each row, then the first differences."""
    names = ("drafter", "k", "batch", "dtype", "requests", "tokens", "tokens_per_step")
    lines = [[*(str(row.get(name, "")) for name in names), str(len(row["differences"]))] for row in rows]
    said = [
        f"request {d['question']} differs at token {d['at']}: {d['alone']} alone, {d['speculative']} speculative"
        + (f", logits apart by {d['gap']:.3g}" if d["gap"] is not None else "")
        for row in rows for d in row["differences"][:10]
    ]  # fmt: skip
    return "\n".join([markdown([*names, "different"], lines), *said])


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gate", description=__doc__)
    parser.add_argument("--bundle", type=Path, help="a bundle with drafts, against its target alone")
    parser.add_argument("--drafters", nargs="*", choices=MODELS, help="bundles of the demo target; none named: all")
    parser.add_argument("--baseline", default="", help="URL of a server without drafts")
    parser.add_argument("--speculative", default="", help="URL of a server with drafts")
    parser.add_argument("--model", default="m", help="name of the model at both servers (default: m)")
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES, help="of the drafters' bundles")
    parser.add_argument("--requests", type=count(len(SHAPES)), default=300, help="random requests (default: 300)")
    parser.add_argument("--tokens", type=count(2), default=32, help="new tokens of each (default: 32)")
    parser.add_argument("--seed", type=count(0), default=16, help="of the random requests")
    parser.add_argument("--checkpoint", type=Path, help="Hugging Face folder of the target: logits of a difference")
    parser.add_argument("--out", type=Path, help="write the rows here, JSON")
    options = parser.parse_args(arguments)
    chosen = [options.bundle is not None, options.drafters is not None, bool(options.baseline and options.speculative)]
    if sum(chosen) != 1:
        raise UserError("there is nothing to compare; give --bundle DIR, --drafters, or --baseline and --speculative")
    return options


def run(options: argparse.Namespace, asked: Sequence[Question]) -> list[dict[str, Any]]:
    """The rows of the requested comparisons."""
    if options.bundle:
        rows = [of_bundle(options.bundle, asked, options.tokens)]
    elif options.drafters is not None:
        rows = list(of_drafters(options.drafters or list(MODELS), options.dtypes, asked, options.tokens))
    else:
        baseline, speculative = (Endpoint(url, options.model) for url in (options.baseline, options.speculative))
        rows = [of_endpoints(baseline, speculative, asked, options.tokens)]
    if options.checkpoint:
        gaps(rows, asked, options.checkpoint)
    return rows


def main(arguments: list[str]) -> None:
    """Print the table; exit 1 if any id differs."""
    options, about = _options(arguments), header("wall")
    rows = run(options, questions(options.requests, options.seed))
    if options.out:
        write_result(options.out, about | {"tokens": options.tokens, "rows": rows})
    print(f"{said(about)}\n\n{table(rows)}")
    if any(row["differences"] for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
