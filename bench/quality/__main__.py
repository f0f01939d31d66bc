"""`python -m bench.quality --bundle DIR`: does speculation change a single token? Every prompt, both ways, compared.

The same requests are served by the target alone and with speculation: greedy, and at seeded temperatures, where the
noise of a position is a function of the seed, so that the tokens must be equal too.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.pair import read_pair
from bench.provenance import header, said
from bench.quality.report import markdown, page
from bench.quality.target_logits import Gap, TargetLogits
from model.bundle.manifest import Bundle
from model.errors import UserError, run_cli
from model.progress import progress
from model.serving.engine import Engine, Runner
from model.serving.ready import shape_of
from model.serving.request import Params, Request, Result, Shape
from model.serving.runtime import Graphs
from model.serving.switching import Table, find_table
from model.serving.text import load_tokenizer

PROMPTS = Path(__file__).resolve().parents[2] / "demo/prompts.json"


@dataclass(frozen=True)
class Question:
    """One prompt with sampling parameters."""

    name: str
    kind: str
    request: Request


@dataclass(frozen=True)
class Row:
    """One case served both ways; `at` is the first new token that differs, None if the answers are equal."""

    prompt: str
    kind: str
    temperature: float
    seed: int
    tokens: int
    tokens_per_step: float
    at: int | None = None
    alone: tuple[int, ...] = ()
    speculative: tuple[int, ...] = ()
    gap: Gap | None = None


def load_prompts(file: Path) -> list[tuple[str, str, str]]:
    """(name, kind, text) of each prompt: a JSON file like demo/prompts.json, or one prompt a line."""
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix != ".json":
            return [(f"line {i}", "all", line) for i, line in enumerate(text.splitlines(), 1) if line]
        return [(p["name"], p["entropy"], p["text"]) for p in json.loads(text)["prompts"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{file} holds no prompts ({type(error).__name__}); give a text file with one prompt a line, or JSON like "
            "demo/prompts.json"
        ) from error


def compare(
    serve: Callable[[bool, list[Request]], list[Result]], cases: Sequence[Question], logits: TargetLogits
) -> list[Row]:
    """Serve all cases both ways; one row each."""
    requests = [c.request for c in cases]
    alone, speculative = (serve(way, requests) for way in (False, True))
    return [_row(case, a, s, logits) for case, a, s in zip(cases, alone, speculative, strict=True)]


def _row(case: Question, alone: Result, speculative: Result, logits: TargetLogits) -> Row:
    params, a, s = case.request.params, alone.ids, speculative.ids
    row = Row(case.name, case.kind, params.temperature, params.seed, len(a), round(speculative.tokens_per_step, 3))
    if a == s:
        return row
    at = next((i for i, (x, y) in enumerate(zip(a, s, strict=False)) if x != y), min(len(a), len(s)))
    known = (*case.request.ids, *a[:at])
    gap = logits.gap(known, a[at], s[at], params) if at < min(len(a), len(s)) else None
    return Row(
        **{**asdict(row), "at": at, "alone": tuple(a[at : at + 8]), "speculative": tuple(s[at : at + 8]), "gap": gap}
    )


def server(
    runner: Runner, shape: Shape, table: Table | None, told: Callable[[int], None]
) -> Callable[[bool, list[Request]], list[Result]]:
    """What serves requests over a runner, both ways; `told` is given the count of each batch of new tokens."""

    def serve(speculative: bool, requests: list[Request]) -> list[Result]:
        engine = Engine(runner, shape, speculative, table)
        return engine.run(requests, lambda _, ids: told(len(ids)))

    return serve


def _cases(bundle: Bundle, options: argparse.Namespace) -> list[Question]:
    tokenizer, stops = load_tokenizer(bundle.path), bundle.config("target").eos_token_ids
    chosen = load_prompts(options.prompts)[: options.limit]
    return [
        Question(
            name,
            kind,
            Request(tuple(tokenizer.encode(text).ids), Params(t, seed=options.seed + i), options.tokens, stops),
        )
        for t in options.temperatures
        for i, (name, kind, text) in enumerate(chosen)
    ]


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.quality", description=__doc__)
    parser.add_argument("--bundle", type=Path, required=True, help="folder of the bundle")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="JSON like demo/prompts.json, or a line a prompt")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0], help="0 is greedy")
    parser.add_argument("--seed", type=int, default=0, help="of the first prompt; each next one has the next seed")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens per prompt")
    parser.add_argument("--limit", type=int, help="take only so many prompts")
    parser.add_argument("--tuning", type=Path, help="table for switching (default: the bundle's, if any)")
    parser.add_argument("--out", type=Path, default=Path("quality"), help="folder of the report and the rows")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    """Compare, write quality.md, quality.html and rows.jsonl; exit code 1 if any token differs."""
    options = _options(arguments)
    if options.out.exists() and not options.out.is_dir():
        raise UserError(f"{options.out} is a file; give a folder as --out")
    if options.tokens < 1 or (options.limit is not None and options.limit < 1):
        raise UserError("--tokens and --limit are counts of at least 1; correct them")
    bundle = read_pair(options.bundle)
    table, cases = find_table(options.bundle, options.tuning), _cases(bundle, options)
    if not cases:
        raise UserError(f"{options.prompts} holds no prompts; give at least one")
    graphs = Graphs(bundle)
    with progress("both ways", 2 * len(cases) * options.tokens, "tokens") as task:
        serve = server(graphs, shape_of(bundle), table, task.advance)
        rows = [asdict(r) for r in compare(serve, cases, TargetLogits(bundle))]
    facts = _facts(bundle, options, table)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    (options.out / "quality.html").write_text(page(rows, facts), encoding="utf-8")
    summary = markdown(rows, facts)
    (options.out / "quality.md").write_text(summary, encoding="utf-8")
    print(summary)
    print(options.out / "quality.html")
    if any(r["at"] is not None for r in rows):
        raise SystemExit(1)


def _facts(bundle: Bundle, options: argparse.Namespace, table: Table | None) -> dict[str, str]:
    return {
        "Target and draft": f"{bundle.title('target')} and {bundle.title('draft')}",
        "Drafter": bundle.drafting.kind,
        "Bundle": f"k {bundle['k']}, batch {bundle['batch']}, tp {bundle['tp']}, length {bundle['max_len']}, "
        f"{bundle['dtype']}, toolchain {bundle['toolchain']}, sha256 {bundle['manifest_sha256'][:16]}",
        "Prompts": f"{options.prompts.name}, at most {options.tokens} new tokens each, seeds from {options.seed}",
        "Switching": "by the bundle's table" if table else "off: every step speculates",
        "Run by": "XLA on the CPU" if bundle["toolchain"] == "cpu" else str(bundle["toolchain"]),
        "Made by": said(header("wall")),
    }


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
