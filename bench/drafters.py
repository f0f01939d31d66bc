"""`python -m bench.drafters`: random requests through every drafter of the demo target; are their ids the target's own?

Each drafter proposes chains, at several k and batch sizes, and trees where it gives candidates for one, in bundles of
fp32 and of bf16. Requests are greedy and drawn, with filters and without, and some of them limit their drafts or turn
them off. The ids of each are held against those of the target alone in the same dtype: a difference is printed and
ends the run with 1. Tokens a step are of the requests without a limit; prompts that are edited are a text and the
beginning of its copy, what prompt look-up is for. Wall time is none of its business: bench.drafters_wall has that.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from bench.provenance import header, write_result
from bench.tune.text import markdown
from compile.build import build
from compile.spec import BuildSpec
from model.bundle.manifest import read_bundle
from model.errors import UserError, run_cli
from model.progress import progress
from model.serving.engine import Engine
from model.serving.ready import shape_of
from model.serving.request import Params, Request, Result
from model.serving.runtime import Graphs
from model.tree import parse_tree

_DEMO = Path(__file__).resolve().parent.parent / "demo"
# of each drafter: the folder of its model; none where the host drafts
MODELS = {
    "chain": str(_DEMO / "draft"), "parallel": str(_DEMO / "draft_parallel"), "eagle3": str(_DEMO / "draft_eagle3"),
    "medusa": str(_DEMO / "draft_medusa"), "ngram": "",
}  # fmt: skip
# k and batch of the bundles that share a drafter's requests
SHAPES = ((3, 1), (7, 4), (15, 8))
# of demo/trees.json: each drafter's best tree of 8 rows on open prompts at T 0.6
TREES = {"chain": "0,1,2,3,0,4,1", "parallel": "0,1,0,1,1,0,1", "eagle3": "0,1,2,0,3,1,0", "medusa": "0,0,0,0,1,0,1"}
TREE_BATCHES = (1, 4)
DTYPES = ("fp32", "bf16")
KINDS = ("structured", "open", "edited")
HOW = ("greedy", "drawn")
# what a request may ask: temperature, top-k, top-p, min-p, and its most drafts
_TEMPERATURES, _TOP_K, _TOP_P, _MIN_P = (0.0, 0.0, 0.6, 1.0), (0, 0, 40), (1.0, 0.95), (0.0, 0.0, 0.05)
_LIMITS = (None, None, None, None, 0, 1)


@dataclass(frozen=True)
class Case:
    """One bundle: the demo target with a drafter, or alone; with a tree, k is its depth."""

    drafter: str
    k: int
    batch: int
    dtype: str
    tree: str = ""

    def spec(self, out: Path) -> BuildSpec:
        """Its build; the folder `out` is the bundle's."""
        target = str(_DEMO / "target")
        sizes: dict[str, Any] = {"tp": 1, "k": self.k, "batch": self.batch, "max_len": 256, "dtype": self.dtype}
        if draft := MODELS.get(self.drafter, ""):
            sizes |= {"draft": draft, "draft_checkpoint": draft, "tree": self.tree}
        return BuildSpec(target=target, checkpoint=target, drafter=self.drafter, out=str(out), **sizes)


def cases(drafter: str, dtype: str) -> list[Case]:
    """The bundles that share a drafter's requests: of chains, and of a tree if it gives candidates for one."""
    chains = [Case(drafter, k, batch, dtype) for k, batch in SHAPES]
    if drafter not in TREES:
        return chains
    tree = TREES[drafter]
    return [*chains, *(Case(drafter, parse_tree(tree).k, batch, dtype, tree) for batch in TREE_BATCHES)]


def requests(count: int, tokens: int, seed: int = 16) -> list[tuple[str, Request]]:
    """Random requests, each with its kind."""
    listed = json.loads((_DEMO / "prompts.json").read_text(encoding="utf-8"))["prompts"]
    tokenizer, rng = Tokenizer.from_file(str(_DEMO / "target/tokenizer.json")), random.Random(seed)
    asked = []
    for _ in range(count):
        prompt, kind = rng.choice(listed), rng.choice(KINDS)
        text = prompt["text"] if kind != "edited" else _edited(rng, [p["text"] for p in listed])
        kind = kind if kind == "edited" else prompt["entropy"]
        filters = rng.choice(_TOP_K), rng.choice(_TOP_P), rng.choice(_MIN_P)
        params = Params(rng.choice(_TEMPERATURES), *filters, rng.getrandbits(64))
        request = Request(tuple(tokenizer.encode(text).ids), params, tokens, k_limit=rng.choice(_LIMITS))
        asked.append((kind, request))
    return asked


def _edited(rng: random.Random, texts: Sequence[str]) -> str:
    """A few lines, and the first words of the same lines once more."""
    text = "\n".join(rng.sample(list(texts), 3)).strip()
    return f"{text}\n\n{text[: rng.randint(20, 60)]}"


