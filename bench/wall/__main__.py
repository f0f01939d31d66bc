"""`python -m bench.wall [--ways readme|drafters|vllm]`: the demo pair served by several ways side by side, wall time.

readme: ours with and without speculation, transformers greedy and assisted; drafters: every drafter of the demo pair
at several k; vllm: servers of our worker and of vLLM's own engine. fp32, one thread, ways in random order. Numbers
describe the demo pair on this machine and say nothing about Qwen3-32B.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.demo import MODELS, count, prompts, spec
from bench.plots import save
from bench.provenance import header, read_result, said, write_result
from bench.wall.harness import SAMPLED, aggregate, measure, picture, table
from bench.wall.ways import SETS
from model.errors import UserError, run_cli

README = Path(__file__).resolve().parents[2] / "README.md"
BEGIN, END = "<!-- written by bench.wall: begin -->", "<!-- written by bench.wall: end -->"


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.wall", description=__doc__)
    parser.add_argument("--ways", default="readme", choices=SETS, help="the set of ways (default: readme)")
    parser.add_argument("--bundle", type=Path, default=Path("bundles/demo"), help="readme: bundle of the demo pair")
    parser.add_argument("--drafters", nargs="+", default=list(MODELS), choices=MODELS, help="drafters: which")
    parser.add_argument("--ks", nargs="+", type=count(), default=[3, 7, 15], help="drafters: drafts of a step")
    parser.add_argument("--vllm", type=Path, help="vllm: the command of an environment with vLLM and this package")
    parser.add_argument("--batch", type=count(), default=1, help="vllm: equal requests at once")
    parser.add_argument("--port", type=count(), default=8766, help="vllm: the first of four")
    parser.add_argument("--folder", type=Path, default=Path("bundles/wall"), help="for bundles and logs")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0], choices=SAMPLED)
    parser.add_argument("--tokens", type=count(2), default=128, help="new tokens of each request (default: 128)")
    parser.add_argument("--rounds", type=count(), default=1, help="times that each prompt is served (default: 1)")
    parser.add_argument("--every", type=count(), default=1, help="take every n-th prompt of the demo's")
    parser.add_argument("--show", type=Path, help="measure nothing: the table of this file of results")
    parser.add_argument("--out", type=Path, help="write the results here, JSON")
    parser.add_argument("--picture", type=Path, help="write the picture here, SVG")
    parser.add_argument("--readme", action="store_true", help="write the table into README.md")
    options = parser.parse_args(arguments)
    if options.ways == "drafters":
        for drafter, k in ((drafter, k) for drafter in options.drafters for k in options.ks):
            spec(options.folder, drafter, k).check()
    return options


def run(options: argparse.Namespace) -> dict[str, Any]:
    """A header, the settings and the aggregated rows."""
    made_by = header("wall")
    asked = [(prompt, t) for t in options.temperatures for prompt in prompts(options.every)]
    with ExitStack() as stack:
        ways = SETS[options.ways](options, stack)
        runs = measure(ways, asked, options.tokens, options.rounds)
    settings = f"{ways.settings}, {options.tokens} new tokens, rounds: {options.rounds}"
    return made_by | {"ways": options.ways, "settings": settings, "rows": aggregate(runs, ways.references)}


def section(result: dict[str, Any]) -> str:
    """The README's table with its header."""
    return "\n".join([BEGIN, "", f"{said(result)}; {result['settings']}.", "", table(result["rows"]), "", END])


def written(readme: str, result: dict[str, Any]) -> str:
    """The README with its table replaced; UserError without the two marks."""
    if readme.count(BEGIN) != 1 or readme.count(END) != 1:
        raise UserError(f"{README} lacks the marks {BEGIN} and {END}; put them where the numbers belong")
    return readme[: readme.index(BEGIN)] + section(result) + readme[readme.index(END) + len(END) :]


def main(arguments: list[str]) -> None:
    """Measure, or read a result; print its table; exit 1 if any of our ids differ."""
    options = _options(arguments)
    result = read_result(options.show, "rows") if options.show else run(options)
    if options.out:
        write_result(options.out, result)
    if options.picture:
        save(picture(result["rows"]), options.picture)
    if options.readme:
        README.write_text(written(README.read_text(encoding="utf-8"), result), encoding="utf-8")
    print(f"{said(result)}; {result['settings']}.\n\n{table(result['rows'])}")
    if any(
        r["same"] < r["compared"] for r in result["rows"] if "transformers" not in r["way"] and "vLLM" not in r["way"]
    ):
        raise SystemExit(1)


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
