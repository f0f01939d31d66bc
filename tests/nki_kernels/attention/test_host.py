"""Bad operands: one sentence each, before anything runs or is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from nki_kernels.attention.host import Candidates, check, verify_attention

from tests.nki_kernels.attention.inputs import Dims, draw, pooled

DIMS = Dims(2, 4, 2, 3, 96, 64)


def call(change: Callable[[dict[str, Any]], None], pages: bool = False) -> dict[str, Any]:
    """Change one operand of a good call and make it; returns the operands."""
    x = draw(DIMS)
    operands: dict[str, Any] = {"q": x.q, "new": x.new, "cache": x.fresh(), "candidates": Candidates(x.positions)}
    if pages:
        pools, table = pooled(x.keys.swapaxes(2, 3), x.values)
        operands.update(cache=pools, candidates=Candidates(x.positions, block_table=table))
    change(operands)
    verify_attention(**operands)
    return operands


def _candidates(**fields: Any) -> Callable[[dict[str, Any]], None]:
    def change(operands: dict[str, Any]) -> None:
        changed = {name: f(operands["candidates"]) if callable(f) else f for name, f in fields.items()}
        operands["candidates"] = replace(operands["candidates"], **changed)

    return change


def _set(**fields: Any) -> Callable[[dict[str, Any]], None]:
    def change(operands: dict[str, Any]) -> None:
        operands.update({name: f(operands[name]) for name, f in fields.items()})

    return change


def _take(count: int) -> Callable[[dict[str, Any]], None]:
    """Make all rows `count` per sequence."""

    def change(operands: dict[str, Any]) -> None:
        operands["q"] = np.zeros((2, 4, count, 64), np.float32)
        operands["new"] = (np.zeros((2, 2, count, 64), np.float32),) * 2
        operands["candidates"] = Candidates(np.tile(np.arange(count, dtype=np.int32), (2, 1)))

    return change


BAD = {
    "q has shape": _set(q=lambda q: q[0]),
    "head dim D is 32": _set(q=lambda q: q[..., :32].copy()),
    "N is 33": _take(33),
    "N is 0": _take(0),
    "transpose the keys": _set(cache=lambda c: (c[0].swapaxes(2, 3).copy(), c[1])),
    "new keys are": _set(new=lambda n: (n[0][:, :, :2].copy(), n[1][:, :, :2].copy())),
    "before any transpose": _set(new=lambda n: (n[0].swapaxes(2, 3).copy(), n[1])),
    "dtypes are": _set(q=lambda q: q.astype(np.float16)),
    "its cache ends at 95": _candidates(positions=lambda r: r.positions + 96),
    "writes slots 94 to 96, its cache ends at 95": _candidates(positions=lambda c: c.positions + 1),
    "writes slots -1": _candidates(positions=lambda r: r.positions * 0 - 1 + np.arange(3, dtype=np.int32)),
    "positions are int64": _candidates(positions=lambda r: r.positions.astype(np.int64)),
    "consecutive": _candidates(positions=lambda r: r.positions * 0),
    "ancestors are": _candidates(ancestors=np.ones((2, 4), np.int32)),
    "does not see itself": _candidates(ancestors=np.ones((2, 3), np.int32)),
    "lnc is 3": lambda operands: operands.update(lnc=3),
}
BAD_PAGES = {
    "names block 99": _candidates(
        block_table=lambda r: np.where(r.block_table == r.block_table[1, 0], 99, r.block_table)
    ),
    "names block -1": _candidates(block_table=lambda r: r.block_table * 0 - 1),
    "the block table is int64": _candidates(block_table=lambda r: r.block_table.astype(np.int64)),
    "S a multiple of 1024": _candidates(block_table=lambda r: r.block_table[:, :7]),
    "not transposed in blocks": _set(cache=lambda c: (c[0].swapaxes(2, 3).copy(), c[1])),
}


@pytest.mark.parametrize(("sentence", "change"), BAD.items(), ids=list(BAD))
def test_refused(sentence: str, change: Callable[[dict[str, Any]], None]) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        call(change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("sentence", "change"), BAD_PAGES.items(), ids=list(BAD_PAGES))
def test_refused_pages(sentence: str, change: Callable[[dict[str, Any]], None]) -> None:
    with pytest.raises(ValueError, match=sentence):
        call(change, pages=True)


@pytest.mark.parametrize("pages", [False, True])
def test_a_good_call_writes_and_a_refused_one_does_not(pages: bool) -> None:
    """Beside the refusals: the same call unchanged runs, and a refusal leaves the cache alone."""
    x = draw(DIMS)
    before = pooled(x.keys.swapaxes(2, 3), x.values)[0][0] if pages else x.fresh()[0]
    operands = call(lambda _: None, pages)
    assert not np.array_equal(operands["cache"][0], before)
    x = draw(DIMS)
    cache = x.fresh()
    with pytest.raises(ValueError, match="its cache ends"):
        verify_attention(x.q, x.new, cache, Candidates(x.positions + 96))
    assert np.array_equal(cache[0], x.keys)
    assert np.array_equal(cache[1], x.values)


def test_as_many_rows_as_partitions() -> None:
    """128 rows of a kv head are served; one row more is refused below."""
    q, new = np.zeros((1, 16, 8, 64), np.float32), np.zeros((1, 1, 8, 64), np.float32)
    cache = np.zeros((1, 1, 64, 8), np.float32), np.zeros((1, 1, 8, 64), np.float32)
    check(q, (new, new), cache, Candidates(np.arange(8, dtype=np.int32)[None]))


def test_too_many_rows_and_slots() -> None:
    q, new = np.zeros((1, 16, 9, 64), np.float32), np.zeros((1, 1, 9, 64), np.float32)
    cache = np.zeros((1, 1, 64, 64), np.float32), np.zeros((1, 1, 64, 64), np.float32)
    positions = np.arange(9, dtype=np.int32)[None]
    with pytest.raises(ValueError, match="128 rows fit"):
        verify_attention(q, (new, new), cache, Candidates(positions))
    long = np.zeros((1, 1, 64, (1 << 17) + 1), np.float32), np.zeros((1, 1, (1 << 17) + 1, 64), np.float32)
    with pytest.raises(ValueError, match="shorten the context"):
        verify_attention(q[:, :8].copy(), (new, new), long, Candidates(positions))
