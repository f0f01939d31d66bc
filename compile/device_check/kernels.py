"""Each kernel at one small shape against its fp64 law, launched on the cores of a build.

A case takes ``run``, which makes a launched kernel callable: the identity on a device, ``nki.simulate`` in its test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from model.nki.launches import LNC
from nki_kernels.attention import law as attention_law
from nki_kernels.attention.blocks import BLOCK, append_rows_kernel
from nki_kernels.attention.host import Candidates, verify_attention
from nki_kernels.attention.prompt import prompt_attention
from nki_kernels.layer import law as layer_law
from nki_kernels.layer.host import AttentionWeights, decode_attention, place
from nki_kernels.layer.layers import decode_layers
from nki_kernels.layer.mlp import decode_mlp
from nki_kernels.layer.pack_weights import pack, pack_gate_up, pack_out, pack_qkv
from nki_kernels.layer.prompt_matmul import prompt_mlp, prompt_product
from nki_kernels.limits import CHUNK, NO_FLOOR
from nki_kernels.sampling import host as sampling_host
from nki_kernels.sampling import law
from nki_kernels.sampling.host import Proposal, Shard

Run = Callable[[Any], Any]
# fp32 sums of a few hundred terms, relative to the largest number
_SUMS = 64 * float(np.finfo(np.float32).eps)


class Compared(NamedTuple):
    """One result: its largest error, relative to the largest expected number, may be ``bound``."""

    what: str
    found: Any
    expected: Any
    bound: float = _SUMS

    @property
    def error(self) -> float:
        found, expected = (np.asarray(x).astype(np.float64) for x in (self.found, self.expected))
        if found.shape != expected.shape or not np.isfinite(found).all():
            return float("inf")
        return float(np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-30))


def _normal(seed: int, *shapes: tuple[int, ...], size: float = 1.0) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [(size * rng.standard_normal(shape)).astype(np.float32) for shape in shapes]


def _fp64(*arrays: Any) -> Any:
    return tuple(a.astype(np.float64) for a in arrays)


def _positions(first: list[int], count: int) -> Any:
    return (np.array(first, np.int32)[:, None] + np.arange(count, dtype=np.int32)).astype(np.int32)


def _paged(cache_BGSD: Any) -> tuple[Any, Any]:
    """A cache as a pool of blocks after the null block, and its block table, padded to whole chunks."""
    batch, kv, slots, dim = cache_BGSD.shape
    per = -(-slots // BLOCK)
    whole = np.pad(cache_BGSD, ((0, 0), (0, 0), (0, per * BLOCK - slots), (0, 0)))
    blocks = whole.reshape(batch, kv, per, BLOCK, dim).swapaxes(1, 2).reshape(-1, kv, BLOCK, dim)
    table = 1 + np.arange(batch * per, dtype=np.int32).reshape(batch, per)
    null = np.zeros_like(blocks[:1])
    return np.concatenate((null, blocks)), np.pad(table, ((0, 0), (0, -per % (CHUNK // BLOCK))))


def attention(run: Run) -> list[Compared]:
    """3 rows of two sequences, 4 query and 2 kv heads over 256 positions."""
    q, k_new, v_new, keys, values = _normal(2, (2, 4, 3, 64), *((2, 2, 3, 64),) * 2, *((2, 2, 256, 64),) * 2)
    (pool, table), (values_pool, _), positions = _paged(keys), _paged(values), _positions([40, 200], 3)
    out = verify_attention(
        q, (k_new, v_new), (pool, values_pool), Candidates(positions, block_table=table), lnc=LNC, run=run
    )
    cache = _fp64(keys, values)
    expected, _ = attention_law.verify_attention(*_fp64(q), _fp64(k_new, v_new), cache, positions)
    return [Compared("out", out, expected), Compared("keys, in place", pool, _paged(cache[0])[0], 0)]


def prompt(run: Run) -> list[Compared]:
    """256 rows of a prompt from position 50 on: appended to their blocks, then attended."""
    q, k_new, v_new, keys, values = _normal(10, (1, 4, 256, 64), *((1, 2, 256, 64),) * 2, *((1, 2, 384, 64),) * 2)
    (pool, table), (values_pool, _), positions = _paged(keys), _paged(values), _positions([50], 256)
    run(append_rows_kernel[LNC])(k_new, v_new, pool, values_pool, positions, table)
    out = prompt_attention(q, (pool, values_pool), positions[:, :1].copy(), table, lnc=LNC, run=run)
    keys[:, :, 50:306], values[:, :, 50:306] = k_new, v_new
    expected = attention_law.prompt_attention(*_fp64(q[0]), _fp64(keys[0], values[0]), 50)
    return [Compared("out", out[0], expected), Compared("keys, in place", pool, _paged(keys)[0], 0)]


def mlp(run: Run) -> list[Compared]:
    """3 rows of 256 over 192."""
    (x, gamma), (gate, up) = _normal(4, (3, 256), (256,)), _normal(5, *((192, 256),) * 2, size=0.06)
    (down,) = _normal(6, (256, 192))
    out = decode_mlp(x, gamma, (pack_gate_up(gate, up), pack(down)), lnc=LNC, run=run)
    return [Compared("out", out, layer_law.decode_mlp(*_fp64(x, gamma), _fp64(gate, up, down)))]


def prompt_products(run: Run) -> list[Compared]:
    """130 rows of 256 over 192, and times one weight; the second core has two rows."""
    (x, gamma), (gate, up) = _normal(4, (130, 256), (256,)), _normal(5, *((192, 256),) * 2, size=0.06)
    (down,) = _normal(6, (256, 192))
    out = prompt_mlp(x, gamma, (pack_gate_up(gate, up), pack(down)), lnc=LNC, run=run)
    product = prompt_product(x, pack(gate), lnc=LNC, run=run)
    return [
        Compared("mlp", out, layer_law.decode_mlp(*_fp64(x, gamma), _fp64(gate, up, down))),
        Compared("product", product, _fp64(x)[0] @ _fp64(gate)[0].T),
    ]


class _Layer:
    """A layer's weights and caches for rows of two sequences at positions 30 and 77."""

    def __init__(self, seed: int) -> None:
        shapes = (256, 256), *((128, 256),) * 2, (256, 256), *((192, 256),) * 2, (256, 192)
        self.weights = _normal(seed, *shapes, size=0.06)
        self.norms = [np.ones(n, np.float32) for n in (256, 128, 128)]
        self.cache = _normal(seed + 1, *((2, 1, 100, 128),) * 2)
        (keys, self.table), (values, _) = map(_paged, self.cache)
        self.pools, self.rows = (keys, values), place(_positions([30, 77], 2), self.table, 128)
        q, k, v, out, gate, up, down = self.weights
        self.attention = AttentionWeights(*self.norms, pack_qkv(q, k, v, 128), pack_out(out, 128))
        self.mlp = self.norms[0], pack_gate_up(gate, up), pack(down)

    def attend(self, x: Any) -> Any:
        angles, of_half = _fp64(self.rows.cos, self.rows.sin), (_fp64(*self.norms), _fp64(*self.weights[:4]))
        return layer_law.decode_attention(x, *of_half, angles, _fp64(*self.cache), self.rows.positions)

    def apply(self, x: Any) -> Any:
        x = x + self.attend(x)
        return x + layer_law.decode_mlp(x, *_fp64(self.norms[0]), _fp64(*self.weights[4:]))


