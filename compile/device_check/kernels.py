"""Each kernel on a small case against its law in fp64: the cases of the device check and of its test.

A case takes `run`, which makes a launched kernel callable (the identity on a device), launches on the cores of a build,
and returns each result with its expected value and its bound.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from model.nki.launches import LNC
from nki_kernels.attention import law as attention_law
from nki_kernels.attention.append_rows import append_rows
from nki_kernels.attention.paged_kv import PAGE
from nki_kernels.attention.prompt import prompt_attention
from nki_kernels.attention.verify import verify_attention
from nki_kernels.layer import law as layer_law
from nki_kernels.layer.attention import decode_attention
from nki_kernels.layer.decode_layers import decode_layers
from nki_kernels.layer.mlp import decode_mlp
from nki_kernels.layer.pack_weights import pack, pack_gate_up, pack_out, pack_qkv
from nki_kernels.layer.prompt_matmul import prompt_mlp, prompt_product
from nki_kernels.limits import CHUNK, NO_FLOOR
from nki_kernels.sampling import law
from nki_kernels.sampling.accept_drafts import accept_drafts
from nki_kernels.sampling.coupled_sample import coupled_sample
from nki_kernels.sampling.gumbel_noise import gumbel_noise
from nki_kernels.sampling.weights_above import weights_above

Run = Callable[[Any], Any]
# fp32 sums of a few hundred terms, relative to the largest number
_SUMS = 64 * float(np.finfo(np.float32).eps)
_EXACT = 0.0


class Compared(NamedTuple):
    """One result: its largest error, relative to the largest expected number, may be `bound`."""

    what: str
    found: Any
    expected: Any
    bound: float

    @property
    def error(self) -> float:
        found, expected = (np.asarray(x).astype(np.float64) for x in (self.found, self.expected))
        if found.shape != expected.shape or not np.isfinite(found).all():
            return float("inf")
        return float(np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-30))


def _normal(seed: int, *shapes: tuple[int, ...], size: float = 1.0) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [(size * rng.standard_normal(shape)).astype(np.float32) for shape in shapes]


def _wide(arrays: Any) -> Any:
    return tuple(a.astype(np.float64) for a in arrays)


def _positions(first: list[int], count: int) -> Any:
    return (np.array(first, np.int32)[:, None] + np.arange(count, dtype=np.int32)).astype(np.int32)


def _pool(cache: Any) -> tuple[Any, Any]:
    """A cache (B, G, S, D) as a pool of blocks behind block 0, and its block table, filled up to whole chunks."""
    batch, kv, slots, dim = cache.shape
    per = -(-slots // PAGE)
    whole = np.pad(cache, ((0, 0), (0, 0), (0, per * PAGE - slots), (0, 0))).reshape(batch, kv, per, PAGE, dim)
    pool = np.concatenate((np.zeros((1, kv, PAGE, dim), cache.dtype), whole.swapaxes(1, 2).reshape(-1, kv, PAGE, dim)))
    table = 1 + np.arange(batch * per, dtype=np.int32).reshape(batch, per)
    return pool, np.pad(table, ((0, 0), (0, -per % (CHUNK // PAGE))))


def attention(run: Run) -> list[Compared]:
    """3 rows in two sequences of 2 x 2 heads over 256 positions: causal, and of a block."""
    q, k_new, v_new, keys, values = _normal(2, (2, 4, 3, 64), *((2, 2, 3, 64),) * 2, *((2, 2, 256, 64),) * 2)
    positions, found = _positions([40, 200], 3), list[Compared]()
    for name, limit in (("causal", None), ("block", positions[:, -1:].copy())):
        (pool, table), (values_pool, _) = _pool(keys), _pool(values)
        out = verify_attention(q, k_new, v_new, pool, values_pool, positions, table, limit, lnc=LNC, run=run)
        wide = _wide((q, k_new, v_new, keys, values))
        expected = attention_law.verify_attention(wide[0], wide[1:3], wide[3:], positions, limit)
        found.append(Compared(f"out, {name}", out, expected, _SUMS))
        found.append(Compared("keys", pool, _pool(wide[3])[0], _EXACT))
    return found


def prompt(run: Run) -> list[Compared]:
    """256 rows of a prompt from position 50 on: appended to their blocks, then attended."""
    q, k_new, v_new, keys, values = _normal(10, (1, 4, 256, 64), *((1, 2, 256, 64),) * 2, *((1, 2, 384, 64),) * 2)
    (pool, table), (values_pool, _), positions = _pool(keys), _pool(values), _positions([50], 256)
    append_rows(k_new, v_new, pool, values_pool, positions, table, lnc=LNC, run=run)
    out = prompt_attention(q, pool, values_pool, positions[:, :1].copy(), table, lnc=LNC, run=run)
    for cache, rows in ((keys, k_new), (values, v_new)):
        cache[:, :, 50:306] = rows
    expected = attention_law.prompt_attention(q[0].astype(np.float64), _wide((keys[0], values[0])), 50)
    return [Compared("out", out[0], expected, _SUMS), Compared("keys", pool, _pool(keys)[0], _EXACT)]


def mlp(run: Run) -> list[Compared]:
    """Three rows of 256 over 192."""
    (x,), (gate, up), (down,) = _normal(4, (3, 256)), _normal(5, *((192, 256),) * 2, size=0.06), _normal(6, (256, 192))
    gamma = np.ones(256, np.float32)
    out = decode_mlp(x, gamma, pack_gate_up(gate, up), pack(down), lnc=LNC, run=run)
    return [Compared("out", out, layer_law.decode_mlp(*_wide((x, gamma)), _wide((gate, up, down))), _SUMS)]


def prompt_products(run: Run) -> list[Compared]:
    """130 rows of 256 over 192, and times a weight alone: of two cores the second has two rows."""
    (x,), (gate, up), (down,) = (
        _normal(4, (130, 256)),
        _normal(5, *((192, 256),) * 2, size=0.06),
        _normal(6, (256, 192)),
    )
    gamma = np.ones(256, np.float32)
    out = prompt_mlp(x, gamma, pack_gate_up(gate, up), pack(down), lnc=LNC, run=run)
    product = prompt_product(x, pack(gate), lnc=LNC, run=run)
    return [
        Compared("mlp", out, layer_law.decode_mlp(*_wide((x, gamma)), _wide((gate, up, down))), _SUMS),
        Compared("product", product, x.astype(np.float64) @ gate.astype(np.float64).T, _SUMS),
    ]


def attention_half(run: Run) -> list[Compared]:
    """Two rows of two sequences, two query heads of one kv head."""
    (x,), w = _normal(7, (2, 2, 256)), _normal(8, (256, 256), *((128, 256),) * 2, (256, 256), size=0.06)
    keys, values = _normal(9, *((2, 1, 100, 128),) * 2)
    norms, positions = [np.ones(n, np.float32) for n in (256, 128, 128)], _positions([30, 77], 2)
    (keys_pool, table), (values_pool, _), angles = _pool(keys), _pool(values), layer_law.rope_tables(positions, 128)
    packed = (pack_qkv(w[0], w[1], w[2], 128), pack_out(w[3], 128))
    places = (*angles, keys_pool, values_pool, positions, table)
    out = decode_attention(x.reshape(4, 256), *norms, *packed, *places, lnc=LNC, run=run).reshape(x.shape)
    wide = (x.astype(np.float64), _wide(norms), _wide(w), _wide(angles), _wide((keys, values)))
    return [Compared("out", out, layer_law.decode_attention(*wide, positions), _SUMS)]


def layers(run: Run, count: int = 1) -> list[Compared]:
    """Two rows of two sequences through so many layers in one launch, on one rank."""
    (x,), positions = _normal(7, (2, 2, 256)), _positions([30, 77], 2)
    gammas, angles = [np.ones(n, np.float32) for n in (256, 128, 128)], layer_law.rope_tables(positions, 128)
    tensors, expected, table = list[Any](), x.astype(np.float64), None
    for i in range(count):
        w = _normal(20 + i, (256, 256), *((128, 256),) * 2, (256, 256), *((192, 256),) * 2, (256, 192), size=0.06)
        keys, values = _normal(40 + i, *((2, 1, 100, 128),) * 2)
        (keys_pool, table), (values_pool, _) = _pool(keys), _pool(values)
        packed = (pack_qkv(w[0], w[1], w[2], 128), pack_out(w[3], 128))
        mlp_tensors = (gammas[0], pack_gate_up(w[4], w[5]), pack(w[6]))
        tensors.append((*gammas, *packed, *mlp_tensors, keys_pool, values_pool))
        half = (_wide(gammas), _wide(w[:4]), _wide(angles), _wide((keys, values)))
        expected = expected + layer_law.decode_attention(expected, *half, positions)
        expected = expected + layer_law.decode_mlp(expected, gammas[0].astype(np.float64), _wide(w[4:]))
    places = (*angles, positions, table, None)
    out = decode_layers(x.reshape(4, 256), tuple(tensors), *places, lnc=LNC, run=run).reshape(x.shape)
    return [Compared("out", out, expected, count * _SUMS)]


def noise(run: Run) -> list[Compared]:
    """Noise of two seeds."""
    seeds = np.array([[1, -2], [7, 1 << 30]], np.int32)
    positions, start = np.array([[3], [100000]], np.int32), np.array([[9]], np.int32)
    out = gumbel_noise(seeds, positions, start, 333, 0, lnc=LNC, run=run)
    keys = [(int(low) & 0xFFFFFFFF, int(high) & 0xFFFFFFFF) for low, high in seeds]
    expected = [law.gumbel_noise(key, p, range(9, 342)) for key, p in zip(keys, (3, 100000), strict=True)]
    return [Compared("noise", out, expected, _SUMS)]


def sample(run: Run) -> list[Compared]:
    """Draws of a greedy row, a noisy one and one with a floor; weights above thresholds."""
    logits, gumbels = _normal(10, (3, 777), (3, 777), size=3)
    temperature = np.array([[0], [0.7], [1.3]], np.float32)
    floor = np.array([[NO_FLOOR], [NO_FLOOR], [4]], np.float32)
    start = np.zeros((1, 1), np.int32)
    values, ids = coupled_sample(logits, gumbels, temperature, floor, start, lnc=LNC, run=run)
    kept = np.where(logits >= floor, logits.astype(np.float64), -np.inf)
    perturbed = [kept[0], kept[1] / 0.7 + gumbels[1], kept[2] / 1.3 + gumbels[2]]
    ones, limits = np.ones((3, 1), np.float32), _normal(11, (3, 5))[0]
    above = weights_above(logits, ones, -9 * ones, floor, limits, lnc=LNC, run=run).sum(0)
    weights = np.exp(logits.astype(np.float64) - 9) * (logits >= floor)
    summed = np.stack([(weights * (logits > limits[:, j : j + 1])).sum(1) for j in range(5)])
    return [
        Compared("drawn ids", ids[values.argmax(0), range(3)], [int(p.argmax()) for p in perturbed], _EXACT),
        Compared("weights above", above, summed, _SUMS),
    ]


def accept(run: Run) -> list[Compared]:
    """Drafts that agree for 0, 2 and all of 3, and a limit of 1."""
    drawn = np.array([[5, 6, 7, 8]] * 4, np.int32)
    drafts = np.array([[9, 6, 7], [5, 6, 1], [5, 6, 7], [5, 6, 7]], np.int32)
    limits = np.array([[3], [3], [3], [1]], np.int32)
    steps = (drafts, np.full((4, 1), 10, np.int32), limits)
    found = accept_drafts(np.zeros((1, 4, 4), np.float32), drawn[None], *steps, lnc=LNC, run=run)
    rows = [law.accept_drafts(list(d), list(t), int(m[0])) for d, t, m in zip(drafts, drawn, limits, strict=True)]
    padded = [[*row, *[-1] * (4 - len(row))] for row in rows]
    counts = np.array([[len(row)] for row in rows])
    expected = (padded, counts, [[row[-1]] for row in rows], 10 + counts)
    names = ("accepted", "counts", "next ids", "next positions")
    return [Compared(n, f, e, _EXACT) for n, f, e in zip(names, found, expected, strict=True)]


CASES: dict[str, Callable[[Run], list[Compared]]] = {
    "verify_attention": attention,
    "append_rows, prompt_attention": prompt,
    "decode_mlp": mlp,
    "prompt_mlp, prompt_product": prompt_products,
    "decode_attention": attention_half,
    "decode_layers": layers,
    "decode_layers, 4 layers": functools.partial(layers, count=4),
    "gumbel_noise": noise,
    "coupled_sample, weights_above": sample,
    "accept_drafts": accept,
}
