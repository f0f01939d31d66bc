"""`python -m bench.masked_drafts`: JSON-schema requests of the demo pair with drafts and at one token a step, wall.

It needs xgrammar, which is in the environment of `vllm serve` (serve/install.sh).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from model.bundle.manifest import read_bundle
from model.errors import UserError, run_cli
from model.serving.engine import Engine
from model.serving.ready import compile_graphs, shape_of
from model.serving.request import Params, Request, Result
from model.serving.runtime import Graphs
from model.serving.text import load_tokenizer

SCHEMAS: dict[str, dict[str, Any]] = {
    "form": {
        "type": "object", "additionalProperties": False, "required": ["name", "count", "kind"],
        "properties": {
            "name": {"type": "string", "pattern": "^[a-z]{1,12}$"}, "count": {"type": "integer"},
            "kind": {"enum": ["odd", "even"]},
        },
    },
    "list": {
        "type": "array", "minItems": 4, "maxItems": 4,
        "items": {
            "type": "object", "additionalProperties": False, "required": ["identifier", "replicas"],
            "properties": {
                "identifier": {"type": "string", "pattern": "^[a-z]{3,8}$"}, "replicas": {"type": "integer"},
            },
        },
    },
}  # fmt: skip
PROMPTS = ("Describe the pod as JSON:\n", "Count from 1 to 10:", "apiVersion: v1\nkind: Pod\n", "Once upon a time")
_TOKENS, _ROUNDS = 96, 3


class Matcher:
    """A schema as a function of ids, over one xgrammar matcher that goes back where ids were not kept."""

    def __init__(self, xgrammar: Any, compiled: Any, stop_ids: Sequence[int], words: int) -> None:
        self.matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=list(stop_ids))
        self.bitmask, self.ids = xgrammar.allocate_token_bitmask(1, 32 * words), list[int]()

    def __call__(self, ids: Sequence[int]) -> np.ndarray | None:
        same = 0
        while same < min(len(ids), len(self.ids)) and ids[same] == self.ids[same]:
            same += 1
        if len(self.ids) > same:
            self.matcher.rollback(len(self.ids) - same)
        self.ids = list(ids)
        for token in ids[same:]:
            assert self.matcher.accept_token(token), "a mask allowed an id that the grammar refuses"
        if self.matcher.is_terminated():
            return None
        self.matcher.fill_next_token_bitmask(self.bitmask, 0)
        mask: np.ndarray = self.bitmask[0].numpy().copy()
        return mask


def _xgrammar(bundle: Path) -> tuple[Any, Any]:
    """xgrammar, and its compiler for the bundle's tokenizer."""
    try:
        # vendor seam: in the server's environment alone
        import xgrammar  # noqa: PLC0415
        from transformers import PreTrainedTokenizerFast  # noqa: PLC0415
    except ImportError as error:
        raise UserError("xgrammar is not installed here; run this by the python of .venv-serve") from error
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(bundle / "tokenizer/tokenizer.json"))
    size = read_bundle(bundle).config("target").vocab_size
    return xgrammar, xgrammar.GrammarCompiler(xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=size))


def _requests(bundle: Path, stop_ids: tuple[int, ...], words: int) -> list[Callable[[], Request]]:
    """Makers of requests, each with a matcher of its own: every schema, prompt and temperature."""
    (xgrammar, compiler), tokenizer = _xgrammar(bundle), load_tokenizer(bundle)

    def maker(ids: tuple[int, ...], compiled: Any, params: Params) -> Callable[[], Request]:
        return lambda: Request(ids, params, _TOKENS, stop_ids, allowed=Matcher(xgrammar, compiled, stop_ids, words))

    return [
        maker(tuple(tokenizer.encode(text).ids), compiled, params)
        for compiled in (compiler.compile_json_schema(json.dumps(s), any_whitespace=False) for s in SCHEMAS.values())
        for text in PROMPTS
        for params in (Params(), Params(0.8, seed=5))
    ]


def _served(graphs: Graphs, makers: list[Callable[[], Request]], speculative: bool) -> tuple[list[Result], float]:
    """The results of the requests one after the other, and the least wall milliseconds a token of a few rounds."""
    of_rounds, results = [], list[Result]()
    for _ in range(_ROUNDS):
        runner = Engine(graphs, shape_of(graphs.bundle), speculative)
        compile_graphs(graphs, makers[0](), runner)
        asked = [make() for make in makers]
        begin = time.perf_counter()
        results = [runner.run([request])[0] for request in asked]
        of_rounds.append(1e3 * (time.perf_counter() - begin) / sum(len(r.ids) for r in results))
    return results, min(of_rounds)


def _row(name: str, results: list[Result], ms: float, alone: list[Result]) -> str:
    rate = statistics.mean(r.tokens_per_step for r in results)
    pairs = ((r.accepted, r.drafted) for r in results)
    kept, drafted = (sum(sum(counts) for counts in part) for part in zip(*pairs, strict=True))
    same = sum(a.ids == r.ids for a, r in zip(alone, results, strict=True))
    return f"| {name} | {rate:.2f} | {kept} of {drafted} | {ms:.2f} | {same} of {len(results)} |"


def main(arguments: list[str]) -> None:
    """Print a row for each way; exit 1 if any id differs from one token a step."""
    parser = argparse.ArgumentParser(prog="python -m bench.masked_drafts", description=__doc__)
    parser.add_argument("bundle", type=Path, nargs="+", help="folders of bundles built with --structured")
    options, different = parser.parse_args(arguments), False
    print("| drafter, k | tokens a step | drafts kept | ms a token (wall) | same ids |")
    print("|---|---|---|---|---|")
    for path in options.bundle:
        graphs = Graphs(read_bundle(path))
        shape = shape_of(graphs.bundle)
        makers = _requests(path, graphs.bundle.config("target").eos_token_ids, -(-shape.vocabulary // 32))
        alone, alone_ms = _served(graphs, makers, False)
        print(_row("one token a step", alone, alone_ms, alone))
        results, ms = _served(graphs, makers, True)
        print(_row(f"{graphs.bundle.drafting.kind}, {shape.k}", results, ms, alone), flush=True)
        different |= [r.ids for r in results] != [r.ids for r in alone]
        graphs.close()
    if different:
        raise SystemExit(1)


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
