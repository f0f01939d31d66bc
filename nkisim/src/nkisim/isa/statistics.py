"""Vector Engine: reciprocal, batch-norm statistics, and the 8-wide search instructions."""

from __future__ import annotations

from typing import Any

import numpy as np

from nkisim.dtypes import COMPUTED, Array
from nkisim.errors import ShapeMismatch, WrongDtype
from nkisim.isa.ambiguities import of_largest
from nkisim.isa.card import card
from nkisim.isa.rules import elements, rank, same_dtype, same_elements, same_partitions
from nkisim.isa.statement import Call, Operand, Target
from nkisim.isa.sums import total

_WIDTH = 8
_SEARCH = {"maximum": 16384, "minimum": _WIDTH}


@card("vector", Operand("dst", "out"), Operand("data", "in"), rules=(same_elements("dst", "data"),))
def reciprocal(dst: Target, data: Array, name: str | None = None) -> Array:
    """Compute 1 / data."""
    return np.float32(1) / data


def _stats(part: Any) -> list[Any]:
    """Return count, mean and variance times count of the columns."""
    count = part.shape[1]
    rows = part.shape[0]
    if count == 0:
        return [np.zeros(rows, np.float32)] * 3
    mean = total(part) / np.float32(count)
    spread = total(np.square(part - mean))
    return [np.full(rows, count, np.float32), mean[:, 0], spread[:, 0]]


@card(
    "vector",
    Operand("dst", "out"),
    Operand("data", "in"),
    rules=(same_partitions("dst", "data"), elements("dst", exactly=6), elements("data", maximum=512)),
)
def bn_stats(dst: Target, data: Array, name: str | None = None) -> Array:
    """Return (count, mean, variance * count) of the even, then of the odd elements."""
    return np.stack(_stats(data[:, 0::2]) + _stats(data[:, 1::2]), axis=1)


def _triples(call: Call) -> None:
    data = call.tensors["data"]
    if data.size // data.shape[0] % 3:
        call.refuse(ShapeMismatch, "data", f"has shape {data.shape}", "triples (count, mean, variance * count)")


@card(
    "vector",
    Operand("dst", "out"),
    Operand("data", "in"),
    rules=(same_partitions("dst", "data"), elements("dst", exactly=2), _triples),
)
def bn_aggr(dst: Target, data: Array, name: str | None = None) -> Array:
    """Merge (count, mean, variance * count) triples into mean and variance."""
    count, mean, spread = (data[:, i::3] for i in range(3))
    elements = total(count)
    center = total(count * mean) / elements
    variance = total(spread + count * np.square(mean - center)) / elements
    return np.concatenate([center, variance], axis=1)


@card(
    "vector",
    Operand("dst", "out"),
    Operand("src", "in"),
    rules=(
        same_partitions("dst", "src"),
        elements("dst", exactly=_WIDTH),
        elements("src", **_SEARCH),
        rank("src", 3),
        rank("dst", 2),
    ),
    finish=of_largest,
)
def max8(dst: Target, src: Array, name: str | None = None) -> Array:
    """Return the 8 largest values, descending."""
    count = src.shape[1]
    # a sort may leave -0 and +0 in any order: a zero is +0
    top = np.partition(src + np.float32(0), count - _WIDTH, axis=1)[:, count - _WIDTH :]
    return -np.sort(-top, axis=1)


def _index_dtype(call: Call) -> None:
    name = "dst_idx" if "dst_idx" in call.args else "dst"
    tensor = call.tensors.get(name)
    if tensor is not None and tensor.dtype not in ("uint16", "uint32"):
        call.refuse(WrongDtype, name, f"is {tensor.dtype}", "it can be uint16 or uint32")


def occurrences(data: Array, vals: Array, order: list[int]) -> Array:
    """Return for each value the index of its next unused occurrence, or -1."""
    rows = np.arange(data.shape[0])
    used = np.zeros(data.shape, bool)
    result = np.full(vals.shape, -1, np.int64)
    for i in order:
        hits = (data == vals[:, i : i + 1]) & ~used
        first = hits.argmax(axis=1)
        hit = hits[rows, first]
        result[hit, i] = first[hit]
        used[rows[hit], first[hit]] = True
    return result


@card(
    "vector",
    Operand("dst", "out"),
    Operand("data", "in"),
    Operand("vals", "in"),
    rules=(
        same_partitions("dst", "data", "vals"),
        elements("dst", exactly=_WIDTH),
        elements("vals", exactly=_WIDTH),
        elements("data", **_SEARCH),
        rank("data", 3),
        rank("vals", 3),
        _index_dtype,
    ),
)
def nc_find_index8(dst: Target, data: Array, vals: Array, name: str | None = None) -> Array:
    """Return where each of 8 values occurs; repeated values take successive places."""
    result = occurrences(data, vals, list(range(_WIDTH)))
    missing = np.iinfo(dst.dtype).max
    return np.where(result < 0, missing, result).astype(dst.dtype)


@card(
    "vector",
    Operand("dst", "out", dtypes=COMPUTED),
    Operand("data", "in"),
    Operand("vals", "in"),
    Operand("dst_idx", "out", optional=True),
    rules=(
        same_elements("dst", "data"),
        same_partitions("data", "vals", "dst_idx"),
        same_dtype("dst", "data"),
        elements("vals", exactly=_WIDTH),
        elements("dst_idx", exactly=_WIDTH),
        elements("data", **_SEARCH),
        _index_dtype,
    ),
)
def nc_match_replace8(
    dst: Target, data: Array, vals: Array, imm: float, dst_idx: Target | None = None, name: str | None = None
) -> tuple[Array, Array | None]:
    """Replace the first unused occurrence of each of 8 values by imm.

    Values are taken from the last to the first, so that equal values receive descending places.
    """
    output = occurrences(data, vals, list(reversed(range(_WIDTH))))
    result = np.array(data)
    rows, columns = np.nonzero(output >= 0)
    result[rows, output[rows, columns]] = imm
    if dst_idx is None:
        return result, None
    missing = np.iinfo(dst_idx.dtype).max
    return result, np.where(output < 0, missing, output).astype(dst_idx.dtype)
