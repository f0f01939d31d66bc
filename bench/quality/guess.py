"""`python -m bench.quality.guess --bundle DIR`: what the draft's guessed filters cost in acceptance.

The target's filters are exact; a draft's are tried at a few logits (`model/filters.py`), for its draws have no say in
what is emitted. Each answer is served, then the draft, eager and with every id before it in its cache, draws
each of its positions twice: by the guess and by the exact filters. A step accepts drafts while they are the answer's.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import torch

from bench.pair import read_pair
from bench.provenance import header, said
from bench.quality.__main__ import PROMPTS, load_prompts
from bench.quality.target_logits import eager_model
from model import filters
from model.attention import KEY_TILE
from model.bundle.manifest import Bundle
from model.cache import Placement, empty_caches
from model.errors import UserError, run_cli
from model.ops import EAGER
from model.qwen3 import Qwen3
from model.sampling import Sampling, coupled_sample
from model.serving.engine import Engine
from model.serving.ready import shape_of
from model.serving.request import Params, Request
from model.serving.runtime import Graphs
from model.serving.text import load_tokenizer


@dataclass(frozen=True)
class Tally:
    """Drafts that were looked at and accepted, and the steps that this took."""

    drafted: int = 0
    accepted: int = 0
    steps: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.drafted + other.drafted, self.accepted + other.accepted, self.steps + other.steps)

    @property
    def rate(self) -> float:
        """Accepted of those that were looked at: each step looks until the first that differs."""
        return self.accepted / max(self.drafted, 1)

    @property
    def tokens_per_step(self) -> float:
        return self.accepted / max(self.steps, 1) + 1


def tally(agrees: Sequence[bool], first: int, k: int) -> Tally:
    """The steps of an answer whose ids begin at `first`: agrees[i] says whether the draft draws the id at i."""
    total, position = Tally(), first
    while position < len(agrees) - 1:
        window = agrees[position + 1 : position + 1 + k]
        accepted = len(list(takewhile(bool, window)))
        total += Tally(min(accepted + 1, len(window)), accepted, 1)
        position += accepted + 1
    return total


@torch.no_grad()
def drawn(draft: Qwen3, ids: tuple[int, ...], params: Params, steps: Sequence[float] | None) -> list[int]:
    """What the draft draws after each id, in one eager pass; the filters guessed at `steps`, exact without."""
    positions = torch.arange(len(ids), dtype=torch.int32)
    length = -len(ids) // KEY_TILE * -KEY_TILE
    caches = empty_caches(draft.config, draft.parallel, 1, length, draft.norm.weight.dtype)
    x_BSE, _ = draft.hidden(
        torch.tensor([ids], dtype=torch.int32), caches, Placement(positions[None], torch.arange(length))
    )
    asked = [torch.tensor([float(v)]) for v in (params.temperature, params.top_k, params.top_p, params.min_p)]
    rule = Sampling._make([*asked, torch.tensor([params.seed_words], dtype=torch.int32)]).draw(positions[None] + 1)
    guess_J = None if steps is None else torch.tensor(steps)
    ids_R: list[int] = coupled_sample(EAGER, draft.logits(x_BSE)[0], rule._replace(guess_J=guess_J)).tolist()
    return ids_R


def agreement(draft: Qwen3, ids: tuple[int, ...], params: Params, steps: Sequence[float] | None) -> list[bool]:
    """Whether the draft's draw is the id at each position."""
    return [False, *(own == other for own, other in zip(drawn(draft, ids, params, steps), ids[1:], strict=False))]


def requests(bundle: Bundle, options: argparse.Namespace) -> list[Request]:
    """Every prompt at every temperature with every seed, all filtered."""
    tokenizer, stops = load_tokenizer(bundle.path), bundle.config("target").eos_token_ids
    texts = [text for _, _, text in load_prompts(options.prompts)[: options.limit]]
    return [
        Request(
            tuple(tokenizer.encode(text).ids), Params(t, options.top_k, options.top_p, seed=seed), options.tokens, stops
        )
        for t, seed, text in itertools.product(options.temperatures, range(options.seeds), texts)
    ]


def main(arguments: list[str]) -> None:
    """Serve, draw both ways, print a table by temperature and the total."""
    parser = argparse.ArgumentParser(prog="python -m bench.quality.guess", description=__doc__)
    parser.add_argument("--bundle", type=Path, required=True, help="folder of a pair on one rank, not packed")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="JSON like demo/prompts.json, or a line a prompt")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.8, 0.9, 1.0, 1.1])
    parser.add_argument("--top-k", type=int, default=20)
    parser.add_argument("--top-p", type=float, default=0.9)
    parser.add_argument("--seeds", type=int, default=3, help="seeds from 0 on, of each prompt")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each answer")
    parser.add_argument("--limit", type=int, help="take only so many prompts")
    options = parser.parse_args(arguments)
    bundle = read_pair(options.bundle)
    if bundle["tp"] != 1 or any(bundle["weights"]["packed"]["draft_model"].values()):
        raise UserError(f"{bundle.path} has several ranks or packed weights; give a pair of one rank, built by torch")
    asked, draft = requests(bundle, options), eager_model(bundle, "draft")
    answers = Engine(Graphs(bundle), shape_of(bundle)).run(asked)
    ways = {"exact": None, "guessed": filters.GUESSED_STEPS}
    totals = {way: dict.fromkeys(options.temperatures, Tally()) for way in ways}
    for request, answer in zip(asked, answers, strict=True):
        ids = (*request.ids, *answer.ids)
        for way, steps in ways.items():
            agrees = agreement(draft, ids, request.params, steps)
            totals[way][request.params.temperature] += tally(agrees, len(request.ids), bundle["k"])
    print(
        f"top-k {options.top_k}, top-p {options.top_p}, k {bundle['k']}, {len(asked)} answers; {said(header('wall'))}\n"
    )
    print("| temperature | accepted, exact | accepted, guessed | tokens a step, exact | guessed | loss |")
    print("|---|---|---|---|---|---|")
    for t in options.temperatures:
        print(row(str(t), totals["exact"][t], totals["guessed"][t]))
    print(row("all", *(sum(totals[way].values(), Tally()) for way in ways)))


def row(name: str, exact: Tally, guessed: Tally) -> str:
    """A line of the table; the loss is that of tokens a step."""
    loss = 1 - guessed.tokens_per_step / exact.tokens_per_step
    return (
        f"| {name} | {exact.rate:.4f} of {exact.drafted} | {guessed.rate:.4f} of {guessed.drafted} "
        f"| {exact.tokens_per_step:.3f} | {guessed.tokens_per_step:.3f} | {loss:+.2%} |"
    )


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
