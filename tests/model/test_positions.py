"""Positions from outside of the engine: whose noise a token has, what the draft's cache holds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nki_kernels.sampling import law
from tests.model.demo_bundle import ROOT
from tests.model.family import eager_engine
from trnspec.engine.request import Params, Request
from trnspec.engine.slots import Slot

# logits divided by it are below the resolution of the noise in fp32
NOISE_ONLY = 1e30


@pytest.mark.parametrize("k", [1, 3])
def test_a_chain_drafts_what_its_model_samples_without_a_target(family: Path, k: int) -> None:
    """Vanilla speculation, draft and target as graphs of their own, is the reference: steps accept the same, up to the
    context's end. A draft that misses an id differs."""
    params = (Params(), Params(0.8, seed=7), Params(1.5, seed=3))
    requests = [Request((9, 2, 7, 7, 1, 30) * 10, p, 1000, k_limit=k) for p in params]
    draft = eager_engine(family, "none", False, target=str(family / "chain"))

    def propose(slot: Slot, count: int) -> list[int]:
        return draft.run([Request(slot.ids, slot.request.params, count)])[0].ids if count else []

    expected, host = eager_engine(family, k=3).run(requests), eager_engine(family, "ngram", k=3)
    host.propose = propose
    assert host.run(requests) == expected
    full, rejected = (sum(r.accepted[k - 1] for r in expected), sum(r.drafted[0] - r.accepted[0] for r in expected))
    assert full > 0, "the last draft's place in the cache matters after a step that accepts all"
    assert rejected > 0


def test_what_is_counted_ends_with_the_context(family: Path) -> None:
    """A target that drafts for itself has every draft accepted, those of the last step too."""
    (result,) = eager_engine(family, "itself", k=3).run([Request((9, 2, 7), Params(0.8, seed=7), 1000)])
    assert (result.finish_reason, 3 + len(result.ids)) == ("context", 128)
    assert result.accepted == result.drafted
    assert len(result.ids) == 1 + result.steps + sum(result.accepted)


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
