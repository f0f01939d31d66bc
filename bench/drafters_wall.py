"""`python -m bench.drafters_wall`: every drafter of the demo target side by side in one run, wall time a token.

Ours with each drafter at each k and alone, and transformers alone, assisted by the chain's draft, and with prompt
look-up; greedy, and at T 0.6, top-p 0.95. One request at a time, fp32, one thread, ways in random order.
Tokens a step of transformers are those of a pass of its target, the prompt's among them. It describes the demo pair on
this machine and says nothing about Qwen3-32B.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench.drafters import MODELS, Case
from bench.provenance import header, said, write_result
from bench.serving.plots import COLOURS, Bar, bars
from bench.speedup import ENTROPIES, Way, theirs
from bench.tune.text import markdown
from compile.build import build
from model.bundle.manifest import read_bundle
from model.errors import UserError, run_cli
from model.progress import each, progress
from model.serving.ready import serve
from model.serving.request import Params, Request
from model.serving.runtime import Graphs
from model.serving.text import load_tokenizer

_DEMO = Path(__file__).resolve().parent.parent / "demo"
KS, AIM = (3, 7, 15), 1.3
ALONE, GREEDY, ASSISTED, LOOK_UP = "target alone", "transformers alone", "transformers assisted", "transformers look-up"
SAMPLED = {0.0: Params(), 0.6: Params(0.6, top_p=0.95)}
Rows = list[dict[str, Any]]


def name_of(drafter: str, k: int) -> str:
    """A way of ours."""
    return f"{drafter}, k {k}" if k else ALONE


def ours(folder: Path, drafter: str, k: int) -> tuple[Graphs, Way]:
    """A bundle of one slot with a drafter, built if it is not there, and how it serves a request."""
    graphs = Graphs(read_bundle(build(Case(drafter, k, 1, "fp32").spec(folder / f"{drafter}-k{k}"))))

    def way(request: Request) -> tuple[list[int], float, float]:
        run = serve(graphs, request, k > 0)
        return run.result.ids, run.seconds, run.result.tokens_per_step

    return graphs, way


def transformers_ways(tokens: int) -> dict[str, Way]:
    """The same checkpoints in transformers."""
    target, draft = (
        AutoModelForCausalLM.from_pretrained(_DEMO / name, dtype=torch.float32) for name in ("target", "draft")
    )
    options: dict[str, dict[str, Any]] = {
        GREEDY: {}, ASSISTED: {"assistant_model": draft}, LOOK_UP: {"prompt_lookup_num_tokens": max(KS)}
    }  # fmt: skip
    return {name: theirs(target, tokens, **more) for name, more in options.items()}


def measure(options: argparse.Namespace) -> Rows:
    """A row for every temperature, prompt and way."""
    torch.set_num_threads(1)
    asked = [("none", 0), *((drafter, k) for drafter in options.drafters for k in options.ks)]
    ways: dict[str, Way] = {}
    with progress("bundles", len(asked), "bundles") as task:
        for drafter, k in asked:
            graphs, ways[name_of(drafter, k)] = ours(options.folder, drafter, k)
            task.advance()
    ways |= transformers_ways(options.tokens)
    tokenizer, rng, rows = load_tokenizer(graphs.bundle.path), random.Random(0), []
    prompts = json.loads((_DEMO / "prompts.json").read_text(encoding="utf-8"))["prompts"][:: options.every]
    stops = graphs.bundle.config("target").eos_token_ids
    jobs = [(number, prompt, t) for t in options.temperatures for number, prompt in enumerate(prompts)]
    for number, prompt, temperature in each(jobs, "prompts"):
        params = replace(SAMPLED[temperature], seed=number)
        request = Request(tuple(tokenizer.encode(prompt["text"]).ids), params, options.tokens, stops)
        if not number:
            # what is compiled or cached at a first request of a kind
            for way in ways.values():
                way(request)
        rows += _rows(ways, request, rng, {k: prompt[k] for k in ("name", "entropy")} | {"temperature": temperature})
    return rows


def _rows(ways: dict[str, Way], request: Request, rng: random.Random, about: dict[str, Any]) -> Rows:
    """A row a way of one request, asked in random order."""
    runs = {name: ways[name](request) for name in rng.sample(list(ways), len(ways))}
    expected, drawn = runs[ALONE][0], request.params.temperature > 0
    rows = []
    for name in ways:
        ids, seconds, per_step = runs[name]
        # transformers draws with a noise of its own
        same = None if drawn and name in (GREEDY, ASSISTED, LOOK_UP) else ids == expected
        ms = round(1e3 * seconds / max(1, len(ids)), 5)
        row = {"way": name, "source": "wall", "ms_per_token": ms, "tokens_per_step": round(per_step, 4)}
        rows.append(about | row | {"identical": same})
    return rows


def chosen(rows: Rows, temperature: float, entropy: str) -> dict[str, Rows]:
    """The rows of each way."""
    ways: dict[str, Rows] = {}
    for row in rows:
        if (row["temperature"], row["entropy"]) == (temperature, entropy):
            ways.setdefault(row["way"], []).append(row)
    return ways


def median(rows: Rows, figure: str) -> float:
    """Of one way's rows."""
    return statistics.median(r[figure] for r in rows)


def gain(rows: Rows, over: Rows) -> float:
    """How much faster a way is than a different one: the median over prompts, whose ways ran in a row."""
    other = {r["name"]: r["ms_per_token"] for r in over}
    return statistics.median(other[r["name"]] / r["ms_per_token"] for r in rows)


