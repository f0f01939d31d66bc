"""Ways side by side: every block serves one request by each way, in random order, and ratios are taken within a block.

Other load on the machine slows a whole block and cancels in its ratios. Each answer is compared with that of the first
way; a way with an answer that differs has no time.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from bench.demo import ENTROPIES, Prompt, request
from bench.plots import bars, panels
from bench.table import markdown
from bench.wall.ways import Ways
from model.progress import each
from trnspec.engine.request import Params

SAMPLED = {0.0: Params(), 0.6: Params(0.6, top_p=0.95)}
Rows = list[dict[str, Any]]


class Block(NamedTuple):
    """A prompt in a round at a temperature."""

    prompt: Prompt
    temperature: float
    round: int


def measure(ways: Ways, asked: Sequence[tuple[Prompt, float]], tokens: int, rounds: int, seed: int = 0) -> Rows:
    """A run for each block and way: milliseconds a token, to the first token and after it, and whether its ids equal
    those of the first way."""
    rng, runs = random.Random(seed), []
    alone, numbers = next(iter(ways.of)), {prompt.name: n for n, (prompt, _) in enumerate(asked)}
    for way in ways.of.values():
        way(request(asked[0][0], Params(), tokens))
    blocks = [Block(prompt, temperature, n) for n in range(rounds) for prompt, temperature in asked]
    for block in each(rng.sample(blocks, len(blocks)), "blocks"):
        params = replace(SAMPLED[block.temperature], seed=numbers[block.prompt.name])
        question = request(block.prompt, params, tokens)
        answers = {name: ways.of[name](question) for name in rng.sample(list(ways.of), len(ways.of))}
        for name in ways.of:
            answer = answers[name]
            own = block.temperature > 0 and name in ways.own_noise
            runs.append(
                {"block": (block.prompt.name, block.temperature, block.round), "entropy": block.prompt.entropy,
                 "temperature": block.temperature, "way": name, "tokens": len(answer.ids), "steps": answer.steps,
                 "tokens_per_step": answer.tokens_per_step,
                 "ms": 1e3 * answer.seconds / max(1, len(answer.ids)), "first_ms": 1e3 * answer.first,
                 "itl_ms": 1e3 * (answer.seconds - answer.first) / max(1, len(answer.ids) - 1),
                 "same": None if own else answer.ids == answers[alone].ids}
            )  # fmt: skip
    return runs


def spread(values: Sequence[float]) -> list[float]:
    """p20, p50 and p80."""
    cuts = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else list(values) * 9
    return [round(v, 4) for v in (cuts[1], statistics.median(values), cuts[7])]


def interval(values: Sequence[float]) -> list[float]:
    """Between which of these values the median of all that might be drawn lies, 19 times of 20, whatever their law.

    As many of n values are below that median as of n coins show heads. Of fewer than six the least and the most.
    """
    ranked, count = sorted(values), len(values)
    shares = itertools.accumulate(math.comb(count, heads) / 2**count for heads in range(count))
    rank = max(0, sum(share <= 0.025 for share in shares) - 1)
    return [round(ranked[rank], 4), round(ranked[-1 - rank], 4)]


def within(middle: float, between: Sequence[float]) -> str:
    """A median and its interval, for a table."""
    low, high = between
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def aggregate(runs: Rows, references: Sequence[str]) -> Rows:
    """A row for each temperature, class of prompts and way: medians, and times the references within a block.

    `times` are ratios of the whole time, `times_itl` of the time after the first token and `times_first` of the time to
    it, the last two of the first reference alone. A way with a different answer has neither times nor ratios.
    """
    by_block = {(*run["block"], run["way"]): run for run in runs}
    rows: Rows = []
    ways = dict.fromkeys(run["way"] for run in runs)
    for temperature in sorted({run["temperature"] for run in runs}):
        for entropy in ENTROPIES:
            for way in ways:
                own = [r for r in runs if (r["temperature"], r["entropy"], r["way"]) == (temperature, entropy, way)]
                if own:
                    about = {"temperature": temperature, "entropy": entropy, "way": way, "source": "wall"}
                    rows.append(about | _row(own, by_block, references))
    return rows


def _row(own: Rows, by_block: dict[Any, dict[str, Any]], references: Sequence[str]) -> dict[str, Any]:
    compared = [r["same"] for r in own if r["same"] is not None]
    row = {
        "runs": len(own), "same": sum(compared), "compared": len(compared),
        "tokens": sum(r["tokens"] for r in own), "steps": sum(r["steps"] for r in own),
    }  # fmt: skip
    if all(r["tokens_per_step"] for r in own):
        row["tokens_per_step"] = round(statistics.median(r["tokens_per_step"] for r in own), 2)
    if not all(compared):
        return row

    def ratios(figure: str, reference: str) -> list[float]:
        return spread([by_block[(*r["block"], reference)][figure] / r[figure] for r in own])

    row["ms"] = spread([r["ms"] for r in own])
    row["times"] = {name: ratios("ms", name) for name in references}
    # an answer of one token has no time after it
    if all(r["first_ms"] and r["itl_ms"] for r in own):
        row |= {name: spread([r[name] for r in own])[1] for name in ("itl_ms", "first_ms")}
        row |= {"times_itl": ratios("itl_ms", references[0]), "times_first": ratios("first_ms", references[0])}
    return row


def table(rows: Rows) -> str:
    """A line for each row; no time is shown beside a text that differs."""
    references = list(dict.fromkeys(name for r in rows for name in r.get("times", ())))
    hot = any(r["temperature"] for r in rows)
    heads = ["T"] * hot + ["prompts", "way", "ms/token p50 (wall)", "tokens/step"]
    heads += [f"speed, {name} = 1 (wall)" for name in references] + ["same text"]
    lines = []
    for r in rows:
        cells = [f"{r['temperature']:g}"] * hot + [r["entropy"], r["way"], f"{r['ms'][1]:.2f}" if "ms" in r else "-"]
        cells.append(f"{r['tokens_per_step']:.2f}" if "tokens_per_step" in r else "")
        cells += [f"{r['times'][name][1]:.2f}" if "times" in r else "-" for name in references]
        lines.append([*cells, f"{r['same']} of {r['compared']}" if r["compared"] else "own noise"])
    return markdown(heads, lines)


def picture(rows: Rows) -> Figure:
    """Milliseconds a token, p20 to p80; of ways that differ in k alone the fastest."""
    groups = list(dict.fromkeys((r["temperature"], r["entropy"]) for r in rows))
    figure, axes = panels(-(-len(groups) // 2), 2)
    for panel, (temperature, entropy) in zip(axes, groups, strict=False):
        best: dict[str, dict[str, Any]] = {}
        for r in (r for r in rows if (r["temperature"], r["entropy"]) == (temperature, entropy) and "ms" in r):
            name = r["way"].split(", k ")[0]
            best[name] = min(best.get(name, r), r, key=lambda r: r["ms"][1])
        bars(panel, {r["way"]: r["ms"] for r in best.values()})
        panel.set(title=f"{entropy} prompts, T {temperature:g}", xlabel="wall ms a token, p50 with p20 to p80")
    return figure
