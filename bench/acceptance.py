"""`python -m bench.acceptance`: how many drafts of each drafter the demo target accepts, by position, for k of 1 to 15.

Every drafter's bundle of k 15 serves the demo's prompts, greedy and at T 0.6, top-p 0.95, and each request limits its
drafts to k: a limited step accepts what one of a smaller k does. By position is the share of the steps of
15 drafts whose first n were all accepted. A draft draws with the noise of the target's draw; the control gives drafts
a noise of their own, by a different seed for the graph that drafts. The ids must be equal over all of it: one that
differs ends the run with 1. It describes the demo pair, and says nothing about Qwen3-32B.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.drafters import MODELS, Case, tokens_a_step
from bench.provenance import header, said, write_result
from bench.quality.__main__ import PROMPTS, load_prompts
from bench.serving.plots import COLOURS, Axes, Series, grid, lines
from bench.speedup import ENTROPIES
from bench.tune.text import markdown
from compile.build import build
from model.bundle.manifest import read_bundle
from model.drafting import KINDS
from model.errors import run_cli
from model.graph_io import StepInputs, StepOutputs
from model.progress import each
from model.serving.engine import Engine
from model.serving.ready import shape_of
from model.serving.request import Params, Request, Result
from model.serving.runtime import Graphs
from model.serving.text import load_tokenizer

MOST, BATCH = 15, 8
COUPLED, OWN = "the target's", "its own"
# the k of each, by the noise of the drafts
KS = {COUPLED: (1, 2, 3, 5, 7, 11, MOST), OWN: (1, 3, 7, MOST)}
POSITIONS = (1, 2, 3, 4, 6, 8, 12, MOST)
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class OwnNoise:
    """A bundle's graphs whose drafts are drawn with every seed changed: a control, not a way to serve."""

    graphs: Graphs

    def run(self, tag: str, bucket: int, inputs: StepInputs) -> StepOutputs:
        return self.graphs.run(tag, bucket, inputs)

    def draft(self, tag: str, bucket: int, inputs: StepInputs) -> np.ndarray:
        return self.graphs.draft(tag, bucket, inputs._replace(seeds=~inputs.seeds))


@dataclass(frozen=True)
class Asked:
    """A request with the class of its prompt."""

    entropy: str
    request: Request

    @property
    def key(self) -> tuple[str, float]:
        return self.entropy, self.request.params.temperature


def questions(folder: Path, options: argparse.Namespace) -> list[Asked]:
    """Each prompt once greedy and `samples` times drawn, for the bundle in the folder."""
    tokenizer, stops = load_tokenizer(folder), read_bundle(folder).config("target").eos_token_ids
    params = [Params(), *(Params(0.6, top_p=0.95, seed=seed) for seed in range(options.samples))]
    return [
        Asked(entropy, Request(tuple(tokenizer.encode(text).ids), asked, options.tokens, stops))
        for _, entropy, text in load_prompts(PROMPTS)[:: options.every]
        for asked in params
    ]


def engines(graphs: Graphs) -> dict[str, Engine]:
    """By the noise of the drafts; the host's drafts are not drawn."""
    shape = shape_of(graphs.bundle)
    served = {COUPLED: Engine(graphs, shape)}
    return served | ({OWN: Engine(OwnNoise(graphs), shape, separate=True)} if shape.separate else {})


def measure(options: argparse.Namespace) -> Rows:
    """A row a drafter, class of prompts, temperature and noise."""
    rows: Rows = []
    with tempfile.TemporaryDirectory() as name:
        for drafter in options.drafters:
            spec = Case(drafter, MOST, BATCH, "fp32").spec(Path(name) / drafter)
            graphs = Graphs(read_bundle(build(replace(spec, separate=KINDS[drafter].has_model))))
            asked = questions(graphs.bundle.path, options)
            for noise, engine in engines(graphs).items():
                drawn = [a for a in asked if noise == COUPLED or a.request.params.temperature]
                results = {k: _limited(engine, drawn, k) for k in each(KS[noise], f"{drafter}, noise {noise}")}
                rows += [{"drafter": drafter, "noise": noise} | row for row in _rows(drawn, results)]
            graphs.close()
    return rows


def _limited(engine: Engine, asked: Sequence[Asked], k: int) -> list[Result]:
    return engine.run([replace(a.request, k_limit=k) for a in asked])


