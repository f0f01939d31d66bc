"""`python -m bench.wall`: wall time of the demo pair, our bundle and transformers, with and without speculation.

A block serves one prompt with each backend, in random order; ratios are taken within a block, which cancels other load
on the machine. Greedy, one request at a time, fp32, one thread. Every output is compared with our target's without
speculation; a backend with a different output gets no time. Numbers describe the demo pair on this machine, not
Qwen3-32B.
"""

from __future__ import annotations

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
from bench.options import output_file
from bench.provenance import header, sentence, write_result
from bench.table import markdown
from model.errors import UserError, command_line, run_cli
from model.progress import each
from trnspec.llm import LLM

BASELINE, OURS = "ours, no speculation", "ours, speculation"
GREEDY, ASSISTED = "transformers greedy", "transformers assisted"
REFERENCES = (BASELINE, ASSISTED)
# new tokens of each request
TOKENS = 128
Rows = list[dict[str, Any]]


class Answer(NamedTuple):
    """New ids, wall seconds, and forward passes of the target after prefill."""

    ids: list[int]
    seconds: float
    steps: int


Backend = Callable[[list[int], int], Answer]


def _ours(llm: LLM, speculation: bool) -> Backend:
    def serve(ids: list[int], tokens: int) -> Answer:
        output = llm.generate(ids, max_new_tokens=tokens, speculation=speculation)
        return Answer(list(output.ids), output.seconds, output.steps)

    return serve


def _transformers(target: Any, **options: Any) -> Backend:
    passes = 0

    def counted(*_: Any) -> None:
        nonlocal passes
        passes += 1

    target.register_forward_hook(counted)

    def serve(ids: list[int], tokens: int) -> Answer:
        nonlocal passes
        begin, passes = time.perf_counter(), 0
        out = target.generate(torch.tensor([ids]), max_new_tokens=tokens, do_sample=False, **options)
        seconds = time.perf_counter() - begin
        return Answer(out[0, len(ids) :].tolist(), seconds, passes - 1)

    return serve


def make_backends(llm: LLM) -> dict[str, Backend]:
    """The four backends by name."""
    target, draft = (
        AutoModelForCausalLM.from_pretrained(demo.DEMO / name, dtype=torch.float32) for name in ("target", "draft")
    )
    return {BASELINE: _ours(llm, False), OURS: _ours(llm, True), GREEDY: _transformers(target),
            ASSISTED: _transformers(target, assistant_model=draft)}  # fmt: skip


def measure(ways: dict[str, Backend], prompts: Sequence[tuple[Prompt, list[int]]], tokens: int, rounds: int) -> Rows:
    """One run for each block (prompt, round) and backend."""
    rng, runs = random.Random(0), Rows()
    for backend in ways.values():
        backend(prompts[0][1], tokens)
    blocks = [(prompt, ids, number) for number in range(rounds) for prompt, ids in prompts]
    for prompt, ids, number in each(rng.sample(blocks, len(blocks)), "blocks"):
        answers = {name: ways[name](ids, tokens) for name in rng.sample(list(ways), len(ways))}
        for name, answer in answers.items():
            runs.append(
                {"block": (prompt.name, number), "entropy": prompt.entropy, "way": name,
                 "ms": 1e3 * answer.seconds / max(1, len(answer.ids)),
                 "tokens_per_step": (len(answer.ids) - 1) / max(1, answer.steps),
                 "same": answer.ids == answers[BASELINE].ids}
            )  # fmt: skip
    return runs


def aggregate(runs: Rows) -> Rows:
    """Medians for each class of prompts and backend; `times` are ratios to the references within a block."""
    by_block = {(run["block"], run["way"]): run for run in runs}
    rows = Rows()
    for entropy in ENTROPIES:
        for way in (BASELINE, OURS, GREEDY, ASSISTED):
            group = [r for r in runs if (r["entropy"], r["way"]) == (entropy, way)]
            if not group:
                continue
            row = {"entropy": entropy, "way": way, "source": "wall", "compared": len(group)}
            row |= {"same": sum(r["same"] for r in group)}
            row |= {"tokens_per_step": round(statistics.median(r["tokens_per_step"] for r in group), 2)}
            if row["same"] == row["compared"]:
                row["ms"] = round(statistics.median(r["ms"] for r in group), 4)
                ratios = {n: [by_block[r["block"], n]["ms"] / r["ms"] for r in group] for n in REFERENCES}
                row["times"] = {name: round(statistics.median(values), 4) for name, values in ratios.items()}
            rows.append(row)
    return rows


def table(rows: Rows) -> str:
    """The rows as markdown; a row with a different output shows no time."""
    heads = ["prompts", "backend", "ms/token p50 (wall)", "tokens/step"]
    heads += [*(f"speed, {name} = 1 (wall)" for name in REFERENCES), "same output"]
    lines = []
    for r in rows:
        times = [f"{r['times'][name]:.2f}" if "times" in r else "-" for name in REFERENCES]
        ms = f"{r['ms']:.2f}" if "ms" in r else "-"
        same = f"{r['same']} of {r['compared']}"
        lines.append([r["entropy"], r["way"], ms, f"{r['tokens_per_step']:.2f}", *times, same])
    return markdown(heads, lines)


def run(folder: Path) -> dict[str, Any]:
    """Measure a bundle of the demo pair: header, settings and rows."""
    made_by = header("wall")
    with LLM(folder) as llm:
        if not llm.bundle.spec.k:
            raise UserError(f"{folder} is a target without a drafter (k 0); give the bundle of a pair")
        prompts = [(p, llm.tokenizer.encode(p.text).ids) for p in demo.prompts()]
        runs = measure(make_backends(llm), prompts, TOKENS, rounds=1)
    settings = f"k {llm.bundle.spec.k}, batch 1, fp32, greedy, {TOKENS} new tokens"
    return made_by | {"settings": settings, "rows": aggregate(runs)}


def main(arguments: list[str]) -> None:
    """Measure and print the table; exit 1 if speculation changes an id."""
    about = "Measure the wall time of the demo pair, our bundle and transformers, with and without speculation."
    parser = command_line("bench.wall", about, "--bundle bundles/demo")
    parser.add_argument("--bundle", type=Path, default=Path("bundles/demo"), help="demo pair (default: bundles/demo)")
    parser.add_argument("--out", type=output_file, help="write the results to this JSON file")
    options = parser.parse_args(arguments)
    result = run(options.bundle)
    if options.out:
        write_result(options.out, result)
    print(f"{sentence(result)}; {result['settings']}.\n\n{table(result['rows'])}")
    if any(r["same"] < r["compared"] for r in result["rows"] if r["way"] == OURS):
        raise SystemExit(1)


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
