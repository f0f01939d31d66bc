"""Bytes and operations of each kernel as functions of its dimensions, for the roofline."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """The minimum work of a kernel: bytes to and from HBM, and operations of the Tensor Engine."""

    hbm_bytes: int
    flops: int


@dataclass(frozen=True)
class AttentionDims:
    """B sequences, H query and G kv heads of a rank, N rows, S positions (`slots`), D; bytes per cached element."""

    batch: int
    heads: int
    kv_heads: int
    candidates: int
    slots: int
    dim: int
    itemsize: int


def verify_attention(d: AttentionDims) -> Cost:
    """Every cached key and value once, not the rows (q, out, new); two products of D for each row and position."""
    cached = 2 * d.batch * d.kv_heads * d.slots * d.dim * d.itemsize
    return Cost(cached, 4 * d.batch * d.heads * d.candidates * d.slots * d.dim)


def prompt_attention(d: AttentionDims) -> Cost:
    """One sequence's last N rows: keys, values and rows once; two products of D for each row and visible position."""
    moved = 2 * (d.kv_heads * d.slots + d.heads * d.candidates) * d.dim * d.itemsize
    pairs = d.candidates * (d.slots - d.candidates) + d.candidates * (d.candidates + 1) // 2
    return Cost(moved, 4 * d.heads * pairs * d.dim)


def decode_mlp(rows: int, hidden: int, inner: int, itemsize: int) -> Cost:
    """Gate, up and down once; the rows, in and out, are not counted."""
    weights = 3 * hidden * inner
    return Cost(weights * itemsize, 2 * rows * weights)


def prompt_product(rows: int, depth: int, features: int, itemsize: int, weight_itemsize: int) -> Cost:
    """The weight once, rows in and out."""
    moved = depth * features * weight_itemsize + rows * (depth + features) * itemsize
    return Cost(moved, 2 * rows * depth * features)


def prompt_qkv(rows: int, hidden: int, features: int, itemsize: int, weight_itemsize: int) -> Cost:
    """The weight once, rows in and heads out; norms, angles and rotation are not counted."""
    return prompt_product(rows, hidden, features, itemsize, weight_itemsize)


def prompt_mlp(rows: int, hidden: int, inner: int, itemsize: int, weight_itemsize: int) -> Cost:
    """Gate, up and down once, rows in and out."""
    weights = 3 * hidden * inner
    return Cost(weights * weight_itemsize + 2 * rows * hidden * itemsize, 2 * rows * weights)


def decode_attention(d: AttentionDims, hidden: int, weight_itemsize: int) -> Cost:
    """The four projections and the cache once."""
    weights = 2 * hidden * (d.heads + d.kv_heads) * d.dim
    cached = verify_attention(d)
    return Cost(weights * weight_itemsize + cached.hbm_bytes, 2 * d.batch * d.candidates * weights + cached.flops)


def decode_layers(d: AttentionDims, hidden: int, inner: int, layers: int, weight_itemsize: int) -> Cost:
    """Both halves of each layer; the residual, in and out, is not counted."""
    rows = d.batch * d.candidates
    halves = decode_attention(d, hidden, weight_itemsize), decode_mlp(rows, hidden, inner, weight_itemsize)
    return Cost(layers * sum(c.hbm_bytes for c in halves), layers * sum(c.flops for c in halves))


def gumbel_noise(rows: int, columns: int) -> Cost:
    """The noise out, fp32; its rounds are vector work, which bounds it."""
    return Cost(rows * columns * 4, 0)


def coupled_sample(rows: int, columns: int, itemsize: int) -> Cost:
    """Logits and noise in."""
    return Cost(rows * columns * (itemsize + 4), 0)


def weights_above(rows: int, columns: int, itemsize: int) -> Cost:
    """Logits in, a few numbers a row out."""
    return Cost(rows * columns * itemsize, 0)


def accept(shards: int, batch: int, rows: int, numbers: int) -> Cost:
    """`numbers` of 4 bytes of each shard, sequence and row in, one for each row out."""
    return Cost(4 * batch * rows * (numbers * shards + 1), 0)
