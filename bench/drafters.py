"""`python -m bench.drafters`: random requests through every drafter of the demo target, and what each step kept.

Each drafter's ids are held against the target's own, request by request: a difference is printed and ends the run
with 1. Tokens a step are over all requests of a kind; prompts that are edited are a text and the beginning of its
copy, what prompt look-up is for. Wall time is none of its business: bench.drafters_wall has that.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from bench.provenance import header
from compile.build import build
from compile.spec import BuildSpec
from model.bundle.manifest import read_bundle
from model.drafting import KINDS as KINDS_OF_DRAFTERS
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
KINDS = ("structured", "open", "edited")


def spec_of(drafter: str, draft: str, k: int, batch: int, out: Path, tree: str = "") -> BuildSpec:
    """The bundle of the demo target with a drafter, whose model is in the folder `draft`; `none` has no drafts."""
    target = str(_DEMO / "target")
    sizes: dict[str, Any] = {"tp": 1, "batch": batch, "max_len": 256, "dtype": "fp32", "out": str(out / drafter)}
    if drafter == "none":
        return BuildSpec(target=target, checkpoint=target, k=0, **sizes)
    if not draft:
        return BuildSpec(target=target, checkpoint=target, k=k, drafter=drafter, **sizes)
    if not Path(draft).is_dir():
        raise UserError(f"{draft} is no folder; train it as demo/README.md says, or leave {drafter} out")
    of_draft = {"draft": draft, "draft_checkpoint": draft, "drafter": drafter, "tree": tree}
    return BuildSpec(target=target, checkpoint=target, k=k, **of_draft, **sizes)  # type: ignore[arg-type]


def requests(count: int, tokens: int, seed: int = 16) -> list[tuple[str, Request]]:
    """Random requests, each with its kind: greedy ones and drawn ones, with filters and without."""
    listed = json.loads((_DEMO / "prompts.json").read_text(encoding="utf-8"))["prompts"]
    tokenizer, rng = Tokenizer.from_file(str(_DEMO / "target/tokenizer.json")), random.Random(seed)
    found = []
    for _ in range(count):
        prompt, kind = rng.choice(listed), rng.choice(KINDS)
        text = prompt["text"] if kind != "edited" else _edited(rng, [p["text"] for p in listed])
        kind = kind if kind == "edited" else prompt["entropy"]
        params = Params(
            rng.choice([0.0, 0.0, 0.6, 1.0]), rng.choice([0, 0, 40]), rng.choice([1.0, 0.95]), 0.0, rng.getrandbits(64)
        )
        found.append((kind, Request(tuple(tokenizer.encode(text).ids), params, tokens)))
    return found


def _edited(rng: random.Random, texts: Sequence[str]) -> str:
    """A few lines, and the first words of the same lines once more."""
    text = "\n".join(rng.sample(list(texts), 3)).strip()
    return f"{text}\n\n{text[: rng.randint(20, 60)]}"


def tokens_a_step(results: Sequence[Result]) -> float:
    """Tokens that a step kept on average; the first token of a prompt is no step's."""
    return sum(len(r.ids) - 1 for r in results) / max(1, sum(r.steps for r in results))


def run(
    drafters: dict[str, str], k: int, asked: list[tuple[str, Request]], batch: int, tree: str = ""
) -> Iterator[dict[str, Any]]:
    """A row a drafter, given its model's folder: requests that differ, and tokens a step by kind, greedy or drawn."""
    expected = None
    with tempfile.TemporaryDirectory() as folder:
        for drafter, draft in {"none": "", **drafters}.items():
            with progress(f"{drafter}, {len(asked)} requests"):
                graphs = Graphs(read_bundle(build(spec_of(drafter, draft, k, batch, Path(folder), tree))))
                results = Engine(graphs, shape_of(graphs.bundle)).run([r for _, r in asked])
                graphs.close()
            ids = [r.ids for r in results]
            expected = expected or ids
            different = [i for i, (one, other) in enumerate(zip(ids, expected, strict=True)) if one != other]
            row: dict[str, Any] = {"drafter": drafter, "k": k if drafter != "none" else 0, "requests": len(asked)}
            row |= {"differences": len(different), "different": different[:10]}
            for kind in KINDS:
                for how, draws in (("greedy", False), ("drawn", True)):
                    of = [
                        r for (at, q), r in zip(asked, results, strict=True)
                        if (at, q.params.temperature > 0) == (kind, draws)
                    ]  # fmt: skip
                    row[f"{kind} {how}"] = round(tokens_a_step(of), 3)
            yield row


def main(arguments: list[str]) -> None:
    """Print a row a drafter; exit 1 if any id differs from the target's."""
    parser = argparse.ArgumentParser(prog="python -m bench.drafters", description=__doc__)
    parser.add_argument("--drafters", nargs="+", default=list(MODELS), choices=MODELS, help="which to run")
    parser.add_argument("--parallel", type=Path, help="folder of the parallel draft (default: the demo's)")
    parser.add_argument("--k", type=int, default=7, help="drafts a step (default: 7)")
    parser.add_argument("--tree", default="", help="a tree for drafters that take one, instead of a chain of k")
    parser.add_argument("--requests", type=int, default=1000, help="requests a drafter (default: 1000)")
    parser.add_argument("--tokens", type=int, default=48, help="new tokens of each (default: 48)")
    parser.add_argument("--batch", type=int, default=8, help="sequences decoded together (default: 8)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    drafters = {name: MODELS[name] for name in options.drafters}
    if options.parallel and "parallel" in drafters:
        drafters["parallel"] = str(options.parallel)
    for name, draft in drafters.items():
        spec_of(name, draft, options.k, options.batch, Path()).check()
    rows = []
    k = options.k
    if options.tree:
        k, drafters = parse_tree(options.tree).k, {n: d for n, d in drafters.items() if KINDS_OF_DRAFTERS[n].tree}
    for row in run(drafters, k, requests(options.requests, options.tokens), options.batch, options.tree):
        rows.append(row)
        if not options.json:
            kept = ", ".join(f"{name} {value}" for name, value in row.items() if name.split()[0] in KINDS)
            print(f"{row['drafter']} k {row['k']}: {row['requests']} requests, {row['differences']} different; "
                  f"tokens a step: {kept}", flush=True)  # fmt: skip
    if options.json:
        print(json.dumps(header("wall") | {"rows": rows}))
    if any(row["differences"] for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
