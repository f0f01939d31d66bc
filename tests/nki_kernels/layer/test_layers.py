"""L layers in one launch: the bits of the half-layer kernels, on one core and two, over 1, 2 and 4 ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from nki_kernels.layer import core_split, decode_layers, mlp
from nki_kernels.layer.attention import decode_attention
from nki_kernels.layer.decode_layers import decode_layers_kernel
from nki_kernels.layer.law import rope_tables
from nki_kernels.layer.mlp import decode_mlp
from nki_kernels.layer.pack_weights import pack, pack_gate_up
from nkisim.ranks import simulate_ranks
from tests.nki_kernels.layer.inputs import AttentionDims, draw_attention, draw_mlp

INNER = 224
# odd first; two kv heads and more rows than are DMA-transposed; one sequence; long rows, which are split in four
ODD, WIDE = AttentionDims(3, 5, 384, 3, 1, 301), AttentionDims(3, 6, 256, 4, 2, 200)
SINGLE, LONG = AttentionDims(1, 2, 256, 2, 1, 96), AttentionDims(3, 11, 4096, 2, 1, 150)
# heads in several blocks of QKV
BLOCKS = AttentionDims(1, 7, 256, 16, 2, 200)
# six chunks of keys: in fp32 four of them are prefetched before the layer; three chunks
FAR, NEAR = AttentionDims(2, 3, 256, 2, 1, 5200), AttentionDims(1, 3, 256, 2, 1, 2100)


@dataclass
class Model:
    """A rank's rows, its layers' tensors, (cos, sin, positions, block table)."""

    x: Any
    layers: list[tuple[Any, ...]]
    places: tuple[Any, ...]

    def arguments(self, groups: Any = None) -> tuple[Any, ...]:
        """The operands of the kernel."""
        return self.x, tuple(self.layers), *self.places, groups

    def pools(self) -> bytes:
        """The bits of all caches."""
        return b"".join(pool.tobytes() for layer in self.layers for pool in layer[8:])


def draw(d: AttentionDims, dtype: str, count: int, rank: int = 0) -> Model:
    """Layers and ranks with different numbers; every rank has the same rows."""
    a, m = draw_attention(d, dtype), draw_mlp(d.B * d.N, d.E, INNER, dtype)
    layers = []
    for layer in range(count):
        half = replace(a, weights=tuple(np.roll(w, 7 * layer + rank + 1, 0) for w in a.weights))
        gate, up, down = (np.roll(w, 5 * layer + rank, 0) for w in (m.gate, m.up, m.down))
        layers.append((*half.weight_operands(), m.gamma, pack_gate_up(gate, up), pack(down), *a.pages()[0]))
    return Model(a.x.reshape(-1, d.E), layers, (*rope_tables(a.positions, 128), a.positions, a.pages()[1]))


def over_ranks(parts: list[Any]) -> Any:
    """The all-reduce of the ranks' parts: in fp32, in the order of the ranks, rounded once."""
    total = parts[0].astype(np.float32)
    for part in parts[1:]:
        total = total + part.astype(np.float32)
    return total.astype(parts[0].dtype)


def by_halves(ranks: list[Model]) -> Any:
    """The same layers by the half-layer kernels, with all-reduces and residuals as in a graph."""
    x, (cos, sin, *where) = ranks[0].x, ranks[0].places
    for layer in range(len(ranks[0].layers)):
        of_ranks = [model.layers[layer] for model in ranks]
        parts = [decode_attention(x, *tensors[:5], cos, sin, *tensors[8:], *where) for tensors in of_ranks]
        x = (x.astype(np.float32) + over_ranks(parts).astype(np.float32)).astype(x.dtype)
        parts = [decode_mlp(x, *tensors[5:8]) for tensors in of_ranks]
        x = (x.astype(np.float32) + over_ranks(parts).astype(np.float32)).astype(x.dtype)
    return x


WAYS = [(ODD, "bf16", 2, 1, "none"), (ODD, "fp32", 1, 2, "heads"), (WIDE, "bf16", 2, 2, "all"),
        (SINGLE, "bf16", 2, 2, "heads"), (NEAR, "fp32", 2, 1, "all"), (BLOCKS, "bf16", 1, 2, "heads"),
        (BLOCKS, "bf16", 1, 2, "all")]  # fmt: skip
