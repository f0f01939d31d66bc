"""`python -m bench.stale_draft --bundle DIR`: what steps without speculation cost the draft afterwards.

A step of the target alone writes nothing into the draft's cache. Each prompt runs some steps alone, then speculates:
with the gap left in the draft's cache, with the cache refreshed by the prompt's graph, and, to compare with, without
any steps alone. Tokens per step count from the end of the gap on.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from bench.pair import read_pair
from bench.quality.__main__ import PROMPTS, load_prompts
from model.errors import UserError, run_cli
from model.progress import each
from model.serving.engine import Engine, SpecStep
from model.serving.ready import shape_of
from model.serving.request import Params, Request
from model.serving.runtime import Graphs
from model.serving.slots import Slot
from model.serving.switching import Decision
from model.serving.text import load_tokenizer

WAYS = ("no gap", "stale", "refreshed")


class _Scripted(Engine):
    """An engine whose first steps after a prompt run the target alone, whatever a table says."""

    def __init__(self, graphs: Graphs, way: str, gap: int, steps: list[SpecStep]) -> None:
        super().__init__(graphs, shape_of(graphs.bundle), True, None, steps.append)
        self.gap = 0 if way == "no gap" else gap
        self.refreshing = way == "refreshed"

    def _decide(self, seated: list[Slot], most: int) -> Decision:
        (slot,) = seated
        if slot.result.steps < self.gap:
            return Decision()
        return Decision((self.shape.k,), (self.refreshing and slot.result.steps == self.gap,))


def tokens_per_step(graphs: Graphs, request: Request, way: str, gap: int) -> float:
    """Tokens of a speculative step on average, once `gap` tokens are written."""
    steps: list[SpecStep] = []
    _Scripted(graphs, way, gap, steps).run([request])
    counted = [s.accepted + 1 for s in steps if s.position >= len(request.ids) + gap]
    return statistics.mean(counted) if counted else float("nan")


def main(arguments: list[str]) -> None:
    """Print the means by kind of prompt."""
    parser = argparse.ArgumentParser(prog="python -m bench.stale_draft", description=__doc__)
    parser.add_argument("--bundle", type=Path, required=True, help="folder of the bundle")
    parser.add_argument("--gaps", type=int, nargs="+", default=[8, 32], help="tokens written by the target alone")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens per prompt")
    parser.add_argument("--every", type=int, default=1, help="take every n-th prompt")
    options = parser.parse_args(arguments)
    if min(options.every, options.tokens) < 1 or min(options.gaps) < 0:
        raise UserError("--every and --tokens are counts of at least 1, and a gap of at least 0; correct them")
    graphs, tokenizer = Graphs(read_pair(options.bundle)), load_tokenizer(options.bundle)
    prompts = load_prompts(PROMPTS)[:: options.every]
    print("| gap | prompts | " + " | ".join(f"{w}, tokens/step" for w in WAYS) + " |\n" + "|---" * 5 + "|")
    for gap in options.gaps:
        found: dict[tuple[str, str], list[float]] = {}
        for _, kind, text in each(prompts, f"gap {gap}, prompts"):
            request = Request(tuple(tokenizer.encode(text).ids), Params(), options.tokens)
            for way in WAYS:
                found.setdefault((kind, way), []).append(tokens_per_step(graphs, request, way, gap))
        for kind in dict.fromkeys(kind for _, kind, _ in prompts):
            means = " | ".join(f"{statistics.mean(found[kind, way]):.2f}" for way in WAYS)
            print(f"| {gap} | {kind} | {means} |")


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
