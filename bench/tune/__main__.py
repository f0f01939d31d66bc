"""`python -m bench.tune`: choose drafter, k, tp, LNC and batch for Qwen3-32B before anything is compiled.

Expected ms per token = (launch + the drafter's passes + one target pass over k + 1 rows) / expected tokens of a step.
Passes are simulated from the kernels (nkisim); tokens are published, assumed, or those of --traces. Nothing here was
measured on Trainium. A setup whose rank exceeds its HBM is left out. `--article` compares the claims of AWS's article
on speculative decoding with the model.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from bench.options import count, input_file, output_file, positive
from bench.provenance import header, sentence
from bench.tune import acceptance, article, choose, passes, picture
from bench.tune.drafters import DRAFTERS, MAX_K, Setup
from model.errors import UserError, run_cli
from model.progress import each
from nkisim.timeline.chip import CASES

_TPS = (4, 8, 16, 32)
# those of Qwen3-32B with a published record, and a smaller chain
_DRAFTERS = ("none", "chain 1.7B", "chain 0.6B", "EAGLE-3", "DFlash")

def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.tune", description=__doc__)
    parser.add_argument("--traces", type=input_file, nargs="+", default=[], help="accepted drafts instead of published")
    parser.add_argument("--trace-drafter", choices=DRAFTERS, help="read the traces as this drafter's")
    parser.add_argument("--drafter", nargs="+", default=_DRAFTERS, choices=DRAFTERS, help="to compare")
    parser.add_argument("--tp", nargs="+", type=int, default=_TPS, choices=_TPS, help="ranks (default: all)")
    parser.add_argument("--lnc", nargs="+", type=int, default=[1, 2], choices=(1, 2), help="cores a rank (default: both)")
    parser.add_argument("--k", nargs="+", type=count(0, MAX_K), help="drafts of a step (default: the best)")
    parser.add_argument("--batch", nargs="+", type=count(1, 64), default=[1, 4, 8, 16], help="sequences decoded together")
    parser.add_argument("--weights", default="bf16", choices=passes.WEIGHTS, help="dtype of the target's layers")
    parser.add_argument("--limit-ms", type=positive, default=15.0, help="of a token, for the cheapest choice")
    parser.add_argument("--price", type=positive, default=1.0, help="of a chip and hour (default: 1, chip-hours)")
    parser.add_argument("--band", action="store_true", help="add the band of all uncertain constants")
    parser.add_argument("--article", action="store_true", help="print the article's claims instead")
    parser.add_argument("--out", type=output_file, help="write the page here too")
    parser.add_argument("--picture", type=output_file, help="draw the first workload, SVG")
    return parser.parse_args(arguments)


def study(options: argparse.Namespace) -> list[choose.Row]:
    """Every setup that fits at its best k, or at each of `--k`, on each workload of its drafter."""
    read = [known for file in options.traces for known in acceptance.read(file, options.trace_drafter)]
    setups = [
        setup
        for parts in product(options.drafter, options.tp, options.batch, options.lnc)
        if (setup := Setup(*parts, options.weights)).fits
    ]
    pairs = dict.fromkeys(
        (setup, replace(known, drafter="", shares=(0.0,), source="", assumed=False) if alone else known, k)
        for known in (read or acceptance.KNOWN)
        for setup in setups
        if (alone := setup.drafter == "none") or known.drafter in ("", setup.drafter)
        for k in options.k or (None,) if not k or choose.is_known(setup, known, k)
    )  # fmt: skip
    if options.drafter != ["none"] and all(setup.drafter == "none" for setup, *_ in pairs):
        raise UserError(
            f"the traces are of {sorted({known.drafter for known in read})} and the study is of "
            f"{options.drafter}; name the drafter of the traces by --trace-drafter"
        )
    ends = CASES if options.band else ("nominal",)
    return [choose.row(*pair, ends, options.price) for pair in each(pairs, "simulating setups")]


def main(arguments: list[str]) -> None:
    """Print the tables, or the article's claims."""
    options, made_by = _options(arguments), header("simulated")
    page = article.page(made_by) if options.article else ""
    if not page:
        rows = study(options)
        best = choose.table(choose.choices(rows, options.limit_ms), "workload", "goal")
        every = choose.by_batch(rows) if len(options.batch) > 1 else choose.table(rows, "workload", "from")
        page = f"{sentence(made_by)}\n\n## Best choice\n\n{best}\n\n## Every setup\n\n{every}"
        if options.picture:
            first = [r for r in rows if r["workload"] == rows[0]["workload"]]
            of_article = choose.row(article.ARTICLE, acceptance.MT_BENCH, 7, ("nominal",), options.price)
            options.picture.write_text(picture.draw(first, of_article, first[0]["workload"]), encoding="utf-8")
    if options.out:
        options.out.write_text(page + "\n", encoding="utf-8")
    print(page)


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
