"""Instructions that came with NeuronCore-v4: their signatures, refused on trn2."""

from __future__ import annotations

from typing import Any, NoReturn

from nkisim.enums import reduce_cmd
from nkisim.errors import NeedsNewerCore


def nc_matmul_mx(
    dst: Any,
    stationary: Any,
    moving: Any,
    stationary_scale: Any,
    moving_scale: Any,
    tile_position: Any = None,
    tile_size: Any = None,
    accumulate: bool | None = None,
    name: str | None = None,
) -> NoReturn:
    """Multiply MX-quantized tiles; NeuronCore-v4 only."""
    raise NeedsNewerCore("nc_matmul_mx")


def activate2(
    dst: Any, op: Any, data: Any, imm0: Any, imm1: Any, op0: Any, op1: Any,
    relu_param: Any = 0.0, reverse0: bool = False, reverse1: bool = False, reduce_op: Any = None,
    reduce_res: Any = None, reduce_cmd: Any = reduce_cmd.idle, name: str | None = None,
) -> NoReturn:  # fmt: skip
    """Activate after two free operators; NeuronCore-v4 only."""
    raise NeedsNewerCore("activate2")


def exponential(
    dst: Any, src: Any, max_value: Any = 0.0, reduce_res: Any = None,
    reduce_cmd: Any = reduce_cmd.idle, reduce_init: Any = 0.0, name: str | None = None,
) -> NoReturn:  # fmt: skip
    """Exponentiate on the Vector Engine; NeuronCore-v4 only."""
    raise NeedsNewerCore("exponential")


def quantize_mx(dst: Any, src: Any, dst_scale: Any, name: str | None = None) -> NoReturn:
    """Quantize to MXFP8; NeuronCore-v4 only."""
    raise NeedsNewerCore("quantize_mx")


def rand2(dst: Any, min: Any, max: Any, name: str | None = None) -> NoReturn:
    """Draw uniform numbers; NeuronCore-v4 only."""
    raise NeedsNewerCore("rand2")
