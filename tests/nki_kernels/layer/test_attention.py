"""The fused attention half against its law in fp64 and the model, its bits, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from nki_kernels.layer import handover
from nki_kernels.layer.host import decode_attention, place
from tests.close import is_close
from tests.nki_kernels.attention.inputs import unpooled
from tests.nki_kernels.layer.inputs import (
    Attention,
    AttentionDims,
    draw_attention,
    exact_attention,
    naive_attention,
)

# odd first; then the heads of the drafts and the target on a rank of TP 4, 8 and 32
SHAPES = [
    AttentionDims(3, 5, 384, 3, 1, 301),
    AttentionDims(1, 1, 256, 2, 1, 96),
    AttentionDims(2, 3, 256, 4, 2, 700, 128),
    AttentionDims(4, 1, 256, 1, 1, 256, 128),
    AttentionDims(4, 8, 256, 2, 1, 1100),
    AttentionDims(8, 16, 256, 2, 2, 130),
    AttentionDims(1, 7, 256, 16, 2, 200),
    AttentionDims(3, 11, 4096, 2, 1, 150),
    # one key waits with 126 columns when a block of four heads comes
    AttentionDims(9, 14, 256, 18, 3, 60),
    # a block holds one head: values come in three of them
    AttentionDims(2, 3, 256, 3, 3, 96),
]
# every shape in both dtypes and on one core and on two, every dtype on both
WAYS = [(shape, dtype, 1 + (n + m) % 2) for n, shape in enumerate(SHAPES) for m, dtype in enumerate(("fp32", "bf16"))]


def run(a: Attention, pools: tuple[Any, Any] | None = None, **options: Any) -> Any:
    rows = place(a.positions, a.table(), a.dim)
    return decode_attention(a.x, a.packed(), pools or a.pools(), rows, **options)


def same(a: Any, b: Any) -> bool:
    return bool(a.dtype == b.dtype and a.tobytes() == b.tobytes())


@pytest.mark.parametrize(("dims", "dtype", "lnc"), WAYS, ids=str)
def test_law_and_model(dims: AttentionDims, dtype: str, lnc: int) -> None:
    """Output and caches: at most twice as far from the law as the model's own attention in the same dtype."""
    a = draw_attention(dims, dtype)
    pools, table = a.pools(), a.table()
    outside = np.setdiff1d(np.arange(len(pools[0])), table)
    before = [p[outside].copy() for p in pools]
    out = run(a, pools, lnc=lnc)
    exact, written = exact_attention(a)
    naive, theirs = naive_attention(a)
    # two ulps for the row's 1 / rms, which is one number
    assert is_close(out, naive, exact, ulps=2)
    for pool, kept, right in zip(pools, theirs, written, strict=True):
        assert is_close(unpooled(pool, table, dims.S), kept, right, ulps=2)
    # no other block is written, nor block 0
    assert all(same(p[outside], b) for p, b in zip(pools, before, strict=True))
    assert not pools[0][0].any()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_bits_of_rows_1_to_32(dtype: str) -> None:
    """32 rows in one call, one by one, and in calls of several sizes: the same bits, the same cache."""
    a = draw_attention(AttentionDims(1, 32, 256, 2, 1, 1060), dtype, first=[1010])
    whole_pools = a.pools()
    whole = run(a, whole_pools)
    for count in (1, 2, 3, 5, 8, 16, 31):
        pools, parts = a.pools(), []
        for start in range(0, 32, count):
            rows = a.part(slice(0, 1), slice(start, min(start + count, 32)))
            parts.append(run(rows, pools))
        assert np.concatenate(parts, 1).tobytes() == whole.tobytes(), f"N={count}"
        assert all(same(x, y) for x, y in zip(pools, whole_pools, strict=True))