def attention_half(run: Run) -> list[Compared]:
    """2 rows of two sequences, two query heads and one kv head."""
    (x,), layer = _normal(7, (2, 2, 256)), _Layer(8)
    out = decode_attention(x, layer.attention, layer.pools, layer.rows, lnc=LNC, run=run)
    return [Compared("out", out, layer.attend(*_fp64(x)))]


def layers(run: Run) -> list[Compared]:
    """The same rows through three layers in one launch, on one rank."""
    (x,), stack = _normal(7, (2, 2, 256)), [_Layer(seed) for seed in (20, 30, 40)]
    packed = [(layer.attention, layer.mlp, layer.pools) for layer in stack]
    out, (expected,) = decode_layers(x, packed, stack[0].rows, lnc=LNC, run=run), _fp64(x)
    for layer in stack:
        expected = layer.apply(expected)
    return [Compared("out", out, expected, len(stack) * _SUMS)]


def noise(run: Run) -> list[Compared]:
    """Noise of two seeds."""
    seeds = np.array([[1, -2], [7, 1 << 30]], np.int32)
    positions, start = np.array([[3], [100000]], np.int32), np.array([[9]], np.int32)
    out = sampling_host.gumbel_noise(seeds, positions, start, 333, lnc=LNC, run=run)
    keys = [(int(low) & 0xFFFFFFFF, int(high) & 0xFFFFFFFF) for low, high in seeds]
    expected = [law.gumbel_noise(key, p, range(9, 342)) for key, p in zip(keys, (3, 100000), strict=True)]
    return [Compared("noise", out, expected)]


