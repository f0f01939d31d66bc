"""Refusals of the Tensor Engine, of DMA, of registers and between two cores."""

from __future__ import annotations

from typing import Any

import nkisim.isa as nisa
import nkisim.language as nl
from harness import bank, hbm, psum, tile, words
from nkisim.errors import *
from registry import rules

FP8, BF16 = "float8_e4m3", "bfloat16"
DOUBLE, DGE, OOB, ENGINE = nisa.matmul_perf_mode.double_row, nisa.dge_mode, nisa.oob_mode, nisa.engine


def mm(dst: Any = None, a: Any = None, b: Any = None, **more: Any) -> Any:
    """A product of 128 x 128 tiles, unless arguments replace them."""
    a = tile(columns=128, dtype="bfloat16") if a is None else a
    b = tile(columns=128, dtype="bfloat16") if b is None else b
    return nisa.nc_matmul(bank() if dst is None else dst, a, b, **more)


def pair(dtype: str = "float8_e4m3", free: tuple[int, ...] = (2, 64)) -> Any:
    return tile(columns=free[0] * free[1], dtype=dtype).reshape((128, *free))


def doubled(b: Any = None, **more: Any) -> Any:
    return mm(bank(64, 64), pair(), pair() if b is None else b, perf_mode=DOUBLE, **more)


def eye(dtype: str = "bfloat16") -> Any:
    return nl.shared_identity_matrix(128, dtype=dtype)


def halves(size: int, dense: bool) -> Any:
    """An fp8 tile in PSUM; a transpose has to leave out every second element of it."""
    return bank(size, size, FP8) if dense else bank(size, 2 * size, FP8)[:, ::2]


def two_chains(together: bool, width: int = 8) -> Any:
    """Two chains of two products each in one PSUM tensor."""
    psum, x = bank(), tile(columns=width, dtype="bfloat16")
    for step in ((0, False), (1, False), (0, True), (1, True)) if together else ((0, None), (0, None), (1, False)):
        mm(psum[:, step[0] * width : step[0] * width + width], b=x, accumulate=step[1])


def over_a_chain(together: bool) -> Any:
    """A transpose between the products of a chain, in its tensor or in its own."""
    psum, x = bank(dtype="float32"), tile(32, 32)
    mm(psum[:, 0:8], b=tile(columns=8, dtype="bfloat16"), accumulate=False)
    nisa.nc_transpose((psum if together else bank())[0:32, 32:64], x, engine=ENGINE.tensor)
    mm(psum[:, 0:8], b=tile(columns=8, dtype="bfloat16"), accumulate=True)


HALF = bank
rules(
    "nc_matmul",
    (WrongDtype, lambda b: mm(b=tile(columns=128, dtype="float32" if b else "float16"))),
    (WrongDtype, lambda b: mm(bank(dtype="float32" if b else "bfloat16"), b=eye(), is_transpose=True)),
    (WrongDtype, lambda b: mm(bank(dtype="bfloat16" if b else "float32"))),
    (WrongSpace, lambda b: mm(tile(columns=128) if b else bank())),
    (WrongSpace, lambda b: mm(b=(psum if b else tile)(128, 128, BF16))),
    (WrongArgument, lambda b: mm(perf_mode="double_row" if b else nisa.matmul_perf_mode.none)),
    (WrongDtype, lambda b: doubled(pair("bfloat16" if b else "float8_e5m2"))),
    (ShapeMismatch, lambda b: doubled(pair(free=(4, 32) if b else (2, 64)))),
    (WrongArgument, lambda b: doubled(is_transpose=b)),
    (ShapeMismatch, lambda b: mm(b=tile(64 if b else 128, 128, "bfloat16"))),
    (TileTooLarge, lambda b: mm(a=tile(columns=129 if b else 128, dtype="bfloat16"))),
    (TileTooLarge, lambda b: mm(bank(128, 513 if b else 512), b=tile(columns=513 if b else 512, dtype="bfloat16"))),
    (ShapeMismatch, lambda b: mm(bank(128, 127 if b else 128))),
    (PsumBankCrossed, lambda b: mm(bank(128, 1024)[:, (448 if b else 512) : (576 if b else 640)])),
    (WrongArgument, lambda b: mm(tile_position=(0, 0), tile_size=() if b else (128, 128))),
    (WrongArgument, lambda b: mm(None, *[tile(32, 128)] * 2, tile_position=(16 if b else 32, 0), tile_size=(32, 128))),
    (WrongArgument, lambda b: doubled(tile_position=(0, 0), tile_size=(128, 64 if b else 128))),
    (WrongArgument, lambda b: mm(bank(dtype="bfloat16"), b=eye(), is_transpose=True, accumulate=True if b else None)),
    (NotSimulated, lambda b: mm(bank(dtype=BF16), tile(128, 128, FP8 if b else BF16), eye(), is_transpose=True)),
    (WrongDtype, lambda b: mm(bank(dtype="bfloat16"), b=eye("float16" if b else "bfloat16"), is_transpose=True)),
    (WrongArgument, lambda b: mm(bank(dtype="bfloat16"), b=None if b else eye(), is_transpose=True)),
    (AccumulateMisuse, lambda b: mm(psum(columns=128), accumulate=None if b else False)),
    (ReportedFault, two_chains),
    (ReportedFault, over_a_chain),
)


