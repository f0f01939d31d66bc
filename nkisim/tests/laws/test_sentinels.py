"""Memory that nobody wrote: a sentinel goes where its value goes, and is refused or given back at an output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import nkisim.isa as nisa
import nkisim.language as nl
from harness import out, run, tile, vendor
from nkisim import errors

TILE = np.arange(128 * 512, dtype=np.float32).reshape(128, 512)
pytestmark = pytest.mark.filterwarnings("ignore::nkisim.errors.Relaxed")


def half(x: Any, late: bool = True) -> Any:
    loaded = nl.ndarray((128, 512), nl.float32)
    nisa.dma_copy(dst=loaded[0:64], src=x[0:64])
    nisa.tensor_scalar(loaded, loaded, nl.multiply, 2.0)
    if late:
        nisa.tensor_copy(loaded[64:128], loaded[0:64])
    return out(loaded)


def test_a_sentinel_that_reaches_no_output_is_no_fault() -> None:
    assert np.array_equal(vendor(half, TILE), 2 * np.concatenate([TILE[:64], TILE[:64]]))
    with pytest.raises(errors.UnwrittenRead):
        run(half, TILE)


def test_a_sentinel_that_reaches_an_output_is_refused_there_or_given_back() -> None:
    with pytest.raises(errors.UnwrittenRead, match=r"launch: output reads 32768 of 65536.*\[64, 0\]"):
        run(lambda x: half(x, late=False), TILE, unwritten_read="sentinel")
    for output in ("warn", "allow"):
        result = run(lambda x: half(x, late=False), TILE, unwritten_read="sentinel", unwritten_output=output)
        assert np.isnan(result[64:]).all()
        assert np.array_equal(result[:64], 2 * TILE[:64])


def into(instruction: Callable[[Any, Any], None], columns: int = 32) -> Callable[[Any], Any]:
    """An instruction's result, (32, columns), of the dtype of its operand."""

    def result(source: Any) -> Any:
        made = nl.ndarray((32, columns), source.dtype)
        instruction(made, source)
        return made

    return result


def product(source: Any) -> Any:
    psum = nl.ndarray((32, 32), nl.float32, nl.psum)
    nisa.nc_matmul(psum, tile(32, 32), source)
    return into(nisa.tensor_copy)(psum)


# integers by their place, floats by their NaN: through a product the column; [31, 30] is unwritten
WAYS: list[tuple[Any, Callable[[Any], Any], str]] = [
    (nl.int32, into(lambda dst, x: nisa.tensor_tensor(dst=dst, data1=x, data2=x, op=nl.add)), "1 of 1024.*[31, 30]"),
    (nl.float32, product, "32 of 1024.*[0, 30]"),
    (nl.int32, into(lambda dst, x: nisa.tensor_reduce(dst, nl.bitwise_or, x, axis=1), 1), "1 of 32 .*[31, 0]"),
    (nl.int32, into(lambda dst, x: nisa.tensor_scalar(dst, tile(32, 32, "int32"), nl.add, x[:, 30:31])),
     "32 of 1024 .*[31, 0]"),
    (nl.int32, into(nisa.nc_transpose), "1 of 1024 .*[30, 31]"),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "result", "read"), WAYS, ids=["vector", "tensor", "sum", "column", "transpose"])
def test_a_sentinel_goes_where_its_value_goes(dtype: Any, result: Callable[[Any], Any], read: str) -> None:
    def kernel() -> Any:
        source = nl.ndarray((32, 32), dtype)
        for view in (source[:, 0:30], source[:, 31:32], source[0:31, 30:31]):
            nisa.memset(dst=view, value=1)
        return out(result(source))

    with pytest.raises(errors.UnwrittenRead, match="reads " + read.replace("[", r"\[")):
        run(kernel, unwritten_read="sentinel")
