"""`python -m bench.tune.trace`: measures accepted drafts by position, for `bench.tune --traces`.

Prompts are served from each `--bundle`, by default from the demo target with each drafter at k 7, at temperature 0, at
0.6 with top-p 0.95, and at 1. `unconditional` of a table are the shares of steps whose first n drafts are accepted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import Any

from bench import demo
from bench.demo import Prompt
from bench.options import count, output_file
from bench.provenance import header, sentence, write_result
from bench.table import markdown
from model.errors import UserError, command_line, run_cli
from model.progress import each
from trnspec.engine.request import Params
from trnspec.llm import LLM

_K, _BATCH = 7, 8
SAMPLINGS = {0.0: Params(), 0.6: Params(0.6, top_p=0.95), 1.0: Params(1.0)}


def tables(llm: LLM, name: str, prompts: Sequence[Prompt], tokens: int) -> Iterator[dict[str, Any]]:
    """One table for each temperature and class of prompts."""
    for temperature, params in SAMPLINGS.items():
        for entropy in dict.fromkeys(p.entropy for p in prompts):
            texts = [p.text for p in prompts if p.entropy == entropy]
            seeded = [replace(params, seed=n) for n in range(len(texts))]
            outputs = llm.generate(texts, seeded, max_new_tokens=tokens)
            steps = sum(o.steps for o in outputs)
            accepted = [sum(column) / steps for column in zip_longest(*(o.accepted for o in outputs), fillvalue=0)]
            yield {
                "draft": name, "name": f"{entropy}, T {temperature:g}", "entropy": entropy, "temperature": temperature,
                "steps": steps, "unconditional": [round(share, 4) for share in accepted],
            }  # fmt: skip


def text(rows: Sequence[dict[str, Any]]) -> str:
    """Tokens per step by k, from the shares."""
    tokens = [list(accumulate(r["unconditional"], initial=1.0))[1:] for r in rows]
    cells = [[r["draft"], r["name"], ", ".join(f"{n:.2f}" for n in of_k)] for r, of_k in zip(rows, tokens, strict=True)]
    return markdown(["drafter", "prompts", "tokens per step at k 1, 2, ..."], cells)


def main(arguments: list[str]) -> None:
    """Print tokens per step."""
    about = "Measure accepted drafts by position and tokens per step, for bench.tune --traces."
    parser = command_line("bench.tune.trace", about, "--bundle bundles/demo --out trace.json")
    bundles = "bundles of a target and a drafter (default: the demo's, of each drafter)"
    parser.add_argument("--bundle", type=Path, nargs="+", default=[], help=bundles)
    parser.add_argument("--folder", type=Path, default=Path("bundles/trace"), help="folder for the demo's bundles")
    parser.add_argument("--tokens", type=count(2), default=64, help="new tokens of each request (default: 64)")
    parser.add_argument("--out", type=output_file, help="write the tables to this JSON file")
    options = parser.parse_args(arguments)
    prompts, made_by, rows = demo.prompts(), header("wall"), list[dict[str, Any]]()
    folders = {str(folder): folder for folder in options.bundle} or {
        name: demo.bundle(options.folder / name, name, _K, batch=_BATCH)
        for name in each(list(demo.DRAFTERS), "building bundles")
    }
    for name, folder in each(folders.items(), "bundles"):
        with LLM(folder) as llm:
            if not llm.bundle.spec.k:
                raise UserError(f"{folder} is a target without a drafter (k 0); give the bundle of a pair")
            rows += tables(llm, llm.bundle.spec.drafter if options.bundle else name, prompts, options.tokens)
    if options.out:
        write_result(options.out, made_by | {"tokens": options.tokens, "tables": rows})
    print(f"{sentence(made_by)}; {options.tokens} new tokens; tokens per step.\n\n{text(rows)}")


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
