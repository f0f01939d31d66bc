"""Instructions that came with NeuronCore-v4: their signatures, refused on trn2."""

from __future__ import annotations

from typing import NoReturn

from nkisim.enums import engine, reduce_cmd
from nkisim.errors import NeedsNewerCore
from nkisim.isa.tokens import Token
from nkisim.memory.tensor import NkiTensor


def nc_matmul_mx(
    dst: NkiTensor,
    stationary: NkiTensor,
    moving: NkiTensor,
    stationary_scale: NkiTensor,
    moving_scale: NkiTensor,
    tile_position: tuple[int, int] | None = None,
    tile_size: tuple[int, int] | None = None,
    accumulate: bool | None = None,
    name: str | None = None,
) -> NoReturn:
    """Multiply MX-quantized tiles; NeuronCore-v4 only."""
    raise NeedsNewerCore("nc_matmul_mx")


def activate2(
    dst: NkiTensor, op: Token, data: NkiTensor, imm0: NkiTensor | float, imm1: NkiTensor | float,
    op0: Token, op1: Token, relu_param: float = 0.0, reverse0: bool = False, reverse1: bool = False,
    reduce_op: Token | None = None,
    reduce_res: NkiTensor | None = None, reduce_cmd: reduce_cmd = reduce_cmd.idle, engine: engine = engine.scalar,
    name: str | None = None,
) -> NoReturn:  # fmt: skip
    """Activate after two free operators; NeuronCore-v4 only."""
    raise NeedsNewerCore("activate2")


def exponential(
    dst: NkiTensor, src: NkiTensor, max_value: float = 0.0, reduce_res: NkiTensor | None = None,
    reduce_cmd: reduce_cmd = reduce_cmd.idle, reduce_init: float = 0.0, name: str | None = None,
) -> NoReturn:  # fmt: skip
    """Exponentiate on the Vector Engine; NeuronCore-v4 only."""
    raise NeedsNewerCore("exponential")


def quantize_mx(dst: NkiTensor, src: NkiTensor, dst_scale: NkiTensor, name: str | None = None) -> NoReturn:
    """Quantize to MXFP8; NeuronCore-v4 only."""
    raise NeedsNewerCore("quantize_mx")


def rand2(dst: NkiTensor, min: NkiTensor | float, max: NkiTensor | float, name: str | None = None) -> NoReturn:
    """Draw uniform numbers; NeuronCore-v4 only."""
    raise NeedsNewerCore("rand2")