def on_tensor(dtype: str) -> Any:
    return nisa.nc_transpose(bank(32, 32, dtype), tile(32, 32, dtype), engine=ENGINE.tensor)


rules(
    "nc_transpose",
    (WrongDtype, lambda b: nisa.nc_transpose(bank(dtype="bfloat16" if b else "float32"), tile(columns=128))),
    (ShapeMismatch, lambda b: nisa.nc_transpose(bank(64 if b else 128), tile(columns=128))),
    (TileTooLarge, lambda b: nisa.nc_transpose(tile(64 if b else 32, 32), tile(32, 64 if b else 32))),
    (ShapeMismatch, lambda b: nisa.nc_transpose(halves(32, b), tile(32, 32, FP8))),
    (WrongSpace, lambda b: nisa.nc_transpose(tile(32, 32) if b else bank(32, 32), tile(32, 32), engine=ENGINE.tensor)),
    (WrongEngine, lambda b: on_tensor("int32" if b else "float32")),
)


PACKED = "float8_e5m2_x4"


def copy(dst: Any = None, src: Any = None, **more: Any) -> Any:
    return nisa.dma_copy(dst=hbm() if dst is None else dst, src=tile() if src is None else src, **more)


def rows(source: Any, *index: int, dtype: str = "uint32") -> Any:
    """Return a gathering view of 8 columns."""
    return source.ap([[8, len(index)], [1, 8]], vector_offset=words(*index, dtype=dtype))


def one_row() -> Any:
    """Return a scattering view of 16 columns."""
    return hbm(4).ap([[8, 1], [1, 16]], vector_offset=words(0))


def moved(source: Any, start: int) -> Any:
    """Return 4 of 8 columns from a run-time start."""
    return source[:, nl.ds(nisa.register_alloc(start), 4)]


