"""L layers in one launch: the bits of the half-layer kernels, on one core and two, over 1, 2 and 4 ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import nkisim
from nki_kernels.layer import handover, layers, mlp
from nki_kernels.layer.host import Place, decode_attention, place
from nki_kernels.layer.layers import decode_layers, decode_layers_kernel, tensors_of
from nki_kernels.layer.mlp import decode_mlp
from nki_kernels.layer.pack_weights import pack, pack_gate_up
from nkisim.errors import UnwrittenRead
from nkisim.ranks import simulate_ranks
from nkisim.timeline.schedule import schedule
from tests.nki_kernels.layer.inputs import Attention, AttentionDims, draw_attention, draw_mlp

INNER = 224
# odd first; two kv heads and more rows than are loaded turned; one sequence; long rows, which are cut in four
ODD, WIDE = AttentionDims(3, 5, 384, 3, 1, 301), AttentionDims(5, 4, 256, 4, 2, 1100)
ALONE, LONG = AttentionDims(1, 2, 256, 2, 1, 96), AttentionDims(3, 11, 4096, 2, 1, 150)
# six chunks of keys: in fp32 four of them fit that are asked for before the layer
FAR = AttentionDims(2, 3, 256, 2, 1, 5200)


@dataclass
class Model:
    """A rank's layers, each (attention weights, MLP weights, pools), the rows before them and their place."""

    x: Any
    layers: list[Any]
    rows: Place

    def arguments(self, groups: Any) -> tuple[Any, ...]:
        """Those of the kernel."""
        flat, tensors = self.x.reshape(-1, self.x.shape[-1]), tuple(tensors_of(*layer) for layer in self.layers)
        places = (self.rows.cos, self.rows.sin, self.rows.positions, self.rows.block_table)
        return flat, tensors, *places, groups

    def pools(self) -> bytes:
        """The bits of all caches."""
        return b"".join(pool.tobytes() for _, _, pools in self.layers for pool in pools)


def draw(d: AttentionDims, dtype: str, count: int, rank: int = 0) -> Model:
    """Layers and ranks with different numbers; every rank has the same rows."""
    a, m = draw_attention(d, dtype), draw_mlp(d.B * d.N, d.E, INNER, dtype)
    found = []
    for layer in range(count):
        q, k, v, out = (np.roll(w, 7 * layer + rank + 1, 0) for w in a.weights)
        own = Attention(a.x, a.norms, (q, k, v, out), a.keys, a.values, a.positions)
        gate, up, down = (np.roll(w, 5 * layer + rank, 0) for w in (m.gate, m.up, m.down))
        found.append((own.packed(), (m.gamma, pack_gate_up(gate, up), pack(down)), a.pools()))
    return Model(a.x, found, place(a.positions, a.table(), a.dim))


def over_ranks(parts: list[Any]) -> Any:
    """The ranks' parts as a collective adds them: in fp32, in the order of the ranks, rounded once."""
    total = parts[0].astype(np.float32)
    for part in parts[1:]:
        total = total + part.astype(np.float32)
    return total.astype(parts[0].dtype)


def by_halves(ranks: list[Model]) -> Any:
    """The same layers by the half-layer kernels, with sums over ranks and residuals as a graph has them."""
    x = ranks[0].x
    for layer in range(len(ranks[0].layers)):
        own = [model.layers[layer] for model in ranks]
        parts = [decode_attention(x, w, pools, ranks[0].rows) for w, _, pools in own]
        x = (x.astype(np.float32) + over_ranks(parts).astype(np.float32)).astype(x.dtype)
        parts = [decode_mlp(x, gamma, tuple(packed)) for _, (gamma, *packed), _ in own]
        x = (x.astype(np.float32) + over_ranks(parts).astype(np.float32)).astype(x.dtype)
    return x


WAYS = [
    (ODD, "bf16", 4, 1),
    (ODD, "fp32", 1, 2),
    (WIDE, "bf16", 2, 2),
    (WIDE, "fp32", 1, 1),
    (ALONE, "bf16", 4, 2),
    (LONG, "bf16", 2, 2),
    (FAR, "fp32", 2, 1),
    (FAR, "bf16", 2, 2),
]


@pytest.mark.parametrize("shared", ["none", "heads", "all"])
@pytest.mark.parametrize(("dims", "dtype", "count", "lnc"), WAYS, ids=str)
def test_the_bits_of_the_halves(
    shared: str, dims: AttentionDims, dtype: str, count: int, lnc: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two cores read small weights twice, or each half of them; of one sequence a core may make heads alone."""
    right, model = draw(dims, dtype, count), draw(dims, dtype, count)
    if shared != "none":
        # all six chunks' keys that fit, whatever the MLP's weights
        monkeypatch.setattr(layers, "KEYS_SHARE", 0.01)
        qkv, out = model.layers[0][0].qkv.nbytes, model.layers[0][0].out.nbytes
        monkeypatch.setattr(handover, "WORTH_SHARING", 0 if shared == "all" else (qkv + out) // 2)
        monkeypatch.setattr(mlp, "WORTH_SHARING", 0)
    out = decode_layers(model.x, model.layers, model.rows, lnc=lnc)
    assert out.tobytes() == by_halves([right]).tobytes()
    assert model.pools() == right.pools()


@pytest.mark.parametrize(("world", "lnc"), [(2, 1), (2, 2), (4, 2)])
def test_sums_over_ranks(world: int, lnc: int) -> None:
    right, models = ([draw(ODD, "bf16", 2, rank) for rank in range(world)] for _ in range(2))
    groups = (tuple(range(world)),)
    found = simulate_ranks(decode_layers_kernel[lnc], world)([m.arguments(groups) for m in models])
    expected = by_halves(right)
    assert all(out.tobytes() == expected.tobytes() for out in found)
    assert [m.pools() for m in models] == [m.pools() for m in right]
    # negative control: without one rank's part
    assert by_halves(right[1:]).tobytes() != expected.tobytes()


def test_cores_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without the barrier one core loads what the other has not stored yet."""
    monkeypatch.setattr(layers, "over_ranks", lambda part, groups: part)
    model = draw(WIDE, "fp32", 1)
    with pytest.raises(UnwrittenRead, match="nobody wrote"):
        decode_layers(model.x, model.layers, model.rows, lnc=2)


def test_weights_travel_while_ranks_are_summed() -> None:
    """Before each sum but the last is there, weights that the next half multiplies first are: none waits for it."""
    model, policy = draw(WIDE, "bf16", 2), nkisim.Policy(recording=True, numerics=False, ranks=32)
    events = nkisim.run(decode_layers_kernel[2], model.arguments((tuple(range(32)),)), policy=policy).recording.events
    timed = schedule(events, band=False)
    sums = [i for i, event in enumerate(events) if event.op == "all_reduce" and event.core == 0]
    there = {e.writes[0].tensor: timed.end[j] for j, e in enumerate(events) if e.op == "dma_copy" and e.core == 0}
    used: dict[int, float] = {}
    for j, event in enumerate(events):
        if event.op == "nc_matmul" and event.core == 0:
            for operand in event.reads:
                used.setdefault(operand.tensor, timed.start[j])
    waiting = [sum(there[t] < timed.end[i] <= first for t, first in used.items() if t in there) for i in sums]
    assert len(sums) == 4
    assert min(waiting[:-1]) > 0
    assert waiting[-1] == 0