def best(ways: dict[str, Rows], drafter: str) -> str | None:
    """The drafter's way with the least median time a token."""
    own = [name for name in ways if name.startswith(f"{drafter}, k ")]
    return min(own, key=lambda name: median(ways[name], "ms_per_token"), default=None)


def table(rows: Rows) -> str:
    """Medians of each way; no time is shown beside a text that differs."""
    lines = []
    for temperature in sorted({r["temperature"] for r in rows}):
        for entropy in ENTROPIES:
            ways = chosen(rows, temperature, entropy)
            for name, own in ways.items():
                compared = [r["identical"] for r in own if r["identical"] is not None]
                if all(compared):
                    ms, faster = f"{median(own, 'ms_per_token'):.2f}", f"{gain(own, ways[ALONE]):.2f}"
                else:
                    ms = faster = "-"
                same = f"{sum(compared)} of {len(compared)}" if compared else "own noise"
                steps = f"{median(own, 'tokens_per_step'):.2f}"
                lines.append([f"{temperature:g}", entropy, name, ms, steps, faster, same])
    heads = ["T", "prompts", "way", "ms/token p50 (wall)", "tokens a step p50", "times our target alone", "same text"]
    return markdown(heads, lines)


def answer(rows: Rows) -> str:
    """Whether the parallel drafter is 1.3 times the chain on open prompts, each at its best k, and why."""
    said_of = []
    for temperature in sorted({r["temperature"] for r in rows}):
        ways = chosen(rows, temperature, "open")
        parallel, chain = best(ways, "parallel"), best(ways, "chain")
        if not parallel or not chain:
            return "Parallel against chain: one of them was not measured."
        ratio = gain(ways[parallel], ways[chain])
        parts = [
            f"{name}: {median(own, 'tokens_per_step'):.2f} tokens a step of {_step_ms(own):.2f} ms"
            for name, own in ((n, ways[n]) for n in (parallel, chain))
        ]
        held = "reached" if ratio >= AIM else "not reached"
        said_of.append(f"T {temperature:g}: {ratio:.2f} times the chain, {AIM} is {held} ({'; '.join(parts)})")
    return "Parallel on open prompts, best k each, wall. " + ". ".join(said_of) + "."


def _step_ms(rows: Rows) -> float:
    return statistics.median(r["ms_per_token"] * r["tokens_per_step"] for r in rows)


def picture(rows: Rows) -> str:
    """Bars of each drafter at its best k and of the others, milliseconds a token, p20 to p80 over prompts."""
    groups = []
    for temperature in sorted({r["temperature"] for r in rows}):
        of_entropy = [chosen(rows, temperature, entropy) for entropy in ENTROPIES]
        drafters = {name.split(",")[0] for name in of_entropy[0] if ", k " in name}
        for drafter in [*sorted(drafters), ALONE, GREEDY, ASSISTED, LOOK_UP]:
            group = []
            for ways, colour in zip(of_entropy, COLOURS, strict=False):
                name = best(ways, drafter) or drafter
                times = [r["ms_per_token"] for r in ways[name]]
                # of one prompt alone both are its own time
                low, *_, high = statistics.quantiles(times if times[1:] else times * 2, n=5, method="inclusive")
                at, steps = median(ways[name], "ms_per_token"), median(ways[name], "tokens_per_step")
                k = f"k {name.split(', k ')[1]}, " if ", k " in name else ""
                group.append(Bar(colour, at, low, high, f"{at:.2f} ({k}{steps:.1f})"))
            groups.append((f"{drafter}, T {temperature:g}", group))
    title = "Wall ms a token of the demo pair, p20 to p80 over prompts; in brackets k and tokens a step"
    return bars(title, "ms", groups, list(zip((f"{e} prompts" for e in ENTROPIES), COLOURS, strict=False)))


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.drafters_wall", description=__doc__)
    parser.add_argument("--drafters", nargs="+", default=list(MODELS), choices=MODELS, help="which to run")
    parser.add_argument("--ks", nargs="+", type=int, default=list(KS), help="drafts a step (default: 3 7 15)")
    parser.add_argument("--temperatures", nargs="+", type=float, default=list(SAMPLED), choices=SAMPLED)
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of each request (default: 128)")
    parser.add_argument("--every", type=int, default=1, help="take every n-th prompt of the demo's")
    parser.add_argument("--folder", type=Path, default=Path("bundles/drafters"), help="for the bundles")
    parser.add_argument("--report", type=Path, help="measure nothing: the table of this file of rows")
    parser.add_argument("--out", type=Path, help="write the rows here, JSON, and the picture beside them, SVG")
    options = parser.parse_args(arguments)
    for drafter in options.drafters:
        for k in options.ks:
            Case(drafter, k, 1, "fp32").spec(options.folder).check()
    return options


def main(arguments: list[str]) -> None:
    """Measure, or read what was measured; print the table and the answer; exit 1 if any of our ids differ."""
    options = _options(arguments)
    if options.report:
        try:
            result = json.loads(options.report.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{options.report} cannot be read ({type(error).__name__}); measure with --out") from error
    else:
        result = header("wall") | {"tokens": options.tokens, "ks": options.ks}
        result |= {"rows": measure(options)}
    rows = result["rows"]
    if options.out:
        write_result(options.out, result)
        options.out.with_suffix(".svg").write_text(picture(rows), encoding="utf-8")
    print("\n\n".join([f"{said(result)}; {result['tokens']} new tokens.", table(rows), answer(rows)]))
    if any(r["identical"] is False for r in rows if ", k " in r["way"]):
        raise SystemExit(1)


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
