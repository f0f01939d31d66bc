"""`python -m bench.tune`: compares drafters, k, tp, LNC and batch for Qwen3-32B before anything is compiled.

Expected ms per token = (launch + drafter passes + one target pass over k + 1 rows) / expected tokens per step. Passes
are simulated from the kernels (nkisim); acceptance is published, assumed, or from --traces. Nothing is measured on
Trainium. A setup that does not fit a rank's HBM is left out. `--article` compares the claims of AWS's article on
speculative decoding with this model.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product, starmap
from multiprocessing import get_context

from bench.options import count, input_file, output_file, positive
from bench.provenance import header, sentence
from bench.tune import acceptance, article, choose, picture
from bench.tune.drafters import DRAFTERS, MAX_K, Setup
from model.errors import UserError, command_line, run_cli
from model.progress import each
from nkisim.timeline.chip import CASES

_TPS = (4, 8, 16, 32)
_Task = tuple[Setup, acceptance.Acceptance, int | None]
# those of Qwen3-32B with a published record, and a smaller chain
_DRAFTERS = ("none", "chain 1.7B", "chain 0.6B", "EAGLE-3", "DFlash")


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    about = "Compare setups of Qwen3-32B on Trainium2 in latency and cost by simulated passes and known acceptance."
    parser = command_line("bench.tune", about, '--drafter "chain 1.7B" EAGLE-3 --tp 4 32 --lnc 2 --price 2.24')
    names = f"drafters: {', '.join(DRAFTERS)} (default: none and those with a record for Qwen3-32B)"
    setup = parser.add_argument_group("setups, all combinations of")
    setup.add_argument("--drafter", nargs="+", default=_DRAFTERS, choices=DRAFTERS, metavar="NAME", help=names)
    setup.add_argument("--k", nargs="+", type=count(0, MAX_K), help="drafts per step (default: the best of each setup)")
    setup.add_argument("--tp", nargs="+", type=count(4, 32), default=_TPS, choices=_TPS, help="ranks (default: all)")
    setup.add_argument("--lnc", nargs="+", type=count(1, 2), default=[1, 2], help="cores of a rank (default: 1 2)")
    setup.add_argument("--batch", nargs="+", type=count(1, 64), default=[1, 4, 8, 16], help="(default: 1 4 8 16)")
    setup.add_argument("--weights", default="bf16", choices=("bf16", "fp8"), help="dtype of the target's layers")
    traces = parser.add_argument_group("acceptance")
    traces.add_argument("--traces", type=input_file, nargs="+", default=[], metavar="FILE", help="of bench.tune.trace")
    traces.add_argument("--trace-drafter", choices=DRAFTERS, metavar="NAME", help="drafter to which the traces apply")
    page = parser.add_argument_group("page")
    page.add_argument("--limit-ms", type=positive, default=15.0, help="latency limit of the cheapest (default: 15)")
    page.add_argument("--price", type=positive, default=1.0, help="of a chip for an hour (default: 1, so chip-hours)")
    page.add_argument("--band", action="store_const", const=CASES, default=CASES[1:2], help="add the band of constants")
    page.add_argument("--article", action="store_true", help="print the article's claims instead")
    page.add_argument("--out", type=output_file, help="write the page to this file too")
    page.add_argument("--picture", type=output_file, help="SVG of the first workload, latency over cost")
    return parser.parse_args(arguments)


def study(options: argparse.Namespace) -> list[choose.Row]:
    """A row for every setup that fits at its best k, or at each of `--k`, and workload of its drafter."""
    read = [known for file in options.traces for known in acceptance.read(file, options.trace_drafter)]
    grid = product(options.drafter, options.tp, options.batch, options.lnc, [options.weights == "fp8"])
    fitting = [setup for setup in starmap(Setup, grid) if setup.fits]
    setups = dict.fromkeys(
        (setup, acceptance.Acceptance(known.workload, "none", (0.0,), "") if baseline else known)
        for known in (read or acceptance.KNOWN)
        if known.drafter in ("", *options.drafter) or set(options.drafter) == {"none"}
        for setup in fitting
        if (baseline := setup.drafter == "none") or known.drafter in ("", setup.drafter)
    )
    if all(setup.drafter == "none" for setup, _ in setups) and set(options.drafter) != {"none"}:
        drafters = sorted({known.drafter for known in read})
        raise UserError(f"the traces are of {drafters}; name the drafter of the traces by --trace-drafter")
    rows = [(*pair, k) for pair in setups for k in options.k or (None,) if not k or choose.is_known(*pair, k)]
    if not rows:
        raise UserError(f"no drafter has a known acceptance and kernels for k {options.k} here; lower --k or --batch")
    # a task is a setup, whose workloads need the same passes; a process for each core
    tasks = {setup: [row for row in rows if row[0] == setup] for setup, *_ in rows}
    with ProcessPoolExecutor(mp_context=get_context("fork")) as pool:
        given = [(task, pool.submit(_rows, task, options.band, options.price)) for task in tasks.values()]
        results = {
            id(row): made
            for task, future in each(given, "simulating setups")
            for row, made in zip(task, future.result(), strict=True)
        }
    return [results[id(row)] for row in rows]


def _rows(task: Sequence[_Task], ends: Sequence[str], price: float) -> list[choose.Row]:
    return [choose.row(*row, ends, price) for row in task]


def main(arguments: list[str]) -> None:
    """Print the tables, or the article's claims."""
    options, made_by = _options(arguments), header("simulated")
    page = article.page(made_by) if options.article else ""
    if not page:
        rows = study(options)
        best = choose.table(choose.choices(rows, options.limit_ms), "workload", "goal")
        every = choose.table(rows, "workload", "from")
        page = f"{sentence(made_by)}\n\n## Best choice\n\n{best}\n\n## Every setup\n\n{every}"
        if options.picture:
            seven = choose.row(article.ARTICLE, acceptance.MT_BENCH, 7, ("nominal",), options.price)
            options.picture.write_text(picture.draw(rows, seven), encoding="utf-8")
    if options.out:
        options.out.write_text(page + "\n", encoding="utf-8")
    print(page)


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