SLOW = [(ODD, "bf16", 4, 1), (WIDE, "fp32", 1, 1), (SINGLE, "bf16", 4, 2), (LONG, "bf16", 2, 2), (FAR, "fp32", 2, 1)]
SWEEP = [pytest.param(*way, split, marks=pytest.mark.slow) for way in SLOW for split in ("none", "heads", "all")]


@pytest.mark.parametrize(("dims", "dtype", "count", "lnc", "split"), [*WAYS, *SWEEP], ids=str)
def test_the_bits_of_the_halves(
    dims: AttentionDims, dtype: str, count: int, lnc: int, split: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two cores replicate weights or split them; with one sequence a core may compute heads only."""
    halves, model = draw(dims, dtype, count), draw(dims, dtype, count)
    if split != "none":
        # prefetch all keys that fit, whatever the MLP's weights
        monkeypatch.setattr(decode_layers, "KEYS_SHARE", 0.01)
        qkv, out = (tensor.nbytes for tensor in model.layers[0][3:5])
        monkeypatch.setattr(core_split, "MIN_BYTES_TO_SPLIT", 0 if split == "all" else (qkv + out) // 2)
        monkeypatch.setattr(mlp, "MIN_BYTES_TO_SPLIT", 0)
    out = decode_layers.decode_layers(*model.arguments(), lnc=lnc)
    assert out.tobytes() == by_halves([halves]).tobytes()
    assert model.pools() == halves.pools()


@pytest.mark.parametrize(
    ("world", "lnc"), [(2, 2), *(pytest.param(*way, marks=pytest.mark.slow) for way in ((2, 1), (4, 2)))]
)
def test_sums_over_ranks(world: int, lnc: int) -> None:
    halves, models = ([draw(SINGLE, "bf16", 2, rank) for rank in range(world)] for _ in range(2))
    groups = (tuple(range(world)),)
    outs = simulate_ranks(decode_layers_kernel[lnc], world)([m.arguments(groups) for m in models])
    expected = by_halves(halves)
    assert all(out.tobytes() == expected.tobytes() for out in outs)
    assert [m.pools() for m in models] == [m.pools() for m in halves]
    # negative control: without one rank's part
    assert by_halves(halves[1:]).tobytes() != expected.tobytes()


@pytest.mark.parametrize("half", ["mlp", "attention"])
def test_weights_in_another_order_than_their_use_are_refused(half: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two weights of one shape, swapped in the stream: only their names differ."""
    cls = {"mlp": mlp.MLPHalf, "attention": decode_layers.LayerOperands}[half]
    tiles = cls.tiles

    def swapped(operands: Any, *options: Any) -> Any:
        first, second = (operands.gate_up, operands.down) if half == "mlp" else operands.weights
        rest = [t for t in tiles(operands, *options) if t.weight not in (first, second)]
        return second.tiles() + first.tiles() + rest

    monkeypatch.setattr(cls, "tiles", swapped)
    with pytest.raises(AssertionError, match=r"the next tile is of (down|out) 0, not of (gate_up|qkv) 0"):
        decode_layers.decode_layers(*draw(SINGLE, "fp32", 1).arguments())


def test_exchanges_that_may_be_outstanding_have_different_pipes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads, attention output and MLP blocks alternate in a launch of several layers."""
    for module in (core_split, mlp):
        monkeypatch.setattr(module, "MIN_BYTES_TO_SPLIT", 0)
    pipes, sendrecv = set[int](), core_split.nisa.sendrecv

    def noted(**operands: Any) -> None:
        pipes.add(operands["pipe_id"])
        sendrecv(**operands)

    monkeypatch.setattr(core_split.nisa, "sendrecv", noted)
    decode_layers.decode_layers(*draw(SINGLE, "bf16", 2).arguments(), lnc=2)
    assert pipes == {core_split.HEADS_PIPE, core_split.ATTENDED_PIPE, core_split.MLP_PIPE}
    assert len(pipes) == 3