def sample(run: Run) -> list[Compared]:
    """Samples of a greedy row, a noisy one and one with a floor; weights above thresholds."""
    logits, gumbels = _normal(10, (3, 777), (3, 777), size=3)
    temperature = np.array([[0], [0.7], [1.3]], np.float32)
    floor = np.array([[NO_FLOOR], [NO_FLOOR], [4]], np.float32)
    shard = Shard(logits, np.zeros((1, 1), np.int32))
    values, ids = sampling_host.coupled_sample(shard, gumbels, temperature, floor, lnc=LNC, run=run)
    masked = np.where(logits >= floor, logits.astype(np.float64), -np.inf)
    perturbed = [masked[0], masked[1] / 0.7 + gumbels[1], masked[2] / 1.3 + gumbels[2]]
    ones, limits = np.ones((3, 1), np.float32), _normal(11, (3, 5))[0]
    above = sampling_host.weights_above(logits, (ones, -9 * ones), floor, limits, lnc=LNC, run=run).sum(0)
    weights = np.exp(logits.astype(np.float64) - 9) * (logits >= floor)
    summed = np.stack([(weights * (logits > limits[:, j : j + 1])).sum(1) for j in range(5)])
    return [
        Compared("sampled ids", ids[values.argmax(0), range(3)], [int(p.argmax()) for p in perturbed], 0),
        Compared("weights above", above, summed),
    ]


def accept(run: Run) -> list[Compared]:
    """Drafts of which 0, 2 and all of 3 are equal, and a limit of 1."""
    sampled = np.array([[5, 6, 7, 8]] * 4, np.int32)
    drafts = np.array([[9, 6, 7], [5, 6, 1], [5, 6, 7], [5, 6, 7]], np.int32)
    limits = np.array([[3], [3], [3], [1]], np.int32)
    proposal = Proposal(drafts, np.full((4, 1), 10, np.int32), limits)
    found = sampling_host.accept_drafts(np.zeros((1, 4, 4), np.float32), sampled[None], proposal, lnc=LNC, run=run)
    rows = [law.accept_drafts(list(d), list(t), int(m[0])) for d, t, m in zip(drafts, sampled, limits, strict=True)]
    counts = np.array([[len(row)] for row in rows])
    expected = ([[*row, *[-1] * (4 - len(row))] for row in rows], counts, [[row[-1]] for row in rows], 10 + counts)
    names = ("accepted", "counts", "next ids", "next positions")
    return [Compared(n, f, e, 0) for n, f, e in zip(names, found, expected, strict=True)]


# shortest programs first
CASES: dict[str, Callable[[Run], list[Compared]]] = {
    "accept_drafts": accept,
    "gumbel_noise": noise,
    "coupled_sample, weights_above": sample,
    "decode_mlp": mlp,
    "prompt_mlp, prompt_product": prompt_products,
    "verify_attention": attention,
    "append_rows, prompt_attention": prompt,
    "decode_attention": attention_half,
    "decode_layers": layers,
}
