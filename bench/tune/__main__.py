"""`python -m bench.tune`: compares drafters, k, tp and batch for Qwen3-32B before anything is compiled.

Expected ms per token = (launch + drafter passes + one target pass over k + 1 rows) / expected tokens per step. Passes
are simulated from the kernels (nkisim) with a band; acceptance is published, assumed, or from --traces. Nothing is
measured on Trainium. `--article` compares the claims of AWS's article on speculative decoding with this model.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from bench.options import command, count, input_file, milliseconds, output_file
from bench.provenance import header, sentence
from bench.tune import acceptance, article, choose
from bench.tune.drafters import DRAFTERS, MAX_K, Setup
from model.errors import UserError, run_cli
from model.progress import each


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    about = "Compare drafters, k, tp and batch for Qwen3-32B on Trainium2 by simulated passes and known acceptance."
    parser, ranks = command("bench.tune", about, '--drafter "chain 1.7B" EAGLE-3 --tp 32 --batch 1 4'), (4, 8, 16, 32)
    names = f"drafters: {', '.join(DRAFTERS)} (default: all)"
    setup = parser.add_argument_group("setups, all combinations of")
    setup.add_argument("--drafter", nargs="+", default=list(DRAFTERS), choices=DRAFTERS, metavar="NAME", help=names)
    setup.add_argument("--k", nargs="+", type=count(0, MAX_K), help="drafts per step (default: the best of each setup)")
    setup.add_argument("--tp", nargs="+", type=count(4, 32), default=[32], choices=ranks, help="ranks (default: 32)")
    setup.add_argument("--batch", nargs="+", type=count(1, 64), default=[4], help="sequences (default: 4)")
    traces = parser.add_argument_group("acceptance")
    traces.add_argument("--traces", type=input_file, nargs="+", default=[], metavar="FILE", help="of bench.tune.trace")
    traces.add_argument("--trace-drafter", choices=DRAFTERS, metavar="NAME", help="drafter to which the traces apply")
    page = parser.add_argument_group("page")
    page.add_argument("--limit-ms", type=milliseconds, default=15.0, help="latency limit of the cheapest (default: 15)")
    page.add_argument("--article", action="store_true", help="print the article's claims instead")
    page.add_argument("--out", type=output_file, help="write the page to this file too")
    return parser.parse_args(arguments)


def study(options: argparse.Namespace) -> list[choose.Row]:
    """A row for every setup at its best k, or at each of `--k`, and workload of its drafter."""
    read = [known for file in options.traces for known in acceptance.read(file, options.trace_drafter)]
    setups = [
        (Setup(drafter, tp, batch), known)
        for known in (read or acceptance.KNOWN)
        for drafter in options.drafter for tp in options.tp for batch in options.batch
        if known.drafter in ("", drafter)
    ]  # fmt: skip
    if not setups:
        drafters = sorted({known.drafter for known in read})
        raise UserError(f"the traces are of {drafters}; name the drafter of the traces by --trace-drafter")
    rows = [(*pair, k) for pair in setups for k in options.k or (None,) if not k or choose.is_known(*pair, k)]
    if not rows:
        raise UserError(f"no drafter has a known acceptance and kernels for k {options.k} here; lower --k or --batch")
    return [choose.row(*row) for row in each(rows, "simulating setups")]


def main(arguments: list[str]) -> None:
    """Print the tables, or the article's claims."""
    options, made_by = _options(arguments), header("simulated")
    page = article.page(made_by) if options.article else ""
    if not page:
        rows = study(options)
        best = choose.table(choose.choices(rows, options.limit_ms), "workload", "goal")
        every = choose.table(rows, "workload", "from")
        page = f"{sentence(made_by)}\n\n## Best choice\n\n{best}\n\n## Every setup\n\n{every}"
    if options.out:
        options.out.write_text(page + "\n", encoding="utf-8")
    print(page)


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
