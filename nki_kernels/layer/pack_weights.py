"""Packing weights on the host, once: from a checkpoint's (out, in) to the blocks that weight_stream.py reads.

A packed weight is (blocks, in, C), block b being C of the output features for all inputs. The number of blocks is
even, so that two cores share them. Works on NumPy arrays and torch tensors; the result is of the same kind.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

# columns of a block: tiles.BANK, but a part of the stored layout, which recipes hash with this file
BANK = 512
# and of FP8 weights, two groups of 128 channels: each is a PSUM bank, and several blocks have to fit
FP8_COLUMNS = 256


def block_width(features: int, max_width: int = BANK) -> int:
    """The largest width up to `max_width` for which an even number of blocks has all features.

    Raises:
        ValueError: `features` is odd.
    """
    if features < 2 or features % 2:
        raise ValueError(
            f"{features} features have no two equal halves, an even number is needed: choose a different tp"
        )
    count = 2
    while features % count or features // count > max_width:
        count += 2
    return features // count


def pack(weight: Any, columns: int = BANK) -> Any:
    """(out, in) as (blocks, in, C), C at most `columns`."""
    return _in_blocks(weight, block_width(len(weight), columns))


def pack_down(weight: Any) -> Any:
    """An FP8 (out, I) as (blocks, I, C): if I is a multiple of 256, K tile t has inputs 128 t to 128 t + 127.

    Then each block of gate and up is a K tile. Or its scales (out, 1).
    """
    out, depth = weight.shape
    if depth % FP8_COLUMNS == 0:
        half = FP8_COLUMNS // 2
        weight = _contiguous(weight.reshape(out, depth // half, half).swapaxes(1, 2)).reshape(out, depth)
    return pack(weight, FP8_COLUMNS)


def _in_blocks(weight: Any, width: int) -> Any:
    return _contiguous(weight.reshape(-1, width, weight.shape[1]).swapaxes(1, 2))


def pack_head(weight: Any, dim: int = 0) -> Any:
    """(V, in) of a vocabulary shard as (blocks, in, C), with zero columns after the last id."""
    count = 2 * -(-len(weight) // (2 * BANK))
    width = 2 * -(-len(weight) // (2 * count))
    padding = weight[: count * width - len(weight)] * 0
    return _in_blocks(_joined([weight, padding], 0), width)


def pack_gate_up(gate: Any, up: Any, columns: int = BANK) -> Any:
    """Two (I, in) weights as (blocks, in, 2 C): a block holds the same C features of both."""
    inner, depth = gate.shape
    width = block_width(inner, columns // 2)
    count = inner // width
    both = _joined([w.reshape(count, width, depth) for w in (gate, up)], 1)
    return _contiguous(both.swapaxes(1, 2))


def _joined(arrays: list[Any], axis: int) -> Any:
    return np.concatenate(arrays, axis) if isinstance(arrays[0], np.ndarray) else torch.cat(arrays, axis)


def _contiguous(array: Any) -> Any:
    return np.ascontiguousarray(array) if isinstance(array, np.ndarray) else array.contiguous()


def pack_qkv(q: Any, k: Any, v: Any, dim: int, columns: int = BANK) -> Any:
    """Three (heads * D, in) weights as (blocks, in, C): heads in the order v, k, q, full heads in a block."""
    features, depth = q.shape[0] + 2 * k.shape[0], q.shape[1]
    heads = features // dim
    width = max([n for n in range(1, max(1, columns // dim) + 1) if heads % (2 * n) == 0], default=1)
    joined = _joined([v, k, q], 0)
    return _contiguous(joined.reshape(heads // width, width * dim, depth).swapaxes(1, 2))


def pack_out(weight: Any, dim: int, columns: int = BANK) -> Any:
    """The output projection (out, H * D) as (blocks, D * H, C), the inputs in the order D, H; or scales (out, 1)."""
    out, depth = weight.shape
    if depth == 1:
        return pack(weight, columns)
    by_dim = weight.reshape(out, depth // dim, dim).swapaxes(1, 2)
    return pack(_contiguous(by_dim).reshape(out, depth), columns)
