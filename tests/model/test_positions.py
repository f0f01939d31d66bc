"""Positions from outside of the engine: whose noise a token has, what the draft's cache holds, which bucket serves."""

from __future__ import annotations

import re
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from model.cache import Placement, empty_caches
from model.filters import Filters
from model.graph_io import StepInputs, StepOutputs
from model.graph_key import GraphKey
from model.ops import EAGER
from model.qwen3 import Qwen3
from model.rough_filters import roughly
from model.sampling import Sampling, coupled_sample
from model.weights import shard_file
from nki_kernels.sampling import law
from tests.model.demo_bundle import ROOT, engine_config, graphs
from tests.model.family import graphs as tiny
from trnspec.bundle.opening import Bundle
from trnspec.engine.engine import Engine
from trnspec.engine.request import Params, Request, Shape
from trnspec.runtime.xla import XlaRunner

# in fp32 logits over this are lost beside the noise
NOISE_ALONE = 1e30


def _draft(bundle: Bundle) -> Qwen3:
    stored, (_, part) = load_file(bundle.path / shard_file(0)), bundle.spec.parts
    draft = Qwen3(part.config)
    ours = part.bundle_names(alone=False)
    draft.load_state_dict({name.removeprefix("draft_model."): stored[theirs] for name, theirs in ours.items()})
    return draft.eval()


@torch.no_grad()
def _agrees(bundle: Bundle, ids: tuple[int, ...], params: Params) -> list[bool]:
    """Whether the draft, with every id before it in its cache, draws the id at each position; eager, in one pass."""
    draft, ids_11 = _draft(bundle), torch.tensor([ids], dtype=torch.int32)
    positions = torch.arange(len(ids), dtype=torch.int32)
    caches = empty_caches(draft.config, draft.parallel, 1, len(ids), torch.float32)
    x, *_ = draft.hidden(ids_11, caches, Placement(positions[None], positions))
    asked = (params.temperature, params.top_k, params.top_p, params.min_p)
    temperature, *filters = (torch.tensor([float(v)]) for v in asked)
    seeds = torch.tensor([params.seed_words], dtype=torch.int32)
    draw = Sampling(temperature, seeds, Filters(*filters)).draw(positions[None] + 1)
    drawn = coupled_sample(EAGER, draft.logits(x)[0], roughly(draw)).tolist()
    return [False, *(d == i for d, i in zip(drawn, ids[1:], strict=False))]


def _tally(agrees: list[bool], first: int, k: int) -> tuple[list[int], list[int]]:
    """Steps with more than n drafts to accept, and with more than n accepted, to the context's end."""
    steps, position, last = [], first, len(agrees) - 1
    while position < last:
        most = min(k, last - 1 - position)
        accepted = len(list(takewhile(bool, agrees[position + 1 : position + 1 + most])))
        steps.append((most, accepted))
        position += accepted + 1
    drafted, accepted_by = ([sum(step[i] > n for step in steps) for n in range(k)] for i in (0, 1))
    return drafted, accepted_by


@pytest.mark.parametrize("k", [1, 3])
def test_a_draft_is_accepted_where_one_with_full_caches_agrees(family: Path, k: int) -> None:
    """By position and to the context's end: a draft that misses an id, or a tally that counts beyond, differs."""
    g, prompt = tiny(family), (9, 2, 7, 7, 1, 30)
    full, refused = 0, 0
    for params in (Params(), Params(0.8, seed=7), Params(1.0, 20, 0.9, 0.02, 3)):
        (result,) = Engine(g, engine_config(g.bundle)).run([Request(prompt, params, 1000, k_limit=k)])
        ids = (*prompt, *result.ids)
        assert (result.reason, len(ids)) == ("context", 128)
        drafted, accepted = _tally(_agrees(g.bundle, ids, params), len(prompt), k)
        assert (result.drafted, result.accepted) == (drafted, accepted), params
        full, refused = full + accepted[-1], refused + drafted[0] - accepted[0]
    assert full > 0, "the last draft's place in the cache matters after a step that accepts all"
    assert refused > 0


def _first_draws() -> list[tuple[int, int, list[int]]]:
    page = (ROOT / "docs/sampling.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(0x[0-9a-f]{16})` \| (\d+) \| (\d+, \d+, \d+) \|$", page, re.M)
    return [(int(seed, 16), int(length), [int(i) for i in ids.split(", ")]) for seed, length, ids in rows]


@pytest.mark.parametrize(("seed", "length", "expected"), _first_draws())
def test_the_first_draws_are_those_of_the_page(base: Path, seed: int, length: int, expected: list[int]) -> None:
    """Without a say of the logits a draw is the noise's: of positions L, L + 1, ... after a prompt of L ids."""
    g, params = graphs(base), Params(NOISE_ALONE, seed=seed)
    (result,) = Engine(g, engine_config(g.bundle)).run([Request(tuple(range(1, length + 1)), params, 3)])
    assert result.ids == expected
    ids = range(g.bundle.spec.target_config.vocab_size)
    noise = [law.gumbel_noise(params.seed_words, length + n, ids).argmax() for n in range(3)]
    assert noise == expected


def test_the_page_has_first_draws() -> None:
    assert len(_first_draws()) >= 3


class Watched:
    """A runner that holds every run's bucket: each row sees the key of its own position, in the smallest there is."""

    def __init__(self, inner: XlaRunner, shape: Shape) -> None:
        self.inner, self.shape = inner, shape
        self.edges: set[tuple[str, int]] = set()

    def run(self, key: GraphKey, inputs: StepInputs) -> StepOutputs:
        """Run it, if its bucket is right."""
        # a prompt's rows beyond the mask are padding
        positions = inputs.attention_mask.sum() if key.is_prefill else inputs.position_ids.max() + key.k + 1
        of_rows = [keys for rows, keys in self.shape.prompts if rows == key.rows]
        buckets = of_rows if key.is_prefill else self.shape.buckets
        assert key.bucket == next((b for b in buckets if positions <= b), buckets[-1]), (key, positions)
        self.edges.add((key.stage, int(positions)))
        return self.inner.run(key, inputs)

    def draft(self, key: GraphKey, inputs: StepInputs) -> Any:
        return self.inner.draft(key, inputs)


@pytest.mark.parametrize("speculative", [True, False], ids=["pair", "alone"])
def test_every_row_is_inside_of_the_smallest_bucket(family: Path, speculative: bool) -> None:
    """Prompts that fill a bucket to the last place, leave one free, and go one beyond; steps the same."""
    g = tiny(family, max_len=256)
    shape = engine_config(g.bundle)
    watched, rows = Watched(g, shape), shape.rows if speculative else 1
    edge = shape.buckets[0]
    edges = [n + beyond for n in sorted({rows for rows, _ in shape.prompts} | {edge}) for beyond in (-1, 0, 1)]
    for length in (*edges, edge - rows, edge - rows + 1):
        Engine(watched, shape, speculative).run([Request(tuple(n % 64 for n in range(length)), max_new_tokens=3)])
    stages = {stage for stage, _ in watched.edges}
    assert len(stages) == 2
    assert {(stage, edge + beyond) for stage in stages for beyond in (0, 1)} <= watched.edges
