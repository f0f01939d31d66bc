"""Refusals of the Vector and Scalar Engines and of GpSimd."""

from __future__ import annotations

import nkisim.isa as nisa
import nkisim.language as nl
from harness import psum, tile, words
from nkisim.errors import *
from registry import rules

CMD, ENGINE = nisa.reduce_cmd, nisa.engine


def f32(columns: int = 8) -> object:
    return tile(columns=columns)


def i32(columns: int = 8) -> object:
    return tile(columns=columns, dtype="int32")


def both(x: object = None, y: object = None, op: object = nl.add, **more: object) -> object:
    return nisa.tensor_tensor(f32(), f32() if x is None else x, f32() if y is None else y, op, **more)


def ints(x: object = None, **more: object) -> object:
    return nisa.tensor_tensor(i32(), i32() if x is None else x, i32(), nl.bitwise_or, **more)


rules(
    "tensor_tensor",
    (WrongArgument, lambda b: both(3.0 if b else f32())),
    (WrongArgument, lambda b: both(engine="vector" if b else ENGINE.vector)),
    (WrongEngine, lambda b: both(engine=ENGINE.scalar if b else ENGINE.vector)),
    (WrongDtype, lambda b: both(tile(dtype="float8_e4m3fn", value=0) if b else f32())),
    (WrongSpace, lambda b: both(psum() if b else f32(), op=nl.power)),
    (WrongEngine, lambda b: both(op=nl.power, engine=ENGINE.vector if b else ENGINE.gpsimd)),
    (WrongEngine, lambda b: ints(engine=ENGINE.gpsimd if b else ENGINE.vector)),
    (WrongDtype, lambda b: ints(f32() if b else i32())),
    (ShapeMismatch, lambda b: both(y=f32(9 if b else 8))),
    (ShapeMismatch, lambda b: both(tile(64, 16) if b else f32())),
    (BothInPsum, lambda b: both(psum(), psum() if b else f32())),
    (WrongOperator, lambda b: both(op=nl.exp if b else nl.add)),
    (WrongOperator, lambda b: both(op="add" if b else nl.add)),
    (NeedsNewerCore, lambda b: both(op=nl.abs_max if b else nl.maximum)),
)


def scaled(op: object = nl.add, by: object = 1.0, **more: object) -> object:
    return nisa.tensor_scalar(f32(), f32(), op, by, **more)


def masked(by: object = 1, **more: object) -> object:
    return nisa.tensor_scalar(i32(), i32(), nl.bitwise_or, by, **more)


rules(
    "tensor_scalar",
    (WrongArgument, lambda b: scaled(operand1=2.0 if b else None)),
    (WrongOperator, lambda b: masked(op1=nl.add if b else nl.bitwise_or, operand1=1)),
    (WrongArgument, lambda b: scaled(nl.abs, 1.0 if b else None)),
    (WrongArgument, lambda b: scaled(by=None if b else 1.0)),
    (WrongArgument, lambda b: masked(1.0 if b else 1)),
    (WrongDtype, lambda b: scaled(by=tile(columns=1, dtype="bfloat16" if b else "float32"))),
    (ShapeMismatch, lambda b: scaled(by=f32(2 if b else 1))),
    (WrongEngine, lambda b: scaled(nl.maximum if b else nl.add, engine=ENGINE.scalar)),
    (WrongEngine, lambda b: scaled(engine=ENGINE.gpsimd if b else ENGINE.vector)),
    (WrongEngine, lambda b: scaled(nl.rsqrt, None, engine=ENGINE.vector if b else ENGINE.gpsimd)),
)
rules(
    "tensor_reduce",
    (WrongArgument, lambda b: nisa.tensor_reduce(tile(columns=1), nl.add, f32(), axis=0 if b else 1)),
    (ShapeMismatch, lambda b: nisa.tensor_reduce(f32(2 if b else 1), nl.add, f32(), axis=1)),
    (WrongArgument, lambda b: nisa.tensor_reduce(i32(1), nl.bitwise_or, i32(), axis=1, negate=b)),
)


def reduced(op: object = nl.add, **more: object) -> object:
    return nisa.tensor_scalar_reduce(f32(), f32(), op, 1.0, nl.add, **more)


