"""How property tests lay operands out: tiles that are shifted, stepped, folded, in SBUF or PSUM.

Inputs leave the rest of their storage unwritten, so that an instruction that reads outside of its view is caught;
outputs lie in storage filled with a mark, so that one that writes outside of its view is caught.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import nkisim.isa as nisa
import nkisim.language as nl
from harness import STORED, on_hbm, out, run
from registry import covers

# what every property test begins with
__all__ = [
    "EACH", "FLOATS", "INTEGERS", "MARK", "PROPERTY", "SHAPES", "Any", "Place", "Shape", "agree", "covers", "fp64",
    "given", "laid_out", "nisa", "nl", "np", "on_hbm", "out", "places", "rounded", "run", "st", "values", "wide",
]  # fmt: skip

PROPERTY = settings(max_examples=25, deadline=None)
# for tests that run once per operator too
EACH = settings(max_examples=8, deadline=None)
FLOATS = ("float32", "bfloat16", "float16", "float8_e4m3", "float8_e5m2")
INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32")
Shape = tuple[int, int]
SHAPES = st.tuples(st.sampled_from([1, 2, 17, 32, 33, 64, 65, 128]), st.integers(1, 24))
# what an output's storage holds outside of the view; every dtype has it
MARK = 7


@dataclass(frozen=True)
class Place:
    """Where the elements of a (rows, columns) tile lie in their storage."""

    start: int = 0
    before: int = 0
    step: int = 1
    after: int = 0
    # size of the inner of two free dimensions; 0 leaves one
    inner: int = 0
    psum: bool = False

    def full(self, shape: Shape) -> Shape:
        """Return the shape of the storage."""
        return self.start + shape[0], self.before + self.step * (shape[1] - 1) + 1 + self.after

    def take(self, storage: Any, shape: Shape) -> Any:
        """Return the tile's (rows, columns) of a storage, on the device or in numpy."""
        stop = self.before + self.step * (shape[1] - 1) + 1
        return storage[self.start : self.start + shape[0], self.before : stop : self.step]

    def allocate(self, shape: Shape, dtype: str) -> tuple[Any, Any]:
        """Return the storage and the view (inside a kernel)."""
        storage = nl.ndarray(self.full(shape), dtype=dtype, buffer=nl.psum if self.psum else nl.sbuf)
        view = self.take(storage, shape)
        return storage, view.reshape_dim(1, (shape[1] // self.inner, self.inner)) if self.inner else view


@st.composite
def places(draw: Any, shape: Shape, psum: bool = True, folded: bool = True) -> Place:
    """Any place of a tile; `psum` and `folded` say whether it may be in PSUM and have two free dimensions."""
    rows, columns = shape
    starts = (0, 32, 64, 96) if rows <= 32 else ((0, 64) if rows <= 64 else (0,))
    inner = draw(st.sampled_from([d for d in range(1, columns + 1) if columns % d == 0])) if folded else 0
    return Place(
        draw(st.sampled_from(starts)),
        draw(st.integers(0, 3)),
        draw(st.integers(1, 3)),
        draw(st.integers(0, 2)),
        inner,
        psum and draw(st.booleans()),
    )


def values(shape: tuple[int, ...], dtype: str, seed: int) -> Any:
    """Return seeded numbers: normal floats, integers over the full range."""
    source = np.random.default_rng(seed)
    stored = STORED[dtype]
    if dtype in INTEGERS:
        limits = np.iinfo(stored)
        return source.integers(limits.min, limits.max, shape, dtype=stored, endpoint=True)
    return (source.standard_normal(shape) * 4).astype(np.float32).astype(stored)


def wide(array: Any) -> Any:
    """Return an array in fp64."""
    return array.astype(np.float64)


def fp64(fn: Any, *operands: Any) -> Any:
    """Apply a numpy function to fp64 operands; comparisons give 1 and 0."""
    with np.errstate(all="ignore"):
        return fn(*operands).astype(np.float64)


def rounded(wanted: Any, dtype: str) -> Any:
    """Return fp64 values as the hardware stores them: through fp32, then to the destination's type."""
    if dtype in INTEGERS:
        limits = np.iinfo(STORED[dtype])
        return np.clip(np.rint(wanted.astype(np.float32).astype(np.float64)), limits.min, limits.max)
    with np.errstate(over="ignore"):
        return wanted.astype(np.float32).astype(STORED[dtype]).astype(np.float64)


def agree(result: Any, wanted: Any, dtype: str, roundings: int = 0, scale: Any = None) -> None:
    """Compare with the fp64 result: equal, or between the roundings of `roundings` fp32 errors of `scale`."""
    wanted = np.asarray(wanted, np.float64)
    error = roundings * 2.0**-24 * np.abs(wanted if scale is None else scale)
    error, seen = np.where(np.isfinite(error), error, 0), result.astype(np.float64)
    low, high = rounded(wanted - error, dtype), rounded(wanted + error, dtype)
    good = ((low <= seen) & (seen <= high)) | (np.isnan(wanted) & np.isnan(seen))
    assert good.all(), f"{seen[~good][:3]} is not in [{low[~good][:3]}, {high[~good][:3]}]"


Input = tuple[Any, Place]
Output = tuple[Shape, str, Place]


def laid_out(body: Callable[..., None], inputs: Sequence[Input], outputs: Sequence[Output]) -> Any:
    """Call body(*output views, *input views) in a kernel; return the outputs' elements.

    What lies outside of an output is checked to be as it was.
    """

    def kernel(*arrays: Any) -> Any:
        views = [_load(a, place) for a, (_, place) in zip(arrays, inputs, strict=True)]
        made = [place.allocate(shape, dtype) for shape, dtype, place in outputs]
        for storage, _ in made:
            nisa.memset(dst=storage, value=MARK)
        body(*(view for _, view in made), *views)
        return tuple(_store(storage) for storage, _ in made)

    result = on_hbm(kernel, [a for a, _ in inputs])
    results = []
    for storage, (shape, _, place) in zip(result, outputs, strict=True):
        results.append(np.array(place.take(storage, shape)))
        place.take(storage, shape)[...] = MARK
        assert (storage.astype(np.float32) == MARK).all(), "the instruction wrote outside of its view"
    return results[0] if len(results) == 1 else results


def _load(array: Any, place: Place) -> Any:
    stage = nl.ndarray(array.shape, dtype=array.dtype)
    nisa.dma_copy(dst=stage, src=array)
    view = place.allocate(array.shape, array.dtype)[1]
    nisa.tensor_copy(dst=view, src=stage)
    return view


def _store(storage: Any) -> Any:
    stage = nl.ndarray(storage.shape, dtype=storage.dtype)
    nisa.tensor_copy(dst=stage, src=storage)
    result = nl.ndarray(storage.shape, dtype=storage.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=result, src=stage)
    return result
