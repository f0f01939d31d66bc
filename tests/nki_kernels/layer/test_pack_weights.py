"""Packing is a permutation that unpacking undoes, for numpy arrays and torch tensors alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from nki_kernels import tiles
from nki_kernels.layer.pack_weights import (
    BANK,
    pack,
    pack_gate_up,
    pack_out,
    pack_qkv,
)


def _weight(out: int, inputs: int, first: int = 0) -> torch.Tensor:
    return torch.arange(first, first + out * inputs, dtype=torch.float32).reshape(out, inputs)


def unpack(packed: Any) -> Any:
    """The inverse of `pack`."""
    return packed.swapaxes(1, 2).reshape(-1, packed.shape[1])


def unpack_gate_up(packed: Any) -> tuple[Any, Any]:
    """The inverse of `pack_gate_up`."""
    count, depth, both = packed.shape
    halves = packed.swapaxes(1, 2).reshape(count, 2, both // 2, depth)
    return halves[:, 0].reshape(-1, depth), halves[:, 1].reshape(-1, depth)


def unpack_qkv(packed: Any, kv_features: int) -> tuple[Any, Any, Any]:
    """The inverse of `pack_qkv`: q, and k and v of `kv_features` rows each."""
    joined = unpack(packed)
    return joined[2 * kv_features :], joined[kv_features : 2 * kv_features], joined[:kv_features]


def unpack_out(packed: Any, dim: int) -> Any:
    """The inverse of `pack_out`."""
    by_dim = unpack(packed)
    return by_dim.reshape(by_dim.shape[0], dim, -1).swapaxes(1, 2).reshape(by_dim.shape)


@pytest.mark.parametrize(("out", "inputs"), [(6, 5), (96, 32), (1280, 3), (5120, 2)])
def test_rows_and_pairs(out: int, inputs: int) -> None:
    w, other = _weight(out, inputs), -_weight(out, inputs)
    assert torch.equal(unpack(pack(w)), w)
    gate, up = unpack_gate_up(pack_gate_up(w, other))
    assert torch.equal(gate, w)
    assert torch.equal(up, other)


@pytest.mark.parametrize(("heads", "kv", "dim"), [(2, 1, 4), (16, 8, 2), (5, 1, 128), (4, 2, 128)])
def test_heads(heads: int, kv: int, dim: int) -> None:
    q, k, v = _weight(heads * dim, 3), _weight(kv * dim, 3, 10**6), _weight(kv * dim, 3, 2 * 10**6)
    unpacked = unpack_qkv(pack_qkv(q, k, v, dim), kv * dim)
    assert all(torch.equal(a, b) for a, b in zip(unpacked, (q, k, v), strict=True))
    out = _weight(6, heads * dim)
    assert torch.equal(unpack_out(pack_out(out, dim), dim), out)


def test_where_numbers_go() -> None:
    gate, up = torch.arange(24.0).reshape(6, 4), -torch.arange(24.0).reshape(6, 4)
    packed = pack_gate_up(gate, up)
    assert np.array_equal(packed.numpy(), pack_gate_up(gate.numpy(), up.numpy()))
    assert packed.shape == (2, 4, 6)
    assert torch.equal(packed[1, :, :3], gate[3:].T)
    assert torch.equal(packed[1, :, 3:], up[3:].T)


def test_a_block_fills_at_most_a_bank() -> None:
    """The stored layout has a constant of its own, which the kernels' products must hold."""
    assert BANK <= tiles.BANK
