"""Positions from outside of the engine: whose noise a token has, what the draft's cache holds."""

from __future__ import annotations

import re
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch

from model.approx_filters import approximate
from model.filters import Filters
from model.sampling import SamplingParams
from nki_kernels.sampling import law
from tests.model.demo_bundle import ROOT
from tests.model.family import eager, eager_engine
from tests.model.paged import empty, rows
from trnspec.engine.request import Params, Request

# in fp32 logits over this are lost beside the noise
NOISE_ONLY = 1e30


@torch.no_grad()
def _agrees(family: Path, ids: tuple[int, ...], params: Params) -> list[bool]:
    """Whether the draft, with every id before it in its cache, samples the id at each position; in one pass."""
    draft: Any = eager(family, k=3).pair.draft_model
    x, *_ = draft.hidden(torch.tensor([ids]), empty(draft.config, 1, len(ids)), rows(0, len(ids), 1, len(ids)))
    seeds = torch.tensor([params.seed_words], dtype=torch.int32)
    temperature, *filters = (
        torch.tensor([float(v)]) for v in (params.temperature, params.top_k, params.top_p, params.min_p)
    )
    asked = approximate(SamplingParams(temperature, seeds, Filters(*filters)))
    noise = draft.noise(seeds, 1 + torch.arange(len(ids), dtype=torch.int32)[None])
    sampled = draft.sample(draft.logits(x), asked, noise).token_ids()[0].tolist()
    return [False, *(s == i for s, i in zip(sampled, ids[1:], strict=False))]


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
    prompt, full, refused = (9, 2, 7, 7, 1, 30), 0, 0
    for params in (Params(), Params(0.8, seed=7), Params(1.0, 20, 0.9, 0.02, 3)):
        (result,) = eager_engine(family, k=3).run([Request(prompt, params, 1000, k_limit=k)])
        ids = (*prompt, *result.ids)
        assert (result.reason, len(ids)) == ("context", 128)
        drafted, accepted = _tally(_agrees(family, ids, params), len(prompt), k)
        assert (result.drafted, result.accepted) == (drafted, accepted), params
        full, refused = full + accepted[-1], refused + drafted[0] - accepted[0]
    assert full > 0, "the last draft's place in the cache matters after a step that accepts all"
    assert refused > 0


def _first_samples() -> list[tuple[int, int, list[int]]]:
    page = (ROOT / "docs/sampling.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(0x[0-9a-f]{16})` \| (\d+) \| (\d+, \d+, \d+) \|$", page, re.M)
    return [(int(seed, 16), int(length), [int(i) for i in ids.split(", ")]) for seed, length, ids in rows]


def test_the_first_samples_are_those_of_the_page(family: Path) -> None:
    """Where logits do not matter a sample is the noise's: of positions L, L + 1, ... after a prompt of L ids."""
    page, of_page, of_family = _first_samples(), 2048, 64
    assert len(page) >= 3
    for seed, length, expected in page:
        params = Params(NOISE_ONLY, seed=seed)
        noise = [law.gumbel_noise(params.seed_words, length + n, range(of_page)) for n in range(3)]
        assert [n.argmax() for n in noise] == expected
        (result,) = eager_engine(family).run([Request(tuple(n % of_family for n in range(length)), params, 3)])
        assert result.ids == [n[:of_family].argmax() for n in noise]