rules(
    "dma_copy",
    (WrongArgument, lambda b: nisa.dma_copy(dst=hbm(), src=1.0 if b else tile())),
    (WrongSpace, lambda b: copy(src=psum() if b else tile())),
    (NeedsNewerCore, lambda b: copy(priority=1 if b else None)),
    (WrongArgument, lambda b: copy(oob_mode="error" if b else OOB.error)),
    (DynamicOutOfRange, lambda b: copy(tile(columns=4), moved(hbm(), 5 if b else 4))),
    (DynamicOutOfRange, lambda b: copy(moved(hbm(), 5 if b else 4), tile(columns=4))),
    (DynamicOutOfRange, lambda b: copy(tile(2), rows(hbm(4), 1, 4 if b else 3))),
    (ShapeMismatch, lambda b: copy(src=tile(columns=9 if b else 8))),
    (WrongArgument, lambda b: copy(dge_mode="swdge" if b else DGE.swdge)),
    (WrongDtype, lambda b: copy(hbm(dtype="uint32" if b else PACKED, value=0), tile(dtype=PACKED, value=0))),
    (WrongDtype, lambda b: copy(hbm(dtype="bfloat16" if b else "float32"), dge_mode=DGE.hwdge)),
    (WrongEngine, lambda b: copy(engine=ENGINE.scalar, dge_mode=DGE.swdge if b else DGE.hwdge)),
    (WrongArgument, lambda b: copy(tile(2), rows(hbm(4), 1, 3), dge_mode=DGE.hwdge if b else DGE.swdge)),
    (WrongArgument, lambda b: copy(tile(columns=4), moved(hbm(), 4), dge_mode=DGE.none if b else DGE.hwdge)),
    (WrongArgument, lambda b: copy(oob_mode=OOB.skip if b else OOB.error)),
    (WrongDtype, lambda b: copy(tile(2), rows(hbm(4), 1, 3, dtype="int16" if b else "int32"))),
    (ShapeMismatch, lambda b: copy(one_row() if b else rows(hbm(4), 0, 2), rows(hbm(4), 1, 9), oob_mode=OOB.skip)),
    (ReportedFault, lambda b: copy(tile(2), rows(hbm(4), 1, 9 if b else 3), oob_mode=OOB.skip)),
    (ReportedFault, lambda b: copy(rows(hbm(4), 1, 9 if b else 3), tile(2), oob_mode=OOB.skip)),
)


def transposed(dst: Any = None, src: Any = None, **more: Any) -> Any:
    src = hbm(16, 32, "bfloat16") if src is None else src
    return nisa.dma_transpose(tile(32, 16, "bfloat16") if dst is None else dst, src, **more)


def picked(
    count: int = 16, columns: int = 32, index: tuple[int, int, str] = (16, 1, "uint32"), dtype: str = "bfloat16"
) -> Any:
    source = hbm(20, columns, dtype)
    return source.ap([[columns, count], [1, columns]], vector_offset=tile(*index, value=1))


def rows_of_20(last: int) -> Any:
    """Return 16 of 20 rows, the last of them by its index."""
    index = tile(16, 1, "uint32", 1)
    nisa.dma_copy(dst=index[15:16], src=tile(1, 1, "uint32", last))
    return hbm(20, 32, "bfloat16").ap([[32, 16], [1, 32]], vector_offset=index)


def by_hardware(size: int) -> Any:
    return transposed(tile(32, size, BF16), hbm(size, 32, BF16), dge_mode=DGE.hwdge)


def four_dimensions(inner: int) -> Any:
    """Transpose a gathering view of shape (16, 2, inner, 4)."""
    source = hbm(20, 8 * inner, "bfloat16")
    pattern = [[8 * inner, 16], [4 * inner, 2], [4, inner], [1, 4]]
    view = source.ap(pattern, vector_offset=tile(16, 1, "uint32"))
    return nisa.dma_transpose(nl.ndarray((4, 2, inner, 16), nl.bfloat16), view)


rules(
    "dma_transpose",
    (WrongArgument, lambda b: transposed(axes=(0, 1) if b else (1, 0))),
    (WrongSpace, lambda b: transposed((hbm if b else tile)(32, 16, "bfloat16"))),
    (WrongDtype, lambda b: transposed(tile(32, 16, "float16" if b else "bfloat16"))),
    (ShapeMismatch, lambda b: transposed(tile(16, 32, "bfloat16") if b else None)),
    (WrongArgument, lambda b: transposed(dge_mode=DGE.swdge if b else DGE.hwdge)),
    (ShapeMismatch, lambda b: by_hardware(8 if b else 16)),
    (WrongArgument, lambda b: transposed(src=picked(), dge_mode=DGE.hwdge if b else DGE.swdge)),
    (WrongArgument, lambda b: transposed(oob_mode=OOB.skip if b else OOB.error)),
    (ShapeMismatch, lambda b: four_dimensions(2 if b else 1)),
    (ShapeMismatch, lambda b: transposed(tile(32, 15 if b else 16, "bfloat16"), picked(15 if b else 16))),
    (ShapeMismatch, lambda b: transposed(src=picked(index=(17 if b else 32, 1, "uint32")))),
    (WrongDtype, lambda b: transposed(src=picked(index=(16, 1, "int32" if b else "uint32")))),
    (ReportedFault, lambda b: transposed(src=rows_of_20(20 if b else 19), oob_mode=OOB.skip)),
)