rules(
    "tensor_scalar_reduce",
    (WrongArgument, lambda b: reduced(reduce_init=1.0 if b else None)),
    (NotSimulated, lambda b: reduced(nl.subtract, reverse0=b)),
    (WrongArgument, lambda b: reduced(reduce_cmd=CMD.idle if b else CMD.reset_reduce)),
    (AccumulatorUndefined, lambda b: reduced(reduce_cmd=CMD.reduce if b else CMD.reset_reduce)),
)


def summed(op: object, command: object = CMD.reset_reduce) -> object:
    return nisa.activation(f32(), nl.exp, f32(), reduce_op=op, reduce_cmd=command)


def running(first: object) -> object:
    return nisa.tensor_scalar_cumulative(f32(), f32(), nl.add, nl.add, 1.0, imm1=first)


rules("tensor_scalar_cumulative", (WrongArgument, lambda b: running(1.0 if b else None)))


def read_copy(late: bool) -> object:
    """Overwrite the source of nl.copy, and read the copy afterwards or before."""
    source, dst = f32(), f32()
    copied = nl.copy(source)
    for write in (True, False) if late else (False, True):
        nisa.memset(source, 0.0) if write else nisa.tensor_copy(dst, copied)


rules(
    "activation",
    (WrongArgument, lambda b: summed(None if b else nl.add)),
    (ReportedFault, lambda b: nisa.activation(f32(), nl.copy, f32(), bias=1.0 if b else 0.0)),
    (ReportedFault, lambda b: nisa.activation(f32(), nl.copy if b else nl.exp, f32(), bias=f32()[:, 0:1])),
)
rules(
    "tensor_copy",
    (StartPartition, lambda b: nisa.tensor_copy(f32()[0:32], f32()[16:48] if b else f32()[32:64])),
    (ReportedFault, read_copy),
)
rules(
    "memset",
    (WrongArgument, lambda b: nisa.memset(f32(), value="1" if b else 1)),
    (WrongArgument, lambda b: nisa.memset(nl.ndarray((4, 4), nl.float8_e5m2_x4), value=1 if b else 0)),
    (WrongArgument, lambda b: nisa.memset(i32(), value=1.5 if b else 1)),
    (WrongArgument, lambda b: nisa.memset(tile(dtype="uint8"), value=256 if b else 255)),
)


def chosen(src: str = "float32", mask: str = "uint8") -> object:
    return nisa.tensor_copy_predicated(f32(), tile(dtype=src), tile(dtype=mask))


def selected(on_true: object = None, **more: object) -> object:
    return nisa.select_reduce(f32(), tile(dtype="uint8"), f32() if on_true is None else on_true, 0.0, **more)


def between(**more: object) -> object:
    return nisa.range_select(f32(), f32(), nl.less, nl.less, f32(1), f32(1), **more)


LOWEST = -3.4028234663852886e38
rules(
    "tensor_copy_predicated",
    (WrongDtype, lambda b: chosen(mask="int8" if b else "uint8")),
    (WrongDtype, lambda b: chosen(src="bfloat16" if b else "float32")),
)
rules(
    "select_reduce",
    (WrongDtype, lambda b: selected(i32() if b else f32())),
    (WrongArgument, lambda b: selected(reduce_res=f32(1), reduce_cmd=CMD.idle if b else CMD.reset_reduce)),
)
rules(
    "range_select",
    (TileTooLarge, lambda b: between(range_start=2**24 if b else 0)),
    (WrongArgument, lambda b: between(on_false_value=0.0 if b else LOWEST)),
)
rules(
    "nc_stream_shuffle",
    (WrongArgument, lambda b: nisa.nc_stream_shuffle(f32(), f32(), [0] * (31 if b else 32))),
    (ShapeMismatch, lambda b: nisa.nc_stream_shuffle(f32(), f32(9 if b else 8), [0] * 32)),
    (WrongArgument, lambda b: nisa.nc_stream_shuffle(tile(32), tile(1), [1 if b else 0] * 32)),
)
rules("bn_aggr", (ShapeMismatch, lambda b: nisa.bn_aggr(f32(2), f32(7 if b else 6))))
rules(
    "bn_stats",
    (ShapeMismatch, lambda b: nisa.bn_stats(f32(5 if b else 6), f32())),
    (TileTooLarge, lambda b: nisa.bn_stats(f32(6), f32(513 if b else 512))),
)
rules("nc_find_index8", (WrongDtype, lambda b: nisa.nc_find_index8(i32() if b else tile(dtype="uint32"), f32(), f32())))
rules(
    "max8",
    (TileTooLarge, lambda b: nisa.max8(f32(), f32(7 if b else 8))),
    (ShapeMismatch, lambda b: nisa.max8(f32(), f32(16).reshape((128, 2, 2, 4) if b else (128, 4, 4)))),
)
rules(
    "iota",
    (WrongArgument, lambda b: nisa.iota(f32(), [[1, 2, 4]] if b else [[1, 8]])),
    (ShapeMismatch, lambda b: nisa.iota(f32(), [[1, 9 if b else 8]])),
    (WrongArgument, lambda b: nisa.iota(f32(), [[1, 8]], offset=2**31 if b else 2**30)),
)
rules(
    "nc_n_gather",
    (WrongDtype, lambda b: nisa.nc_n_gather(f32(), f32(), tile(dtype="int32" if b else "uint32"))),
    (DynamicOutOfRange, lambda b: nisa.nc_n_gather(f32(), f32(), tile(dtype="uint32", value=8 if b else 7))),
)


