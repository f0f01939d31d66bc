"""KV sharded over the sequence: the executed graph, its definition and the law of attention."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from model import sequence
from model.attention import verify_attention
from model.cache import Cache, Placement
from model.ops import EAGER
from nki_kernels.attention import law
from tests.compile.run_slices import FIRST, HEADS, LENGTH, RANKS, SLICES, defined, inputs

ROOT = Path(__file__).resolve().parents[2]
TILE = 128


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    file = tmp_path_factory.mktemp("slices") / "found.npz"
    subprocess.run([sys.executable, "-m", "tests.compile.run_slices", str(file)], cwd=ROOT, check=True)
    return np.load(file)


def _whole(given: list[np.ndarray], first: int) -> list[np.ndarray]:
    """The cache that the ranks from `first` on hold together: position p in tile p // 128 % 4 of theirs."""
    made = []
    for shards in given:
        tiles = [shards[first + t % SLICES][:, :, t // SLICES * TILE :][:, :, :TILE] for t in range(LENGTH // TILE)]
        made.append(np.concatenate(tiles, 2))
    return made


def _fp64(*nested: Any) -> Any:
    return tuple(_fp64(*a) if isinstance(a, tuple) else a.astype(np.float64) for a in nested)


def test_the_executed_graph_has_the_bits_of_the_definition(found: Any) -> None:
    assert np.array_equal(found["out"], found["defined"])


@pytest.mark.parametrize("wrong", ["backwards", "unweighted", "shifted"])
def test_another_definition_is_noticed(found: Any, wrong: str) -> None:
    """Slices added in descending order, merged without their weights, or read as the next slice."""
    assert np.isfinite(found[wrong]).all()
    assert not np.array_equal(found["out"], found[wrong])


def test_rows_do_not_depend_on_the_rows_and_sequences_beside_them(found: Any) -> None:
    assert np.array_equal(found["fewer"], found["out"][:, :1, :, :2])


def test_new_rows_are_written_at_their_owner_alone(found: Any) -> None:
    given = inputs()
    for which, after in ((3, "keys"), (4, "values")):
        for first in range(0, RANKS, SLICES):
            expected, new = _whole([given[which]], first)[0].copy(), given[which - 2][first]
            for b, start in enumerate(FIRST[:, 0]):
                expected[b, :, start : start + new.shape[2]] = new[b]
            assert np.array_equal(_whole([found[after]], first)[0], expected)


def test_the_definition_keeps_the_law() -> None:
    """Against the law in fp64, no further than attention over whole caches in fp32, twice over."""
    given = inputs(1)
    out = defined(EAGER, sequence.merge, 0, [torch.from_numpy(a) for a in given])
    for first in range(0, RANKS, SLICES):
        queries = np.concatenate(given[0][first : first + SLICES], 1)
        new, caches = (given[1][first], given[2][first]), _whole(given[3:5], first)
        exact, _ = law.verify_attention(*_fp64(queries, new, (caches[0], caches[1])), FIRST)
        rows = Placement(torch.from_numpy(given[5][0]), torch.arange(LENGTH, dtype=torch.int32))
        pair = (torch.from_numpy(new[0]), torch.from_numpy(new[1]))
        plain, _ = verify_attention(EAGER, torch.from_numpy(queries), pair, Cache(*map(torch.from_numpy, caches)), rows)
        error = np.abs(torch.cat(list(out[first : first + SLICES]), 1).numpy() - exact).max()
        assert error <= 2 * np.abs(plain.numpy() - exact).max()
        # sequence 0 is inside of slice 0: what the others add are exact zeros, so the bits are the plain ones
        assert torch.equal(torch.cat(list(out[first : first + SLICES]), 1)[0], plain[0])


def test_a_slice_without_a_visible_key_is_an_exact_zero() -> None:
    q, cache = torch.randn(1, HEADS, 3, 16), Cache(*(torch.randn(1, 1, 256, 16) for _ in "kv"))
    rows = Placement(torch.tensor([[126, 127, 128]], dtype=torch.int32), torch.arange(1024, dtype=torch.int32))
    part = sequence.attended(q, cache, sequence.sliced(rows, torch.tensor([1], dtype=torch.int32), SLICES))
    assert torch.equal(part[:, :, :2, :-1], torch.zeros(1, HEADS, 2, 16))
    assert (part[:, :, :2, -1] == float("-inf")).all()
    # the third row sees one key of this slice, the first of its first tile: its value, and its score
    assert torch.equal(part[:, :, 2, :-1], cache.v[:, :, 0].expand(1, HEADS, 16))
    assert torch.isfinite(part[:, :, 2, -1]).all()