@pytest.mark.parametrize(("dtype", "lnc"), [("fp32", 2), ("bf16", 1)])
def test_neighbours_and_cores_do_not_affect_bits(dtype: str, lnc: int) -> None:
    """Each of 32 sequences alone, in a batch in another order, and on one or two cores."""
    a = draw_attention(AttentionDims(32, 1, 256, 2, 1, 130), dtype)
    whole = run(a)
    order = np.random.default_rng(0).permutation(32)
    turned = Attention(
        a.x[order].copy(), a.norms, a.weights, a.keys[order].copy(), a.values[order].copy(), a.positions[order].copy()
    )
    assert run(turned, lnc=lnc).tobytes() == whole[order].tobytes()
    for b in range(0, 32, 5):
        assert run(a.part(slice(b, b + 1), slice(None)), lnc=lnc).tobytes() == whole[b].tobytes()


def test_bits_can_differ() -> None:
    """Negative control: a bit of a weight, of a visible key and of a cosine change a row; a hidden value does not."""
    a = draw_attention(AttentionDims(1, 2, 256, 2, 1, 300), "fp32", first=[100])
    before = run(a)
    for changed in (a.weights[1], a.keys):
        kept = changed.copy()
        changed.reshape(-1)[0] *= 2
        assert run(a).tobytes() != before.tobytes()
        changed[:] = kept
    a.values[0, 0, 200] = 1e30
    assert run(a).tobytes() == before.tobytes()
    rows = place(a.positions, a.table(), a.dim)
    rows = replace(rows, cos=rows.cos * np.float32(1.01))
    assert decode_attention(a.x, a.packed(), a.pools(), rows).tobytes() != before.tobytes()


# even numbers of blocks: one row, heads of several blocks, an odd number of sequences, and a core without any
SHARED = [
    AttentionDims(4, 8, 256, 2, 1, 1100),
    AttentionDims(3, 11, 4096, 2, 1, 150),
    AttentionDims(1, 7, 256, 16, 2, 200),
    AttentionDims(9, 14, 256, 18, 3, 60),
]


