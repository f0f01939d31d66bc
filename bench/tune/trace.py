"""`python -m bench.tune.trace`: which drafts of a step are accepted, by position, as `bench.tune --traces` reads it.

Prompts are served by `--bundle DIR`, by default by the demo target with each drafter at k 7, at T 0, at T 0.6 with
top-p 0.95, and at T 1. A table's `unconditional` are the shares of all steps whose first n drafts were accepted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import Any

from bench import demo
from bench.demo import Prompt
from bench.options import count, input_file, output_file
from bench.provenance import header, sentence, write_result
from bench.table import markdown
from model.errors import UserError, run_cli
from model.progress import each
from trnspec.engine.request import Params
from trnspec.llm import LLM

_K, _BATCH = 7, 8
SAMPLINGS = {0.0: Params(), 0.6: Params(0.6, top_p=0.95), 1.0: Params(1.0)}


def tables(llm: LLM, name: str, prompts: Sequence[Prompt], tokens: int) -> Iterator[dict[str, Any]]:
    """A row for each temperature and class of prompts."""
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
    """Tokens a step by k, from the shares."""
    tokens = [list(accumulate(r["unconditional"], initial=1.0))[1:] for r in rows]
    cells = [[r["draft"], r["name"], ", ".join(f"{n:.2f}" for n in of_k)] for r, of_k in zip(rows, tokens, strict=True)]
    return markdown(["drafter", "prompts", "tokens a step at k 1, 2, ..."], cells)


def main(arguments: list[str]) -> None:
    """Print tokens a step."""
    parser = argparse.ArgumentParser(prog="python -m bench.tune.trace", description=__doc__)
    parser.add_argument("--bundle", type=Path, nargs="+", default=[], help="bundles of pairs")
    parser.add_argument("--drafters", nargs="+", default=list(demo.DRAFTERS), choices=demo.DRAFTERS, help="of the demo")
    parser.add_argument("--prompts", type=input_file, help="a prompt a line (default: the demo's)")
    parser.add_argument("--tokens", type=count(2), default=64, help="new tokens of each request (default: 64)")
    parser.add_argument("--folder", type=Path, default=Path("bundles/trace"), help="for the demo's bundles")
    parser.add_argument("--out", type=output_file, help="write the tables here, JSON")
    options = parser.parse_args(arguments)
    prompts, made_by, rows = demo.prompts_of(options.prompts), header("wall"), list[dict[str, Any]]()
    folders = {str(folder): folder for folder in options.bundle} or {
        name: demo.bundle(options.folder / name, name, _K, batch=_BATCH)
        for name in each(options.drafters, "building bundles")
    }
    for name, folder in each(folders.items(), "bundles"):
        with LLM(folder) as llm:
            if not llm.bundle.spec.k:
                raise UserError(f"{folder} is a target without a drafter (k 0); give the bundle of a pair")
            rows += tables(llm, llm.bundle.spec.drafter if options.bundle else name, prompts, options.tokens)
    if options.out:
        write_result(options.out, made_by | {"tokens": options.tokens, "tables": rows})
    print(f"{sentence(made_by)}; {options.tokens} new tokens; tokens a step.\n\n{text(rows)}")


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
