"""Planted faults of launches for trn3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import nkisim
import nkisim.isa as nisa
import nkisim.language as nl
from harness import bank, hbm, out, tile
from nkisim import errors
from nkisim.geometry import CORE_V4
from registry import REFUSALS, Refusal

FP8 = "float8_e4m3fn_x4"


def on_trn3(kernel: Callable[..., Any], *arrays: Any, **policy: Any) -> Any:
    """Run a plain function as a kernel of a NeuronCore-v4."""
    return nkisim.run(kernel, arrays, policy=nkisim.Policy(**policy), geometry=CORE_V4).outputs


def quantized(rows: int = 32, columns: int = 8, scales: tuple[int, int] = (4, 2), dtype: str = FP8) -> tuple[Any, Any]:
    """Ones as packed elements, and their scales (inside a kernel)."""
    packed, scale = nl.ndarray((rows, columns // 4), dtype), nl.ndarray(scales, nl.uint8)
    nisa.quantize_mx(packed, tile(rows, columns, "bfloat16"), scale)
    return packed, scale


def product(m: int = 2, n: int = 2, dst: tuple[int, int] = (2, 2), scales: int = 2) -> None:
    (a, a_scale), (b, b_scale) = (quantized(32, 4 * k, (4, k)) for k in (m, n))
    nisa.nc_matmul_mx(bank(*dst), a, b, a_scale, b_scale[:, 0:scales])


ROWS: list[tuple[str, type[errors.LawError], Callable[[bool], Any]]] = [
    ("quantize_mx", errors.TileTooLarge, lambda b: quantized(16 if b else 32)),
    ("quantize_mx", errors.ShapeMismatch, lambda b: quantized(scales=(8 if b else 4, 2))),
    ("quantize_mx", errors.ShapeMismatch, lambda b: quantized(columns=6 if b else 8)),
    ("nc_matmul_mx", errors.TileTooLarge, lambda b: product(m=3 if b else 2)),
    ("nc_matmul_mx", errors.ShapeMismatch, lambda b: product(dst=(2, 3 if b else 2))),
    ("nc_matmul_mx", errors.ShapeMismatch, lambda b: product(scales=1 if b else 2)),
    ("activate2", errors.WrongOperator,
     lambda b: nisa.activate2(tile(), nl.exp, tile(), 1.0, 0.0, nl.add, nl.add if b else nl.bypass)),
    ("rand2", errors.WrongArgument, lambda b: nisa.rand2(tile(), 1.0, 0.0 if b else 2.0)),
    ("rand_set_state", errors.NotSimulated,
     lambda b: nisa.rand_set_state(tile(128, 6, "uint32"), nisa.engine.vector if b else nisa.engine.gpsimd)),
]  # fmt: skip


def _launched(body: Callable[[bool], Any]) -> Callable[[bool], Any]:
    def call(bad: bool) -> Any:
        def kernel() -> Any:
            body(bad)
            return out(tile())

        return on_trn3(kernel)

    return call


REFUSALS += [Refusal(law, _launched(body), op, "host") for op, law, body in ROWS]
REFUSALS.append(Refusal(errors.NotSimulated, lambda b: on_trn3(hbm, recording=b), "timeline", "host"))
