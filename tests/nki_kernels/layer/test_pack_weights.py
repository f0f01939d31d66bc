"""Packing is a permutation that unpacking undoes, for numpy arrays and torch tensors alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from nki_kernels import tiles
from nki_kernels.layer.pack_weights import BANK, pack, pack_gate_up, pack_out, pack_qkv


def _weight(out: int, inputs: int, first: int = 0) -> torch.Tensor:
    return torch.arange(first, first + out * inputs, dtype=torch.float32).reshape(out, inputs)


def unpack(packed: Any) -> Any:
    """The inverse of `pack`."""
    return packed.swapaxes(1, 2).reshape(-1, packed.shape[1])


@pytest.mark.parametrize(("out", "inputs"), [(6, 5), (96, 32), (1280, 3), (5120, 2)])
def test_rows_and_pairs(out: int, inputs: int) -> None:
    w, other = _weight(out, inputs), -_weight(out, inputs)
    assert torch.equal(unpack(pack(w)), w)
    packed = pack_gate_up(w, other)
    count, depth, both = packed.shape
    halves = packed.swapaxes(1, 2).reshape(count, 2, both // 2, depth)
    assert torch.equal(halves[:, 0].reshape(-1, depth), w)
    assert torch.equal(halves[:, 1].reshape(-1, depth), other)


@pytest.mark.parametrize(("heads", "kv", "dim"), [(2, 1, 4), (16, 8, 2), (5, 1, 128), (4, 2, 128)])
def test_heads(heads: int, kv: int, dim: int) -> None:
    q, k, v = _weight(heads * dim, 3), _weight(kv * dim, 3, 10**6), _weight(kv * dim, 3, 2 * 10**6)
    assert torch.equal(unpack(pack_qkv(q, k, v, dim)), torch.cat((v, k, q)))
    out = _weight(6, heads * dim)
    by_dim = unpack(pack_out(out, dim)).reshape(6, dim, heads)
    assert torch.equal(by_dim.swapaxes(1, 2).reshape(6, -1), out)


def test_numpy_and_torch_alike_and_a_block_fills_at_most_a_bank() -> None:
    gate, up = _weight(6, 4), -_weight(6, 4)
    assert np.array_equal(pack_gate_up(gate, up).numpy(), pack_gate_up(gate.numpy(), up.numpy()))
    # the stored layout has a constant of its own, which the kernels' products must hold
    assert BANK <= tiles.BANK