def gather(
    index: tuple[int, int, str, int] = (32, 1, "uint16", 0), columns: int = 16, width: int = 1, **more: object
) -> object:
    return nisa.local_gather(tile(32, columns), tile(32, 8), tile(*index), num_elem_per_idx=width, **more)


rules(
    "local_gather",
    (WrongDtype, lambda b: gather((32, 1, "uint32" if b else "uint16", 0))),
    (ShapeMismatch, lambda b: gather((16 if b else 32, 1, "uint16", 0))),
    (WrongArgument, lambda b: gather(width=3 if b else 2, columns=48 if b else 32)),
    (TileTooLarge, lambda b: gather(num_valid_indices=17 if b else 16)),
    (ShapeMismatch, lambda b: gather(columns=15 if b else 16)),
    (DynamicOutOfRange, lambda b: gather((32, 1, "uint16", 8 if b else 7))),
)
rules(
    "tensor_partition_reduce",
    (ShapeMismatch, lambda b: nisa.tensor_partition_reduce(tile(2 if b else 1), nl.add, f32())),
    (WrongDtype, lambda b: nisa.tensor_partition_reduce(tile(1, dtype="int32"), nl.bitwise_or, f32() if b else i32())),
)
rules(
    "sequence_bounds",
    (ShapeMismatch, lambda b: nisa.sequence_bounds(tile(1, 16), tile(2 if b else 1))),
    (ShapeMismatch, lambda b: nisa.sequence_bounds(tile(1, 15 if b else 16), tile(1))),
)
rules(
    "nonzero_with_count",
    (ShapeMismatch, lambda b: nisa.nonzero_with_count(i32(8 if b else 9), f32())),
    (WrongArgument, lambda b: nisa.nonzero_with_count(i32(9), f32(), padding_val=0.5 if b else -1)),
)


def topk(rows: int = 16, k: int = 1, n: int = 16) -> object:
    return nisa.topk(tile(rows, k, "bfloat16"), tile(rows, k, "uint32"), tile(rows, 2, "bfloat16"), n)


rules(
    "topk",
    (ShapeMismatch, lambda b: topk(rows=17 if b else 16)),
    (WrongArgument, lambda b: topk(n=7 if b else 8)),
    (TileTooLarge, lambda b: topk(k=17 if b else 16)),
)
rules(
    "random numbers",
    (WrongDtype, lambda b: nisa.dropout(tile(dtype="bfloat16") if b else f32(), f32(), 0.5)),
    (WrongDtype, lambda b: nisa.dropout(i32(), i32(), tile(columns=1, dtype="int32" if b else "float32", value=0))),
    (ShapeMismatch, lambda b: nisa.set_rng_seed(words(1, 2) if b else words(1))),
    (NeedsNewerCore, lambda b: nisa.rand_set_state(tile(128, 6, "uint32"), ENGINE.vector if b else ENGINE.gpsimd)),
)
NEWER = {
    "nc_matmul_mx": lambda: nisa.nc_matmul_mx(None, None, None, None, None),
    "activate2": lambda: nisa.activate2(None, None, None, None, None, None, None),
    "exponential": lambda: nisa.exponential(None, None),
    "quantize_mx": lambda: nisa.quantize_mx(None, None, None),
    "rand2": lambda: nisa.rand2(None, 0, 1),
}
for _name, _call in NEWER.items():
    # the allowed twin is an instruction that trn2 has
    rules(_name, (NeedsNewerCore, lambda b, call=_call: call() if b else nisa.activation(f32(), nl.exp, f32())))
