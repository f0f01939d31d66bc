"""`python -m bench.wall`: the demo pair by our bundle and by transformers, with drafts and without, wall time.

Every block serves one prompt by each way, in random order, and ratios are taken within a block, where other load on the
machine cancels. Greedy, one request at a time, fp32, one thread. Each answer is compared with our target's without
drafts; a way with an answer that differs has no time. Numbers describe the demo pair on this machine and say nothing
about Qwen3-32B.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

from bench import demo
from bench.demo import ENTROPIES, Prompt
from bench.options import count, input_file, output_file
from bench.provenance import header, read_result, sentence, write_result
from bench.table import markdown
from model.errors import UserError, run_cli
from model.progress import each
from trnspec.llm import LLM

ALONE, OURS, GREEDY, ASSISTED = "our target alone", "ours, speculation", "transformers greedy", "transformers assisted"
REFERENCES = (ALONE, ASSISTED)
Rows = list[dict[str, Any]]


class Answer(NamedTuple):
    """New ids, wall seconds, and passes of the target after the prompt's."""

    ids: list[int]
    seconds: float
    steps: int


Way = Callable[[list[int], int], Answer]


def _ours(llm: LLM, speculation: bool) -> Way:
    def way(ids: list[int], tokens: int) -> Answer:
        output = llm.generate(ids, max_new_tokens=tokens, speculation=speculation)
        return Answer(list(output.ids), output.seconds, output.steps)

    return way


def _theirs(target: Any, **options: Any) -> Way:
    passes = 0

    def counted(*_: Any) -> None:
        nonlocal passes
        passes += 1

    target.register_forward_hook(counted)

    def way(ids: list[int], tokens: int) -> Answer:
        nonlocal passes
        begin, passes = time.perf_counter(), 0
        out = target.generate(torch.tensor([ids]), max_new_tokens=tokens, do_sample=False, **options)
        seconds = time.perf_counter() - begin
        return Answer(out[0, len(ids) :].tolist(), seconds, passes - 1)

    return way


def ways_of(llm: LLM) -> dict[str, Way]:
    """The four ways by name."""
    target, draft = (
        AutoModelForCausalLM.from_pretrained(demo.DEMO / name, dtype=torch.float32) for name in ("target", "draft")
    )
    return {ALONE: _ours(llm, False), OURS: _ours(llm, True), GREEDY: _theirs(target),
            ASSISTED: _theirs(target, assistant_model=draft)}  # fmt: skip


def measure(ways: dict[str, Way], prompts: Sequence[tuple[Prompt, list[int]]], tokens: int, rounds: int) -> Rows:
    """A run for each block (prompt, round) and way."""
    rng, runs = random.Random(0), Rows()
    for way in ways.values():
        way(prompts[0][1], tokens)
    blocks = [(prompt, ids, number) for number in range(rounds) for prompt, ids in prompts]
    for prompt, ids, number in each(rng.sample(blocks, len(blocks)), "blocks"):
        answers = {name: ways[name](ids, tokens) for name in rng.sample(list(ways), len(ways))}
        for name, answer in answers.items():
            runs.append(
                {"block": (prompt.name, number), "entropy": prompt.entropy, "way": name,
                 "ms": 1e3 * answer.seconds / max(1, len(answer.ids)),
                 "tokens_per_step": (len(answer.ids) - 1) / max(1, answer.steps),
                 "same": answer.ids == answers[ALONE].ids}
            )  # fmt: skip
    return runs


def aggregate(runs: Rows) -> Rows:
    """Medians of each class of prompts and way; `times` are ratios to the references within a block."""
    by_block = {(run["block"], run["way"]): run for run in runs}
    rows = Rows()
    for entropy in ENTROPIES:
        for way in (ALONE, OURS, GREEDY, ASSISTED):
            own = [r for r in runs if (r["entropy"], r["way"]) == (entropy, way)]
            if not own:
                continue
            row = {"entropy": entropy, "way": way, "source": "wall", "compared": len(own)}
            row |= {"same": sum(r["same"] for r in own)}
            row |= {"tokens_per_step": round(statistics.median(r["tokens_per_step"] for r in own), 2)}
            if row["same"] == row["compared"]:
                row["ms"] = round(statistics.median(r["ms"] for r in own), 4)
                row["times"] = {
                    name: round(statistics.median(by_block[r["block"], name]["ms"] / r["ms"] for r in own), 4)
                    for name in REFERENCES
                }
            rows.append(row)
    return rows


def table(rows: Rows) -> str:
    """A line for each row; no time is shown where a text differs."""
    heads = ["prompts", "way", "ms/token p50 (wall)", "tokens/step"]
    heads += [*(f"speed, {name} = 1 (wall)" for name in REFERENCES), "same text"]
    lines = []
    for r in rows:
        times = [f"{r['times'][name]:.2f}" if "times" in r else "-" for name in REFERENCES]
        ms = f"{r['ms']:.2f}" if "ms" in r else "-"
        lines.append(
            [r["entropy"], r["way"], ms, f"{r['tokens_per_step']:.2f}", *times, f"{r['same']} of {r['compared']}"]
        )
    return markdown(heads, lines)


def run(folder: Path, tokens: int, rounds: int, every: int) -> dict[str, Any]:
    """A header, the settings and the rows."""
    made_by = header("wall")
    with LLM(folder) as llm:
        if not llm.bundle.spec.k:
            raise UserError(f"{folder} is a target without a drafter (k 0); give the bundle of a pair")
        prompts = [(p, llm.tokenizer.encode(p.text).ids) for p in demo.prompts(every)]
        runs = measure(ways_of(llm), prompts, tokens, rounds)
    settings = f"k {llm.bundle.spec.k}, batch 1, fp32, greedy, {tokens} new tokens, rounds: {rounds}"
    return made_by | {"settings": settings, "rows": aggregate(runs)}


def main(arguments: list[str]) -> None:
    """Measure, or read a result; print its table; exit 1 if our ids with drafts differ."""
    parser = argparse.ArgumentParser(prog="python -m bench.wall", description=__doc__)
    parser.add_argument("--bundle", type=Path, default=Path("bundles/demo"), help="of the demo pair (make build)")
    parser.add_argument("--tokens", type=count(2), default=128, help="new tokens of each request (default: 128)")
    parser.add_argument("--rounds", type=count(), default=1, help="times that each prompt is served (default: 1)")
    parser.add_argument("--every", type=count(), default=1, help="take every n-th prompt")
    parser.add_argument("--show", type=input_file, help="measure nothing: the table of this file of results")
    parser.add_argument("--out", type=output_file, help="write the results here, JSON")
    options = parser.parse_args(arguments)
    if options.show:
        result = read_result(options.show, "settings", "rows")
    else:
        result = run(options.bundle, options.tokens, options.rounds, options.every)
    if options.out:
        write_result(options.out, result)
    shown = f"{sentence(result)}; {result['settings']}.\n\n{table(result['rows'])}"
    print(shown)
    if any(r["same"] < r["compared"] for r in result["rows"] if r["way"] == OURS):
        raise SystemExit(1)


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
