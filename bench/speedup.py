"""`python -m bench.speedup`: the demo pair side by side in one run, wall time per token.

Ours with and without speculation against transformers' greedy and assisted generation, greedy
decoding, fp32, one thread, prompts in random order. A number made here describes the demo pair on
this machine and says nothing about Qwen3-32B.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench.pair import read_pair
from bench.provenance import header, write_result
from model.errors import run_cli
from model.progress import each
from model.serving.ready import serve
from model.serving.request import Request
from model.serving.runtime import Graphs
from model.serving.text import load_tokenizer

_ROOT = Path(__file__).resolve().parent.parent
OURS, ALONE, GREEDY, ASSISTED = _WAYS = (
    "ours, speculation",
    "ours, target alone",
    "transformers greedy",
    "transformers assisted",
)
ENTROPIES = ("structured", "open")


# a request served alone: its ids, wall seconds, tokens a step
Way = Callable[[Request], tuple[list[int], float, float]]


def theirs(target: Any, tokens: int, **options: Any) -> Way:
    """A target of transformers, with what its `generate` takes more; a step is its pass, the prompt's too."""
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    target.register_forward_hook(count)

    def way(request: Request) -> tuple[list[int], float, float]:
        nonlocal passes
        ids, params = torch.tensor([request.ids]), request.params
        drawn = {"temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k}
        how = {"do_sample": True, **drawn} if params.temperature else {"do_sample": False}
        torch.manual_seed(params.seed)
        begin, passes = time.perf_counter(), 0
        out = target.generate(ids, max_new_tokens=tokens, **how, **options)
        found = out[0, ids.shape[1] :].tolist()
        return found, time.perf_counter() - begin, len(found) / max(1, passes)

    return way


def _ways(graphs: Graphs, tokens: int) -> dict[str, Way]:
    target: Any
    draft: Any
    target, draft = (
        AutoModelForCausalLM.from_pretrained(_ROOT / "demo" / name, dtype=torch.float32) for name in ("target", "draft")
    )

    def ours(speculative: bool) -> Way:
        def way(request: Request) -> tuple[list[int], float, float]:
            run = serve(graphs, request, speculative)
            return run.result.ids, run.seconds, run.result.tokens_per_step

        return way

    transformers = theirs(target, tokens), theirs(target, tokens, assistant_model=draft)
    return dict(zip(_WAYS, (ours(True), ours(False), *transformers), strict=True))


def measure(bundle: Path, tokens: int, seed: int) -> list[dict[str, Any]]:
    """One row per prompt and way: milliseconds a token, tokens a step, and equality with the target alone."""
    torch.set_num_threads(1)
    graphs, tokenizer = Graphs(read_pair(bundle)), load_tokenizer(bundle)
    ways, rng = _ways(graphs, tokens), random.Random(seed)
    prompts = json.loads((_ROOT / "demo/prompts.json").read_text(encoding="utf-8"))["prompts"]
    template = Request((0,), max_new_tokens=tokens, stop_ids=graphs.bundle.config("target").eos_token_ids)
    warm = replace(template, ids=tuple(tokenizer.encode(prompts[0]["text"]).ids))
    for way in ways.values():
        way(warm)
    rows = []
    for prompt in each(prompts, "prompts"):
        request = replace(template, ids=tuple(tokenizer.encode(prompt["text"]).ids))
        order = rng.sample(_WAYS, len(_WAYS))
        runs = {name: ways[name](request) for name in order}
        expected = runs[ALONE][0]
        for name in _WAYS:
            ids, seconds, per_step = runs[name]
            rows.append(
                {
                    "prompt": prompt["name"],
                    "entropy": prompt["entropy"],
                    "way": name,
                    "source": "wall",
                    "ms_per_token": round(1e3 * seconds / max(1, len(ids)), 5),
                    "tokens_per_step": round(per_step, 4),
                    "identical": ids == expected,
                }
            )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Medians by entropy class and way; no time is shown beside a text that differs."""
    lines = ["| prompts | way | ms/token p50 (wall) | tokens/step | identical to the target alone |"]
    lines.append("|---|---|---|---|---|")
    for entropy in ENTROPIES:
        for way in _WAYS:
            chosen = [r for r in rows if (r["entropy"], r["way"]) == (entropy, way)]
            same = sum(r["identical"] for r in chosen)
            milliseconds = statistics.median(r["ms_per_token"] for r in chosen)
            per_step = [r["tokens_per_step"] for r in chosen if r["tokens_per_step"] is not None]
            shown = f"{milliseconds:.2f}" if same == len(chosen) else "-"
            steps = f"{statistics.median(per_step):.2f}" if per_step else ""
            lines.append(f"| {entropy} | {way} | {shown} | {steps} | {same} of {len(chosen)} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    """Print the table, or the rows as JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.speedup", description=__doc__)
    parser.add_argument("--bundle", type=Path, default=Path("bundles/demo"), help="bundle of the demo pair")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens per prompt")
    parser.add_argument("--seed", type=int, default=0, help="of the order in which the ways run")
    parser.add_argument("--json", action="store_true", help="print one JSON row per prompt and way")
    parser.add_argument("--out", type=Path, help="write the results here, JSON; bench.readme reads bench/results/")
    options = parser.parse_args(arguments)
    made_by = header("wall")
    rows = measure(options.bundle, options.tokens, options.seed)
    if options.out:
        spec = read_pair(options.bundle)
        settings = f"k {spec['k']}, batch {spec['batch']}, {spec['dtype']}, greedy, {options.tokens} new tokens"
        write_result(options.out, made_by | {"settings": settings, "rows": rows})
    print("\n".join(json.dumps(r) for r in rows) if options.json else table(rows))


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