def served(case: Case, asked: Sequence[Request], folder: Path) -> list[Result]:
    """The requests through a bundle of the case, which is built in the folder."""
    name = f"{case.drafter}{'-tree' if case.tree else ''}-k{case.k}-b{case.batch}-{case.dtype}"
    graphs = Graphs(read_bundle(build(case.spec(folder / name))))
    try:
        return Engine(graphs, shape_of(graphs.bundle)).run(asked)
    finally:
        graphs.close()


def tokens_a_step(results: Sequence[Result]) -> float:
    """Tokens that a step kept on average; the first token of a prompt is no step's."""
    return sum(len(r.ids) - 1 for r in results) / max(1, sum(r.steps for r in results))


def run(drafters: Sequence[str], dtypes: Sequence[str], asked: list[tuple[str, Request]]) -> Iterator[dict[str, Any]]:
    """A row a bundle: its requests, how many differ from the target alone, and tokens a step by kind and way."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for dtype in dtypes:
            alone = Case("none", 0, 8, dtype)
            with progress(f"the target alone, {dtype}"):
                # the target alone has no drafts to limit
                results = served(alone, [replace(request, k_limit=None) for _, request in asked], folder)
            expected = [r.ids for r in results]
            for sharing in (cases(drafter, dtype) for drafter in drafters):
                for n, case in enumerate(sharing):
                    part = slice(n, None, len(sharing))
                    with progress(f"{case.drafter}, k {case.k}, batch {case.batch}, {dtype}"):
                        results = served(case, [request for _, request in asked[part]], folder)
                    yield asdict(case) | _compared(asked[part], results, expected[part])


def _compared(asked: list[tuple[str, Request]], results: list[Result], expected: list[list[int]]) -> dict[str, Any]:
    different = [n for n, (own, ids) in enumerate(zip(results, expected, strict=True)) if own.ids != ids]
    row: dict[str, Any] = {"requests": len(asked), "differences": len(different), "different": different[:10]}
    free = [(kind, q, r) for (kind, q), r in zip(asked, results, strict=True) if q.k_limit is None]
    for kind in KINDS:
        for how, draws in zip(HOW, (False, True), strict=True):
            of = [r for at, q, r in free if (at, q.params.temperature > 0) == (kind, draws)]
            row[f"{kind} {how}"] = round(tokens_a_step(of), 3)
    return row


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line a bundle, and the requests and differences of each drafter in each dtype."""
    kinds = [f"{kind} {how}" for kind in KINDS for how in HOW]
    lines = [
        [r["drafter"], r["tree"] or "chain", str(r["k"]), str(r["batch"]), r["dtype"], str(r["requests"]),
         str(r["differences"]), *(f"{r[kind]:.2f}" for kind in kinds)]
        for r in rows
    ]  # fmt: skip
    heads = ["drafter", "tree", "k", "batch", "dtype", "requests", "different", *(f"{k}, tokens a step" for k in kinds)]
    sums: dict[tuple[str, ...], list[int]] = {}
    for r in rows:
        of = sums.setdefault((r["drafter"], r["dtype"]), [0, 0])
        of[0], of[1] = of[0] + r["requests"], of[1] + r["differences"]
    said = [f"{' '.join(key)}: {asked} requests, {different} different" for key, (asked, different) in sums.items()]
    return "\n".join([markdown(heads, lines), "", *said])


def main(arguments: list[str]) -> None:
    """Print a line a bundle and the table; exit 1 if any id differs from the target's."""
    parser = argparse.ArgumentParser(prog="python -m bench.drafters", description=__doc__)
    parser.add_argument("--drafters", nargs="+", default=list(MODELS), choices=MODELS, help="which (default: all)")
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES, help="which (default: both)")
    parser.add_argument("--requests", type=int, default=1000, help="of each drafter and dtype (default: 1000)")
    parser.add_argument("--tokens", type=int, default=16, help="new tokens of each (default: 16)")
    parser.add_argument("--out", type=Path, help="write the rows here, JSON")
    options = parser.parse_args(arguments)
    bundles = len(SHAPES) + len(TREE_BATCHES)
    if options.requests < bundles or options.tokens < 2:
        raise UserError(f"--requests is at least {bundles}, one a bundle, and --tokens at least 2; correct them")
    about, rows = header("wall") | {"tokens": options.tokens}, []
    for row in run(options.drafters, options.dtypes, requests(options.requests, options.tokens)):
        rows.append(row)
        print(f"{row['drafter']} {row['tree'] or 'chain'}, k {row['k']}, batch {row['batch']}, {row['dtype']}: "
              f"{row['requests']} requests, {row['differences']} different", flush=True)  # fmt: skip
        if options.out:
            write_result(options.out, about | {"rows": rows})
    print(f"\n{table(rows)}")
    if any(row["differences"] for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
