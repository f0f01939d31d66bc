"""The bits of a row: the same for every N, row index, neighbour, cache layout, core count and split into calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from nki_kernels.attention.host import Candidates, verify_attention

from tests.nki_kernels.attention.inputs import Dims, Inputs, draw, pooled

DIMS = Dims(1, 2, 1, 32, 1100, 64)


def rows_of(x: Inputs, start: int, count: int) -> Inputs:
    """The rows start to start + count of a pass, as a pass of their own."""
    part = slice(start, start + count)
    new = x.new[0][:, :, part].copy(), x.new[1][:, :, part].copy()
    return Inputs(x.q[:, :, part].copy(), new, x.keys, x.values, x.positions[:, part].copy())


def run(x: Inputs, cache: tuple[Any, Any] | None = None, **options: Any) -> Any:
    return verify_attention(x.q, x.new, cache or x.fresh(), Candidates(x.positions), **options)


def same(a: Any, b: Any) -> bool:
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


# rows within a chunk, and over the border of two
@pytest.mark.parametrize(("first", "dtype"), [(500, "bf16"), (1000, "fp32")])
def test_every_n_and_split(first: int, dtype: str) -> None:
    """32 rows one by one, in one call, and in calls of every size up to 32: the same bits, the same cache."""
    x = draw(replace(DIMS, dtype=dtype), first=[first])
    whole_cache = x.fresh()
    whole = run(x, whole_cache)
    for count in range(1, 32):
        cache, parts = x.fresh(), []
        for start in range(0, 32, count):
            parts.append(run(rows_of(x, start, min(count, 32 - start)), cache))
        assert same(np.concatenate(parts, 2), whole), f"N={count}"
        assert all(same(a, b) for a, b in zip(cache, whole_cache, strict=True))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("heads", [(2, 1), (6, 3), (16, 1)])
def test_neighbours_and_place_in_the_batch(heads: tuple[int, int], dtype: str) -> None:
    """A sequence alone, and at any place of a batch of 5, on one core and on two."""
    x = draw(Dims(5, *heads, 4, 700, 64, dtype), first=[3, 650, 511, 0, 300])
    together = [run(x), run(x, lnc=2)]
    for b in range(5):
        one = slice(b, b + 1)
        new = x.new[0][one].copy(), x.new[1][one].copy()
        alone = Inputs(x.q[one].copy(), new, x.keys[one].copy(), x.values[one].copy(), x.positions[one].copy())
        assert all(same(run(alone), out[one]) for out in together)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_length_of_the_cache(dtype: str) -> None:
    """Caches of whole chunks: slots that no row sees do not affect the bits, those that a row sees do."""
    x = draw(Dims(2, 4, 2, 3, 4096, 64, dtype), first=[1020, 3])
    whole = run(x)
    for slots in (2048, 3072):
        cache = x.keys[..., :slots].copy(), x.values[:, :, :slots].copy()
        assert same(run(x, cache), whole), f"S={slots}"
    x.values[0, :, 640] *= 2
    assert not same(run(x)[0], whole[0])
    assert same(run(x)[1], whole[1])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_blocks(dtype: str) -> None:
    x = draw(Dims(3, 4, 2, 5, 1024, 64, dtype), first=[3, 1019, 510])
    pools, table = pooled(x.keys.swapaxes(2, 3), x.values)
    assert same(verify_attention(x.q, x.new, pools, Candidates(x.positions, block_table=table)), run(x))


def test_a_chain_as_a_tree() -> None:
    x = draw(Dims(3, 4, 2, 6, 700, 64, "bf16"))
    words = np.tile((2 << np.arange(6)) - 1, (3, 1)).astype(np.int32)
    assert same(verify_attention(x.q, x.new, x.fresh(), Candidates(x.positions, words)), run(x))


def test_a_path_of_a_tree_is_its_chain() -> None:
    """A leaf's bits are those of the chain that leads to it, if that chain is in consecutive slots."""
    x = draw(Dims(2, 2, 1, 4, 600, 64), first=[510, 40])
    words = np.tile(np.array([1, 3, 7, 9], np.int32), (2, 1))
    tree = verify_attention(x.q, x.new, x.fresh(), Candidates(x.positions, words))
    chain = run(x)
    assert same(tree[:, :, :3].copy(), chain[:, :, :3].copy())
    assert not same(tree[:, :, 3].copy(), chain[:, :, 3].copy())


def test_what_a_row_cannot_see_does_not_affect_it() -> None:
    """Stale slots after the row, and the neighbour's cache, may hold any finite number."""
    x = draw(Dims(2, 2, 1, 3, 700, 64), first=[100, 600])
    before = run(x)
    x.keys[0, :, :, 103:], x.values[0, :, 103:] = 1e30, -1e30
    x.keys[1], x.values[1] = 7.0, 9.0
    after = run(x)
    assert same(after[:1], before[:1])
    assert not same(after[1:], before[1:])


def test_what_a_row_sees_affects_it() -> None:
    """Negative control: one bit of the first visible key changes the row's bits."""
    x = draw(Dims(1, 2, 1, 3, 700, 64), first=[600])
    before = run(x)
    x.values[0, 0, 0, 0] = np.nextafter(x.values[0, 0, 0, 0], np.float32(100), dtype=np.float32) * 2
    assert not same(run(x), before)
