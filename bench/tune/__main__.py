"""`python -m bench.tune`: choose drafter, k, tp and batch for Qwen3-32B before anything is compiled.

Expected ms per token = (launch + the drafter's passes + one target pass over k + 1 rows) / expected tokens of a step.
Passes are simulated from the kernels (nkisim) with a band; tokens are published, assumed, or those of --traces. Nothing
here was measured on Trainium. `--article` compares the claims of AWS's article on speculative decoding with the model.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from bench.options import count, input_file, milliseconds, output_file
from bench.provenance import header, sentence
from bench.tune import acceptance, article, choose
from bench.tune.drafters import DRAFTERS, MAX_K, Setup
from model.errors import UserError, run_cli
from model.progress import each


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.tune", description=__doc__)
    parser.add_argument("--traces", type=input_file, nargs="+", default=[], help="accepted drafts instead of published")
    parser.add_argument("--trace-drafter", choices=DRAFTERS, help="read the traces as this drafter's")
    parser.add_argument("--drafter", nargs="+", default=list(DRAFTERS), choices=DRAFTERS, help="to compare")
    parser.add_argument("--tp", nargs="+", type=int, default=[32], choices=(4, 8, 16, 32), help="ranks (default: 32)")
    parser.add_argument("--k", nargs="+", type=count(0, MAX_K), help="drafts of a step (default: the best)")
    parser.add_argument("--batch", nargs="+", type=count(1, 64), default=[4], help="sequences at once (default: 4)")
    parser.add_argument("--limit-ms", type=milliseconds, default=15.0, help="of a token, for the cheapest choice")
    parser.add_argument("--article", action="store_true", help="print the article's claims instead")
    parser.add_argument("--out", type=output_file, help="write the page here too")
    return parser.parse_args(arguments)


def study(options: argparse.Namespace) -> list[choose.Row]:
    """Every setup at its best k, or at each of `--k`, on each workload of its drafter."""
    read = [known for file in options.traces for known in acceptance.read(file, options.trace_drafter)]
    pairs = [
        (Setup(drafter, tp, batch), known, k)
        for known in (read or acceptance.KNOWN)
        for drafter in options.drafter for tp in options.tp for batch in options.batch
        if known.drafter in ("", drafter)
        for k in options.k or (None,) if not k or choose.is_known(Setup(drafter, tp, batch), known, k)
    ]  # fmt: skip
    if not pairs:
        raise UserError(
            f"the traces are of {sorted({known.drafter for known in read})} and the study is of "
            f"{options.drafter}; name the drafter of the traces by --trace-drafter"
        )
    return [choose.row(*pair) for pair in each(pairs, "simulating setups")]


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