def summed(dst: Any = None, srcs: Any = None, op: Any = nl.add, **more: Any) -> Any:
    return nisa.dma_compute(tile() if dst is None else dst, [tile(), tile()] if srcs is None else srcs, op, **more)


def summed_rows(dst: Any, other: Any) -> Any:
    """Add to a tile that is not dst."""
    return summed(dst, [tile(2), other])


def into(dst: Any, other: Any, **more: Any) -> Any:
    """Add to dst in place."""
    return summed(dst, [dst, other], **more)


rules(
    "dma_compute",
    (WrongArgument, lambda b: summed(op=nl.multiply if b else nl.add)),
    (WrongArgument, lambda b: summed(scales=[1.0, 2.0 if b else 1.0])),
    (WrongArgument, lambda b: summed(srcs=[tile()] * (17 if b else 16))),
    (ShapeMismatch, lambda b: summed(srcs=[tile(), tile(columns=9 if b else 8)])),
    (IllegalView, lambda b: summed(tile(columns=4), [tile(columns=4), moved(hbm(), 0) if b else hbm(columns=4)])),
    (WrongArgument, lambda b: into(tile(2), rows(hbm(4), 1, 2), unique_indices=not b)),
    (WrongArgument, lambda b: into(rows(hbm(4), 1, 1 if b else 2), tile(2))),
    (WrongArgument, lambda b: (summed_rows if b else into)(tile(2), rows(hbm(4), 1, 2))),
    (WrongSpace, lambda b: into(rows(hbm(4), 1, 2), hbm(2) if b else tile(2))),
)


def one_of_eight(start: int) -> Any:
    return tile(1, 8)[:, nl.ds(nisa.register_alloc(start), 1)]


rules(
    "registers",
    (WrongArgument, lambda b: nisa.register_alloc(1.5 if b else 1)),
    (WrongArgument, lambda b: nisa.register_move(3 if b else nisa.register_alloc(), 1)),
    (ShapeMismatch, lambda b: nisa.register_load(nisa.register_alloc(), words(1, 2) if b else words(1))),
    (WrongSpace, lambda b: nisa.register_load(nisa.register_alloc(), (bank if b else tile)(1, 1, "int32"))),
    (DynamicOutOfRange, lambda b: nisa.register_load(nisa.register_alloc(), one_of_eight(8 if b else 7))),
)


def swap(src: Any = None, dst: Any = None, other: int | None = None, **more: Any) -> Any:
    other = 1 - nl.program_id(0) if other is None else other
    return nisa.sendrecv(tile() if src is None else src, tile() if dst is None else dst, other, other, 0, **more)


rules(
    "two cores",
    (WrongArgument, lambda b: swap(3.0 if b else tile())),
    (WrongSpace, lambda b: swap(psum() if b else tile())),
    (WrongDtype, lambda b: swap(dst=tile(dtype="bfloat16" if b else "float32"))),
    (ShapeMismatch, lambda b: swap(dst=tile(columns=9 if b else 8))),
    (ShapeMismatch, lambda b: swap(*[tile(columns=8 + (nl.program_id(0) if b else 0)) for _ in range(2)])),
    (WrongArgument, lambda b: swap(other=2 if b else None)),
    (TileTooLarge, lambda b: swap(*[tile(columns=257 if b else 256)] * 2, dma_engine=nisa.dma_engine.gpsimd_dma)),
    (WrongSpace, lambda b: nisa.core_barrier(tile() if b else hbm(), (0, 1))),
    (WrongArgument, lambda b: nisa.core_barrier(hbm(), (0, 2) if b else (0, 1))),
)
ONE_CORE = (BadLaunch, lambda b: swap() if b else tile())
rules("one core", ONE_CORE)
