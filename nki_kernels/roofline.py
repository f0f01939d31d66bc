"""Bytes and operations of each kernel as functions of its dimensions, and the roofline they give."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """What a kernel needs at least: bytes to and from HBM, and operations of the Tensor Engine."""

    hbm_bytes: int
    flops: int


@dataclass(frozen=True)
class AttentionDims:
    """B sequences, H query and G kv heads on this core, N rows, S slots, D; bytes of one cached number."""

    batch: int
    heads: int
    kv_heads: int
    candidates: int
    slots: int
    dim: int
    itemsize: int


def verify_attention(d: AttentionDims) -> Cost:
    """Every cached key and value once; the rows themselves (q, out, new, appended) come on top in use, not here.

    Two products of D operations for each pair of a row and a slot.
    """
    cached = 2 * d.batch * d.kv_heads * d.slots * d.dim * d.itemsize
    return Cost(cached, 4 * d.batch * d.heads * d.candidates * d.slots * d.dim)


def merge_attention(shards: int, rows: int, dim: int, itemsize: int) -> Cost:
    """Parts and lse in, one of each out; the sums are vector work."""
    return Cost((shards + 1) * rows * (dim * itemsize + 4), 0)
