"""The element types: names as plain strings, how each is stored, and how a value is rounded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class DTypeInfo:
    """One element type: its name, the numpy type that stores it, and its class."""

    name: str
    storage: np.dtype[Any]
    itemsize: int
    # "float" | "int" | "packed"
    kind: str


def _info(name: str, storage: object, kind: str) -> DTypeInfo:
    dtype: np.dtype[Any] = np.dtype(storage)  # type: ignore[call-overload]
    return DTypeInfo(name, dtype, dtype.itemsize, kind)


INFO: dict[str, DTypeInfo] = {
    info.name: info
    for info in (
        _info("bool", np.uint8, "int"),
        _info("int8", np.int8, "int"),
        _info("int16", np.int16, "int"),
        _info("int32", np.int32, "int"),
        _info("uint8", np.uint8, "int"),
        _info("uint16", np.uint16, "int"),
        _info("uint32", np.uint32, "int"),
        # NKI 0.7; moved, not computed with
        _info("int64", np.int64, "int"),
        _info("uint64", np.uint64, "int"),
        _info("float16", np.float16, "float"),
        _info("float32", np.float32, "float"),
        _info("bfloat16", ml_dtypes.bfloat16, "float"),
        # 1 sign, 8 exponent, 10 mantissa bits, stored in 32 bits
        _info("tfloat32", np.float32, "float"),
        # non-OCP e4m3 with infinities and maximum 240
        _info("float8_e4m3", ml_dtypes.float8_e4m3, "float"),
        _info("float8_e4m3fn", ml_dtypes.float8_e4m3fn, "float"),
        _info("float8_e5m2", ml_dtypes.float8_e5m2, "float"),
        _info("float8_e8m0fnu", ml_dtypes.float8_e8m0fnu, "float"),
        _info("float8_e5m2_x4", np.uint32, "packed"),
        _info("float8_e4m3fn_x4", np.uint32, "packed"),
        _info("float4_e2m1fn_x4", np.uint16, "packed"),
    )
}
FLOATS = frozenset(n for n, i in INFO.items() if i.kind == "float")
WIDE = frozenset({"int64", "uint64"})
INTS = frozenset(n for n, i in INFO.items() if i.kind == "int") - WIDE
PACKED = frozenset(n for n, i in INFO.items() if i.kind == "packed")
# types that a NeuronCore-v3 computes with
COMPUTED = (FLOATS | INTS) - {"float8_e4m3fn", "float8_e8m0fnu"}
# types that memory holds and DMA moves, and those that engines move
ANY = frozenset(INFO)
MOVED = ANY - WIDE

_FP32: np.dtype[Any] = np.dtype(np.float32)
_BY_BYTES: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
    8: np.dtype(np.uint64),
}


def name_of(dtype: object) -> str:
    """Return the NKI name of a dtype given as a string, numpy, ml_dtypes or torch type.

    Raises:
        KeyError: the type has no NKI counterpart (for example float64).
    """
    if type(dtype) is str:
        if dtype in INFO:
            return dtype
        text: str = dtype
    elif type(dtype).__module__.startswith("torch"):
        text = str(dtype).removeprefix("torch.")
    else:
        text = np.dtype(dtype).name  # type: ignore[call-overload]
    text = {"bool_": "bool", "float8_e4m3b11fnuz": "?"}.get(text, text)
    if text not in INFO:
        raise KeyError(text)
    return text


def storage_of(name: str, precise: bool = True) -> np.dtype[Any]:
    """Return the numpy type that holds `name`; without precise_fp every float is fp32."""
    info = INFO[name]
    return info.storage if precise or info.kind != "float" else _FP32


def bits_of(itemsize: int) -> np.dtype[Any]:
    """Return the unsigned integer type with that many bytes."""
    return _BY_BYTES[itemsize]


def to_fp32(values: Array) -> NDArray[np.float32]:
    """Widen to fp32, without a copy where the values are fp32 already."""
    if values.dtype == _FP32:
        return values
    return values.astype(np.float32)


def round_tf32(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Round fp32 to 10 mantissa bits, to nearest even; infinities and NaN pass."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    even = (bits >> np.uint32(13)) & np.uint32(1)
    rounded = (bits + np.uint32(0xFFF) + even) & np.uint32(0xFFFFE000)
    finite = np.isfinite(values)
    return np.where(finite, rounded.view(np.float32), values)


def round_int(values: Array, storage: np.dtype[Any]) -> Array:
    """Round floats to nearest even and saturate to the integer type; NaN becomes 0."""
    limits = np.iinfo(storage)
    wide = np.rint(values.astype(np.float64))
    np.nan_to_num(wide, copy=False, nan=0.0, posinf=limits.max, neginf=limits.min)
    return np.clip(wide, limits.min, limits.max).astype(storage)


def saturate_int(values: Array, storage: np.dtype[Any]) -> Array:
    """Clip integers to a narrower integer type."""
    limits = np.iinfo(storage)
    return np.clip(values.astype(np.int64), limits.min, limits.max).astype(storage)


def store(target: Array, values: Array, name: str, precise: bool = True) -> None:
    """Write `values` into `target`, rounded as the hardware rounds on write.

    Same types are copied bit for bit. Floats round to nearest even (overflow gives infinity);
    floats to integers round to nearest even and saturate; integers to integers saturate.
    """
    if target.dtype == values.dtype and (name != "tfloat32" or not precise):
        np.copyto(target, values)
        return
    kind = INFO[name].kind
    if kind == "float":
        if name == "tfloat32" and precise:
            values = round_tf32(to_fp32(values))
        np.copyto(target, values, casting="unsafe")
    elif values.dtype.kind in "iub":
        np.copyto(target, saturate_int(values, target.dtype))
    else:
        np.copyto(target, round_int(values, target.dtype))
