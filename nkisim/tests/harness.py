"""Running one instruction: load tiles, execute, store; and the shortest way to a kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nkisim
import nkisim.isa as nisa
import nkisim.language as nl
from nkisim.errors import Relaxed
from validation import witness

INTEGERS = ("int8", "int16", "int32", "uint8", "uint16", "uint32")
FLOATS = ("float32", "float16", "bfloat16", "float8_e4m3", "float8_e5m2")
STORED = {name: getattr(ml_dtypes, name, None) or getattr(np, name) for name in (*FLOATS, *INTEGERS)}


def on_device(
    body: Callable[..., None],
    inputs: Sequence[Any],
    outputs: Sequence[tuple[tuple[int, ...], str]],
    policy: nkisim.Policy | None = None,
) -> Any:
    """Call body(*output tiles, *input tiles) in a kernel; return the outputs as numpy arrays."""

    def kernel(*arrays: Any) -> Any:
        tiles = []
        for array in arrays:
            tile = nl.ndarray(array.shape, dtype=array.dtype)
            nisa.dma_copy(dst=tile, src=array)
            tiles.append(tile)
        made = [nl.ndarray(shape, dtype=dtype) for shape, dtype in outputs]
        body(*made, *tiles)
        results = []
        for tile in made:
            out = nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.shared_hbm)
            nisa.dma_copy(dst=out, src=tile)
            results.append(out)
        return tuple(results)

    result = _both(kernel, tuple(inputs), 1, policy)
    return result[0] if len(result) == 1 else result


def _both(kernel: Callable[..., Any], args: tuple[Any, ...], lnc: int, policy: nkisim.Policy | None) -> Any:
    """Run a kernel here and, with --witness, on the vendor's simulator."""
    copies = tuple(np.array(a) if isinstance(a, np.ndarray) else a for a in args) if witness.ACTIVE else ()
    result = nkisim.run(nkisim.jit(kernel)[lnc], args, policy=policy).outputs
    if witness.ACTIVE and policy in (None, nkisim.Policy()):
        witness.ACTIVE[0].check(kernel, lnc, copies, result)
    return result


def on_hbm(kernel: Callable[..., Any], inputs: Sequence[Any]) -> Any:
    """Run a kernel of HBM tensors; return its outputs as numpy arrays."""
    return _both(kernel, tuple(inputs), 1, None)


def run(kernel: Callable[..., Any], *args: Any, lnc: int = 1, **policy: Any) -> Any:
    """Run a plain function as a kernel."""
    return _both(kernel, args, lnc, nkisim.Policy(**policy))


def vendor(kernel: Callable[..., Any], *args: Any, lnc: int = 1, **more: Any) -> Any:
    """Run a kernel by the policy vendor; exactly one relaxation is warned of, once."""
    with pytest.warns(Relaxed) as caught:
        result = nkisim.run(nkisim.jit(kernel)[lnc], args, policy="vendor", **more).outputs
    assert len([w for w in caught if w.category is Relaxed]) == 1
    return result


def tile(rows: int = 128, columns: int = 8, dtype: str = "float32", value: float = 1) -> Any:
    """Return a filled SBUF tile (inside a kernel)."""
    made = nl.ndarray((rows, columns), dtype=dtype)
    nisa.memset(dst=made, value=value)
    return made


def psum(rows: int = 128, columns: int = 8, dtype: str = "float32") -> Any:
    """Return a PSUM tile that the Vector Engine wrote (inside a kernel)."""
    made = nl.ndarray((rows, columns), dtype=dtype, buffer=nl.psum)
    nisa.memset(dst=made, value=1.0)
    return made


def out(source: Any) -> Any:
    """Store an SBUF tile as a kernel output (inside a kernel)."""
    made = nl.ndarray(source.shape, dtype=source.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=made, src=source)
    return made


def draw(shape: tuple[int, ...], dtype: str = "float32", seed: int = 0) -> Any:
    """Return seeded normal numbers."""
    values = np.random.default_rng(seed).standard_normal(shape) * 4
    return values.astype(STORED[dtype])


def words(*numbers: int, dtype: str = "uint32") -> Any:
    """Return a column of integers, one per partition (inside a kernel)."""
    made = nl.ndarray((len(numbers), 1), dtype=dtype)
    for row, number in enumerate(numbers):
        nisa.dma_copy(dst=made[row : row + 1], src=tile(1, 1, dtype, number))
    return made


def hbm(rows: int = 128, columns: int = 8, dtype: str = "float32", value: float = 1) -> Any:
    """Return a tensor in HBM that was written (inside a kernel)."""
    return out(tile(rows, columns, dtype, value))


def bank(rows: int = 128, columns: int = 128, dtype: str = "float32") -> Any:
    """Return a PSUM tile that nobody wrote (inside a kernel)."""
    return nl.ndarray((rows, columns), dtype=dtype, buffer=nl.psum)
