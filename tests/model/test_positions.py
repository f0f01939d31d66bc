"""The position whose noise a sampled token has, against docs/sampling.md."""

from __future__ import annotations

import re
from pathlib import Path

from nki_kernels.sampling import law
from tests.model.demo_bundle import ROOT
from tests.model.family import eager_engine
from trnspec.engine.request import Params, Request

# logits divided by it are below the resolution of the noise in fp32
NOISE_ONLY = 1e30


def _first_samples() -> list[tuple[int, int, list[int]]]:
    page = (ROOT / "docs/sampling.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(0x[0-9a-f]{16})` \| (\d+) \| (\d+, \d+, \d+) \|$", page, re.M)
    return [(int(seed, 16), int(length), [int(i) for i in ids.split(", ")]) for seed, length, ids in rows]


def test_the_first_samples_are_those_of_the_page(family: Path) -> None:
    """At a very high temperature, samples are the argmax of the noise at positions L, L + 1, ... after L ids."""
    page, of_page, of_family = _first_samples(), 2048, 64
    assert len(page) >= 3
    for seed, length, expected in page:
        params = Params(NOISE_ONLY, seed=seed)
        noise = [law.gumbel_noise(params.seed_words, length + n, range(of_page)) for n in range(3)]
        assert [n.argmax() for n in noise] == expected
        (result,) = eager_engine(family).run([Request(tuple(n % of_family for n in range(length)), params, 3)])
        assert result.ids == [n[:of_family].argmax() for n in noise]
