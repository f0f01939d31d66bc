"""The parallel drafter against transformers, what its masks leave in the cache, and what its state is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.compile.tiny import write_model
from tests.model.drafted import PROMPTS, Drafted, Spoil, beyond, pair_of, steps

MASK = 63


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and a draft whose config.json has a `pard_token`."""
    folder = tmp_path_factory.mktemp("parallel")
    write_model(folder / "target", 1, scale=0.4)
    write_model(folder / "draft", 2, scale=0.4, num_hidden_layers=2, pard_token=MASK)
    return folder


def _steps(folder: Path, k: int, most: int, count: int, spoil: Spoil = lambda c, p: c) -> Iterator[list[Drafted]]:
    return steps(
        pair_of(folder / "target", folder / "draft"),
        (torch.zeros(len(PROMPTS), most, 1, dtype=torch.int32),),
        k,
        count,
        spoil,
    )


@pytest.mark.parametrize(("k", "most"), [(1, 1), (2, 2), (5, 5), (3, 7), (16, 16)])
def test_drafts_are_those_of_a_plain_forward_of_the_same_checkpoint(folder: Path, k: int, most: int) -> None:
    """As PARD's own inference: the kept ids and k - 1 masks in a causal forward, the last k rows."""
    theirs = AutoModelForCausalLM.from_pretrained(folder / "draft", dtype=torch.float32)
    for n, step in enumerate(_steps(folder, k, most, 4)):
        for drafted in step:
            with torch.no_grad():
                expected = theirs(torch.tensor([drafted.known + [MASK] * (k - 1)])).logits[0, -k:]
            assert torch.allclose(drafted.logits, expected, atol=1e-4, rtol=0), n
            assert drafted.drafts == expected.argmax(-1).tolist()


def test_nothing_reads_what_masks_have_written(folder: Path) -> None:
    """From the first of the rows of a pass on, whatever was in the cache has no say; one place before it has."""
    k = most = 4
    clean = list(_steps(folder, k, most, 4))
    for distance, same in ((1, True), (-most, True), (-most - 1, False)):
        spoiled = list(_steps(folder, k, most, 4, beyond(distance)))
        pairs = [(a, b) for x, y in zip(clean, spoiled, strict=True) for a, b in zip(x, y, strict=True)]
        assert all(torch.equal(a.logits, b.logits) and a.known == b.known for a, b in pairs) is same
