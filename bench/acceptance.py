"""`python -m bench.acceptance`: how many drafts of each drafter the demo target accepts, by position, for k of 1 to 15.

Every drafter drafts k ids a step for the demo's prompts and beginnings of held-out prose, at T 0, at T 0.6, top-p 0.95,
and at T 1, in eager torch. By position is the share of the steps of most drafts whose first n were all accepted. With
--weights a drafter's drafts have each of these weights of the noise, 0 being the likeliest ids. The file of --out is a
trace of `bench.tune --traces`. All answers must be equal: one that differs ends the run with 1. It describes the demo
pair, and says nothing about Qwen3-32B.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from bench.demo import ENTROPIES, MODELS, Prompt, count, prompts, request
from bench.eager import engine
from bench.plots import line, panels, save
from bench.provenance import header, said, write_result
from bench.table import markdown
from demo.corpus import load_prose
from model.errors import run_cli
from model.progress import each
from trnspec.engine.request import Params, Result
from trnspec.llm import Output

BATCH, KS, POSITIONS = 8, (1, 3, 7, 15), (1, 2, 3, 4, 6, 8, 12, 15)
TEMPERATURES = {0.0: Params(), 0.6: Params(0.6, top_p=0.95), 1.0: Params(1.0)}
HELD_OUT = "held-out"
CLASSES = (*ENTROPIES, HELD_OUT)
Rows = list[dict[str, Any]]


def held_out(every: int = 1) -> list[Prompt]:
    """Every n-th of twelve sentences' beginnings from the prose that no model was trained on."""
    lines = [line for text in load_prose().held_out for line in text if len(line) > 200]
    chosen = lines[:: max(1, len(lines) // 12)][:12:every]
    return [Prompt(f"held-out {n}", HELD_OUT, line[:60].rsplit(" ", 1)[0]) for n, line in enumerate(chosen)]


def measure(options: argparse.Namespace, asked: Sequence[Prompt]) -> Rows:
    """A table for each drafter, weight, class of prompts and temperature, with its answers' ids."""
    rows: Rows = []
    for name, weight in itertools.product(options.drafters, options.weights):
        shown = name if weight is None else f"{name}, noise {weight:g}"
        for temperature, params in TEMPERATURES.items():
            requests, outputs = [request(p, params, options.tokens) for p in asked], dict[int, list[Output]]()
            for k in each(options.ks, f"{shown}, T {temperature:g}"):
                outputs[k] = [_output(result) for result in engine(name, k, BATCH, weight).run(requests)]
            rows += [{"draft": shown} | row for row in tables(asked, temperature, outputs)]
    return rows


def _output(result: Result) -> Output:
    return Output(tuple(result.ids), "", result.reason, result.steps, 0.0, drafts_kept=tuple(result.accepted))


def tables(asked: Sequence[Prompt], temperature: float, outputs: dict[int, list[Output]]) -> Iterator[dict[str, Any]]:
    """Of one drafter, a table for each class of prompts; `ids` are every answer's, to be compared and left out."""
    for entropy in CLASSES:
        of_k = {k: [o for p, o in zip(asked, own, strict=True) if p.entropy == entropy] for k, own in outputs.items()}
        steps = sum(o.steps for o in of_k[max(of_k)])
        if steps:
            kept = [sum(o.drafts_kept[n] for o in of_k[max(of_k)] if n < len(o.drafts_kept)) for n in range(max(of_k))]
            yield {
                "name": f"demo {entropy}, T {temperature:g}", "entropy": entropy, "temperature": temperature,
                "steps": steps, "unconditional": [round(n / steps, 4) for n in kept],
                "tokens_per_step": {str(k): round(_tokens_a_step(own), 3) for k, own in of_k.items()},
                "ids": [[o.ids for o in own] for own in of_k.values()],
            }  # fmt: skip


def _tokens_a_step(outputs: Sequence[Output]) -> float:
    """On average; the first token of a prompt belongs to no step."""
    return sum(len(o.ids) - 1 for o in outputs) / max(1, sum(o.steps for o in outputs))


def differences(rows: Rows) -> int:
    """Answers that differ from the first ones of the same requests; the ids are taken out of the rows."""
    first: dict[str, Any] = {}
    number = 0
    for row in rows:
        for ids in row.pop("ids"):
            expected = first.setdefault(row["name"], ids)
            number += sum(own != other for own, other in zip(ids, expected, strict=True))
    return number


def text(rows: Rows) -> str:
    """Tokens a step by k, and the shares by position."""
    ks = sorted({int(k) for r in rows for k in r["tokens_per_step"]})
    by_k = [[_cell(r["tokens_per_step"].get(str(k))) for k in ks] for r in rows]
    shares = [dict(enumerate(r["unconditional"], 1)) for r in rows]
    by_position = [[_cell(share.get(n)) for n in POSITIONS] for share in shares]
    named = [[r["draft"], r["entropy"], f"{r['temperature']:g}"] for r in rows]
    heads = ["drafter", "prompts", "T"]
    return (
        f"Tokens a step by k:\n\n{markdown([*heads, *map(str, ks)], map(list.__add__, named, by_k))}\n\n"
        f"Share of steps whose first n drafts were all accepted, at the largest k:\n\n"
        + markdown([*heads, *map(str, POSITIONS)], map(list.__add__, named, by_position))
    )


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def picture(rows: Rows) -> Figure:
    """Tokens a step over k, a panel for each class of prompts and temperature."""
    figure, axes = panels(len(CLASSES), len(TEMPERATURES))
    names = list(dict.fromkeys(r["name"] for r in rows))
    for panel, name in zip(axes, names, strict=False):
        for r in (r for r in rows if r["name"] == name):
            line(panel, r["draft"], {int(k): (value,) * 3 for k, value in r["tokens_per_step"].items()})
        panel.set(title=name, xlabel="k", ylabel="tokens a step")
    axes[0].legend()
    return figure


def main(arguments: list[str]) -> None:
    """Print the tables; exit 1 if any id differs."""
    parser = argparse.ArgumentParser(prog="python -m bench.acceptance", description=__doc__)
    parser.add_argument("--drafters", nargs="+", default=list(MODELS), choices=MODELS, help="which (default: all)")
    parser.add_argument("--tokens", type=count(2), default=64, help="new tokens of each request (default: 64)")
    parser.add_argument("--every", type=count(), default=1, help="take every n-th prompt of the demo's")
    parser.add_argument("--ks", nargs="+", type=int, default=KS, choices=KS, help="which k (default: all)")
    parser.add_argument("--weights", nargs="+", type=float, default=[None], help="of the noise in drafts")
    parser.add_argument("--out", type=Path, help="write the tables here, JSON, and the picture beside them, SVG")
    options = parser.parse_args(arguments)
    made_by, rows = header("wall"), measure(options, [*prompts(options.every), *held_out(options.every)])
    different = differences(rows)
    if options.out:
        write_result(options.out, made_by | {"tokens": options.tokens, "differences": different, "tables": rows})
        save(picture(rows), options.out.with_suffix(".svg"))
    print(f"{said(made_by)}; {options.tokens} new tokens; {different} answers differ.\n\n{text(rows)}")
    if different:
        raise SystemExit(1)


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