def _rows(asked: Sequence[Asked], results: dict[int, list[Result]]) -> Iterator[dict[str, Any]]:
    """Of one engine, by k up to the most; `ids` are every answer's, to be compared and left out."""
    for key in dict.fromkeys(a.key for a in asked):
        of_k = {k: [r for a, r in zip(asked, own, strict=True) if a.key == key] for k, own in results.items()}
        most = max(of_k)
        steps = sum(r.steps for r in of_k[most])
        reached = np.sum([np.pad(r.accepted, (0, most - len(r.accepted))) for r in of_k[most]], 0)
        yield dict(zip(("entropy", "temperature"), key, strict=True)) | {
            "steps": steps,
            "by_position": [round(n / steps, 4) for n in reached.tolist()],
            "tokens_per_step": {k: round(tokens_a_step(of), 3) for k, of in of_k.items()},
            "ids": [[r.ids for r in of] for of in of_k.values()],
        }


def differences(rows: Rows) -> int:
    """Answers that differ from the first ones of the same requests; the ids are taken out of the rows."""
    first: dict[tuple[str, float], Any] = {}
    count = 0
    for row in rows:
        for ids in row.pop("ids"):
            expected = first.setdefault((row["entropy"], row["temperature"]), ids)
            count += sum(own != other for own, other in zip(ids, expected, strict=True))
    return count


def table(rows: Rows) -> str:
    """Tokens a step by k, and the shares by position."""
    by_k = [{k: f"{value:.2f}" for k, value in r["tokens_per_step"].items()} for r in rows]
    by_position = [{n: f"{value:.2f}" for n, value in enumerate(r["by_position"], 1)} for r in rows]
    return (
        f"Tokens a step by k:\n\n{_table(rows, by_k, KS[COUPLED])}\n\n"
        f"Share of steps whose first n drafts were all accepted, k {MOST}:\n\n{_table(rows, by_position, POSITIONS)}"
    )


def _table(rows: Rows, cells: Sequence[dict[int, str]], shown: Sequence[int]) -> str:
    lines_of = [
        [r["drafter"], r["entropy"], f"{r['temperature']:g}", r["noise"] if r["temperature"] else "none",
         *(of.get(n, "") for n in shown)]
        for r, of in zip(rows, cells, strict=True)
    ]  # fmt: skip
    return markdown(["drafter", "prompts", "T", "drafts' noise", *map(str, shown)], lines_of)


def picture(rows: Rows) -> str:
    """Tokens a step over k, a panel a class of prompts and temperature; dashed: drafts with a noise of their own."""
    drafters = list(dict.fromkeys(r["drafter"] for r in rows))
    panels = []
    for entropy in ENTROPIES:
        for temperature in sorted({r["temperature"] for r in rows}):
            series = []
            for r in (r for r in rows if (r["entropy"], r["temperature"]) == (entropy, temperature)):
                points = tuple(r["tokens_per_step"].items())
                colour, own = COLOURS[drafters.index(r["drafter"])], r["noise"] == OWN
                series.append(Series(r["drafter"] + ", own noise" * own, colour, points, dashed=own))
            axes = Axes(f"{entropy} prompts, T {temperature:g}", "k", "tokens a step", 420, 260, whole=True)
            panels.append(lines(axes, series))
    return grid(panels, 2)


def main(arguments: list[str]) -> None:
    """Print the tables; exit 1 if any id differs."""
    parser = argparse.ArgumentParser(prog="python -m bench.acceptance", description=__doc__)
    parser.add_argument("--drafters", nargs="+", default=list(MODELS), choices=MODELS, help="which (default: all)")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each request (default: 64)")
    parser.add_argument("--samples", type=int, default=1, help="drawn answers of each prompt (default: 1)")
    parser.add_argument("--every", type=int, default=1, help="take every n-th prompt of the demo's")
    parser.add_argument("--out", type=Path, help="write the rows here, JSON, and the picture beside them, SVG")
    options = parser.parse_args(arguments)
    rows = measure(options)
    different = differences(rows)
    result = header("wall") | {"tokens": options.tokens, "differences": different, "rows": rows}
    if options.out:
        write_result(options.out, result)
        options.out.with_suffix(".svg").write_text(picture(rows), encoding="utf-8")
    print(f"{said(result)}; {options.tokens} new tokens; {different} answers differ.")
    print(f"\n{table(rows)}")
    if different:
        raise SystemExit(1)


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