@pytest.mark.parametrize("shared", ["both", "heads"])
@pytest.mark.parametrize("dims", SHARED, ids=str)
def test_cores_that_share_weights(dims: AttentionDims, shared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each core makes half of the heads, and half of the output or its own rows': the bits of one core."""
    a = draw_attention(dims, "bf16")
    caches = a.pools(), a.pools()
    right = run(a, caches[0])
    qkv, out = a.packed().qkv.nbytes, a.packed().out.nbytes
    monkeypatch.setattr(handover, "WORTH_SHARING", 0 if shared == "both" else (qkv + out) // 2)
    assert run(a, caches[1], lnc=2).tobytes() == right.tobytes()
    assert all(same(x, y) for x, y in zip(*caches, strict=True))


@pytest.mark.parametrize("tile", ["heads", "attended"])
def test_two_cores_need_what_the_other_made(tile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control for two cores that share weights: a half that is not received changes the result."""
    a = draw_attention(AttentionDims(2, 2, 256, 2, 1, 96), "fp32")
    monkeypatch.setattr(handover, "WORTH_SHARING", 0)
    right, swap = run(a, lnc=2), handover.swap
    lost = {"heads": handover.HEADS, "attended": handover.ATTENDED}[tile]

    def without(halves: Any, pipe: int) -> None:
        swap(halves, pipe)
        if pipe == lost:
            nisa.memset(dst=halves[:, 1 - nl.program_id(0), :], value=0.0)

    monkeypatch.setattr(handover, "swap", without)
    assert run(a, lnc=2).tobytes() != right.tobytes()


def _of(operand: str, **fields: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
    """Change some fields of an operand."""

    def change(operands: dict[str, Any]) -> None:
        kept = operands[operand]
        operands[operand] = replace(kept, **{name: f(getattr(kept, name)) for name, f in fields.items()})

    return change


BAD: dict[str, Callable[[dict[str, Any]], Any]] = {
    "keep the rows of a sequence together": lambda g: g.update(x=g["x"][0]),
    "1 to 128 rows": lambda g: g.update(x=np.zeros((5, 26, 384), np.float32)),
    "gamma is": _of("weights", gamma=lambda w: w[:-1]),
    "q_norm is": _of("weights", q_norm=lambda w: w[:-1]),
    "qkv is": _of("weights", qkv=lambda w: w.swapaxes(1, 2)),
    "out is": _of("weights", out=lambda w: w.swapaxes(1, 2)),
    "head dim D is 64": lambda g: g.update(pools=tuple(p[..., :64] for p in g["pools"])),
    "keys are": lambda g: g.update(pools=(g["pools"][0][0], g["pools"][1])),
    "keys are not transposed in blocks": lambda g: g.update(pools=(g["pools"][0], g["pools"][1][:, :, :64])),
    "fill it with block 0": _of("rows", block_table=lambda t: t[:, :3]),
    "consecutive": _of("rows", positions=lambda p: p * 0),
    "cos is": _of("rows", cos=lambda c: c.astype(np.float64)),
    "sin is": _of("rows", sin=lambda c: c[..., :-1]),
    "dtypes are": _of("weights", qkv=lambda w: w.astype(ml_dtypes.bfloat16)),
    "lnc is 3": lambda g: g.update(lnc=3),
}


@pytest.mark.parametrize(("sentence", "change"), BAD.items(), ids=list(BAD))
def test_refused(sentence: str, change: Callable[[dict[str, Any]], Any]) -> None:
    a = draw_attention(AttentionDims(2, 3, 384, 2, 1, 300), "fp32")
    pools, rows = a.pools(), place(a.positions, a.table(), a.dim)
    operands: dict[str, Any] = {"x": a.x, "weights": a.packed(), "pools": pools, "rows": rows}
    change(operands)
    with pytest.raises(ValueError, match=sentence) as caught:
        decode_attention(**operands)
    assert "\n" not in str(caught.value)
    assert all(same(x, y) for x, y in zip(pools, a.pools(), strict=True))


def test_blocks_do_not_affect_bits() -> None:
    """The same cache in two random orders of blocks, and with stale keys and values behind a row's own."""
    a = draw_attention(AttentionDims(3, 5, 256, 4, 2, 1100), "bf16", first=[3, 1020, 126])
    before = run(a)
    for seed in (2, 3):
        a.keys[0, :, 9:], a.values[0, :, 9:] = 1e30, -1e30
        rows = place(a.positions, a.table(seed), a.dim)
        assert same(decode_attention(a.x, a.packed(), a.pools(seed), rows), before)
    # negative control: two blocks that are swapped in a table, of which a row sees one and a part of the other
    rows.block_table[2, :2] = rows.block_table[2, 1::-1]
    after = decode_attention(a.x, a.packed(), a.pools(3), rows)
    assert [same(x, y) for x, y in zip(after, before, strict=True)] == [True, True, False]


@pytest.mark.parametrize("lnc", [1, 2])
def test_rows_without_a_block_are_dropped(lnc: int) -> None:
    """Where the entry is 0, beyond the table, and at negative positions; neighbours' bits stay."""
    a = draw_attention(AttentionDims(4, 3, 256, 2, 1, 1024), "fp32", first=[100, 127, 1023, -2])
    pools, table = a.pools(), a.table()
    table[1], table[2, 0] = 0, 0
    before, right = [p.copy() for p in pools], run(a)
    out = decode_attention(a.x, a.packed(), pools, place(a.positions, table, a.dim), lnc=lnc)
    assert same(out[0], right[0])
    written = {0: [100, 101, 102], 2: [1023], 3: [0]}
    for pool, kept in zip(pools, before, strict=True):
        changed = np.argwhere((pool != kept).any((1, 3)))
        expected = [(table[b, p // 128], p % 128) for b, places in written.items() for p in places]
        assert sorted(map(tuple, changed)) == sorted(expected)
