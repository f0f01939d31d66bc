"""One weight of a bundle: the tensors of a checkpoint that it is made of, and the part of each that a rank takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from model.packing import Packing
from nki_kernels.layer.pack_weights import pack, pack_gate_up, pack_out, pack_qkv


@dataclass(frozen=True)
class Cut:
    """The part of a tensor that a rank takes: `axis` None is a copy; `by` is the unit that the axis is counted in."""

    axis: int | None = None
    by: str = "even"


COPY, ROWS, COLUMNS = Cut(), Cut(0), Cut(1)
# rows of the output head, one for each id: a draft in groups may split these among more ranks than its other weights
IDS = Cut(0, "id")


def _first(tensor: Tensor, _: int) -> Tensor:
    return tensor


@dataclass(frozen=True)
class Weight:
    """One weight of a bundle: its parts, each with Hugging Face's name and a cut, which `join` makes one, given the
    head dim; its dtype, by default the build's."""

    ours: str
    bundle: str
    parts: tuple[tuple[str, Cut], ...]
    join: Callable[..., Tensor] = _first
    dtype: str = ""

    @property
    def plain(self) -> bool:
        """Whether it is a single unchanged part, so that its rows are that part's rows."""
        return self.join is _first

    @property
    def of_head(self) -> bool:
        """Whether the ranks of the head share it."""
        return self.parts[0][1] == IDS


# by the half of a layer that is packed: ours and the bundle's name | its parts in a layer | how, given the head dim
_PACKED: dict[str, tuple[tuple[str, tuple[str, ...], Callable[..., Tensor]], ...]] = {
    "attention": (
        ("self_attn.qkv_packed", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), pack_qkv),
        ("self_attn.out_packed", ("self_attn.o_proj",), pack_out),
    ),
    "mlp": (
        ("mlp.gate_up_packed", ("mlp.gate_proj", "mlp.up_proj"), lambda gate, up, _: pack_gate_up(gate, up)),
        ("mlp.down_packed", ("mlp.down_proj",), lambda down, _: pack(down)),
    ),
}
# of each weight of a layer: ours and the checkpoint's name | the bundle's name | cut
LayerRows = tuple[tuple[str, str, Cut], ...]


def layer_weights(layer: str, prefix: str, rows: LayerRows, packing: Packing) -> list[Weight]:
    """The weights of a layer, whose names a checkpoint has behind a prefix; packed ones come last."""
    packed = [row for half, of_half in _PACKED.items() if getattr(packing, half) for row in of_half]
    inside = {part for _, parts, _ in packed for part in parts}
    cuts = {name: cut for name, _, cut in rows}
    return [
        Weight(f"{layer}.{name}.weight", f"{layer}.{bundle}.weight", ((f"{prefix}{layer}.{name}.weight", cut),))
        for name, bundle, cut in rows
        if name not in inside
    ] + [
        Weight(
            f"{layer}.{name}", f"{layer}.{name}", tuple((f"{prefix}{layer}.{p}.weight", cuts[p]) for p in parts), join
        )
        for name, parts, join in packed
    ]
