"""Tensor Engine: nc_matmul with PSUM accumulation, and nc_transpose."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from nkisim.core import access
from nkisim.dtypes import Array, to_fp32
from nkisim.enums import engine, matmul_perf_mode
from nkisim.errors import (
    AccumulateMisuse,
    AmbiguousManual,
    NotSimulated,
    PsumBankCrossed,
    Relaxed,
    ShapeMismatch,
    TileTooLarge,
    WrongArgument,
    WrongDtype,
    WrongEngine,
    WrongSpace,
)
from nkisim.isa import ambiguities
from nkisim.isa.card import card
from nkisim.isa.rules import per_partition
from nkisim.isa.statement import ON_CHIP, PSUM, SBUF, Call, Operand, Target
from nkisim.isa.sums import products
from nkisim.memory.tensor import NkiTensor

_FP8 = frozenset({"float8_e4m3", "float8_e5m2"})
_WIDE = frozenset({"float32", "tfloat32"})
_MATMUL = _FP8 | _WIDE | {"bfloat16", "float16"}


def _dtypes(call: Call) -> None:
    stationary, moving = call.tensors["stationary"].dtype, call.tensors["moving"].dtype
    if (stationary in _WIDE) != (moving in _WIDE):
        actual = f"is {moving} with a stationary tile of {stationary}"
        call.refuse(WrongDtype, "moving", actual, "fp32 and tfloat32 go with fp32 or tfloat32 only")
    dst = call.tensors["dst"].dtype
    if call.args["is_transpose"]:
        if dst != stationary and stationary not in _FP8:
            call.refuse(WrongDtype, "dst", f"is {dst}", f"a transpose keeps {stationary}")
    elif dst != "float32":
        call.refuse(WrongDtype, "dst", f"is {dst}", "on trn2 a matmul writes float32")


def _double(call: Call) -> bool:
    mode = call.args["perf_mode"]
    if mode is matmul_perf_mode.none:
        return False
    if mode is not matmul_perf_mode.double_row:
        call.refuse(WrongArgument, "perf_mode", f"is {mode!r}", "pass a matmul_perf_mode")
    for name in ("stationary", "moving"):
        tensor = call.tensors[name]
        if tensor.dtype not in _FP8:
            call.refuse(WrongDtype, name, f"is {tensor.dtype}", "double_row takes fp8 tiles")
        if tensor.ndim < 3 or tensor.shape[1] != 2:
            call.refuse(ShapeMismatch, name, f"has shape {tensor.shape}", "double_row takes [K, 2, columns]")
    if call.args["is_transpose"]:
        call.refuse(WrongArgument, "is_transpose", "is set with double_row", "use one of them")
    return True


def _shapes(call: Call) -> None:
    double = 2 if _double(call) else 1
    stationary, moving, dst = (call.tensors[n] for n in ("stationary", "moving", "dst"))
    rows, columns = _tile(call)
    k, m = stationary.shape[0], per_partition(stationary) // double
    n = per_partition(moving) // double
    if moving.shape[0] != k:
        call.refuse(ShapeMismatch, "moving", f"has {moving.shape[0]} partitions", f"stationary contracts over {k}")
    geometry = call.core.geometry
    for name, size, capacity in (("stationary", k, rows), ("stationary", m, columns)):
        if size > capacity:
            call.refuse(TileTooLarge, name, f"has shape {stationary.shape}", f"{capacity} fit here")
    if n > geometry.gemm_moving_fmax:
        allowed = f"at most {geometry.gemm_moving_fmax} columns fit one PSUM bank"
        call.refuse(TileTooLarge, "moving", f"has {n} columns", allowed)
    if dst.shape[0] != m or per_partition(dst) != n:
        call.refuse(ShapeMismatch, "dst", f"has shape {dst.shape}", f"the product is ({m}, {n})")


def one_bank(call: Call) -> None:
    """Refuse an output that crosses the boundary of a PSUM bank."""
    dst, bank = call.tensors["dst"], call.core.geometry.psum_bank_bytes
    _, _, _, start, stop, *_ = access.extent(dst)
    if start // bank != (stop - 1) // bank:
        actual = f"covers bytes [{start}, {stop}) of its tensor's partition"
        call.refuse(PsumBankCrossed, "dst", actual, f"a matmul writes inside one {bank} B bank")


def _tile(call: Call) -> tuple[int, int]:
    """Check tile_position and tile_size; return the rows and columns of the array in use."""
    position, size = tuple(call.args["tile_position"] or ()), tuple(call.args["tile_size"] or ())
    full = call.core.geometry.partitions
    if not position and not size:
        return full, full
    if len(position) != 2 or len(size) != 2:
        actual = f"are {position} and {size}"
        call.refuse(WrongArgument, "tile_position and tile_size", actual, "both are pairs or unset")
    for start, step in zip(position, size, strict=False):
        if step not in (32, 64, full) or start % step or start + step > full:
            allowed = f"sizes are 32, 64 or {full} and positions multiples of them"
            call.refuse(WrongArgument, "tile_position and tile_size", f"are {position} and {size}", allowed)
    if size[1] != full and call.args["perf_mode"] is matmul_perf_mode.double_row:
        call.refuse(WrongArgument, "tile_size", f"is {size}", "double_row uses all columns")
    return size[0], size[1]


def _column_tiling(call: Call) -> None:
    size = call.args["tile_size"]
    if size and size[1] != call.core.geometry.partitions:
        text = f"nc_matmul: column tiling {tuple(size)}: the manual's text allows it, its parameter list does not"
        call.core.warn(text, text, AmbiguousManual)


def _transpose(call: Call) -> None:
    """A transpose needs an exact identity as the moving tile."""
    if not call.args["is_transpose"]:
        return
    if call.args["accumulate"]:
        call.refuse(WrongArgument, "accumulate", "is True for a transpose", "leave it out")
    stationary, moving = call.tensors["stationary"], call.tensors["moving"]
    if stationary.dtype in _FP8:
        raise NotSimulated("nc_matmul", "is_transpose", "fp8 transposes write 16-bit elements; nc_transpose has them")
    if moving.dtype != stationary.dtype:
        call.refuse(WrongDtype, "moving", f"is {moving.dtype}", f"the identity has the data's {stationary.dtype}")


def _identity(call: Call) -> None:
    if not call.args["is_transpose"]:
        return
    moving = call.tensors["moving"]
    values = to_fp32(access.read(call.core, moving, call.who("moving")))
    values = values.reshape(values.shape[0], -1)
    if values.shape[0] != values.shape[1] or not np.array_equal(values, np.eye(len(values))):
        call.refuse(WrongArgument, "moving", "is not an identity matrix", "a transpose needs one")


def accumulate(call: Call, operand: str, tensor: NkiTensor, result: Array | None) -> None:
    """Write a product to PSUM: overwrite, add, or decide by who wrote before."""
    mode = False if call.args.get("is_transpose") else call.args["accumulate"]
    _chain(call, tensor, mode)
    if result is None:
        access.mark(call.core, tensor, matmul=True)
        return
    target = tensor._numpy()
    result = result.reshape(target.shape)
    if mode is not False:
        result = _added(call, tensor, result, mode)
    access.mark(call.core, tensor, matmul=True)
    np.copyto(target, result)
    if call.core.unwritten:
        access.propagate_unwritten(call.core, tensor)


def _chain(call: Call, tensor: NkiTensor, mode: bool | None = False) -> None:
    """Begin an accumulation chain, or continue the one that wrote the elements."""
    storage, marks = tensor._storage, tensor._product_marks()
    if mode is False or not marks.any():
        storage.chain = storage.chain % 255 + 1
    elif np.any((marks != 0) & (marks != access.chain_mark(storage, marks.itemsize))):
        ambiguities.of_chains(call)


def _added(call: Call, tensor: NkiTensor, result: Array, mode: bool | None) -> Array:
    """Return the content of PSUM after an accumulating matmul."""
    storage = tensor._storage
    assert storage.matmul is not None
    target = tensor._numpy()
    products = tensor._product_marks() != 0
    if products.all():
        return target + result
    if storage.complete or storage.mask is None:
        # without tracking this is unknown: a matmul left to decide then overwrites
        written = np.full(target.shape, storage.mask is not None or mode is True)
    else:
        marks = tensor._written_marks()
        written = marks == access.WRITTEN_MARK[marks.itemsize]
    foreign = ~products & written
    base = np.where(products, target, 0)
    doubtful = foreign if mode is None else ~products
    if not doubtful.any():
        return base + result
    if not np.any(doubtful & ~written) and np.all(target[doubtful] == 0):
        text = (
            "nc_matmul: accumulates on zeros that no matmul wrote, which is undefined on "
            "NeuronCore-v3 though old examples do it; start with accumulate=False"
        )
        call.core.warn("accumulate on zeros", text, AmbiguousManual)
        return base + result
    actual = f"adds to {int(doubtful.sum())} elements of {tensor.name} that no matmul wrote"
    if call.core.policy.accumulate == "warn":
        text = f"nc_matmul: dst {actual}, which is undefined on NeuronCore-v3; overwrite first with accumulate=False"
        call.core.warn("accumulate", text, Relaxed)
        return np.where(products | foreign, target, 0) + result
    call.refuse(AccumulateMisuse, "dst", actual, "overwrite first with accumulate=False or None")


def _work(call: Call) -> Mapping[str, object]:
    stationary, moving = call.tensors["stationary"], call.tensors["moving"]
    double = 2 if call.args["perf_mode"] is matmul_perf_mode.double_row else 1
    return {
        "rows": stationary.shape[0],
        "cols_stationary": per_partition(stationary) // double,
        "cols_moving": per_partition(moving) // double,
        "fp32": stationary.dtype == "float32" and not call.args["is_transpose"],
        "dtype": moving.dtype,
        "perf_mode": call.args["perf_mode"].value,
        "transpose": bool(call.args["is_transpose"]),
        "onezero": bool(call.args["is_stationary_onezero"] or call.args["is_moving_onezero"]),
        "tile_position": tuple(call.args["tile_position"] or ()),
        "tile_size": tuple(call.args["tile_size"] or ()),
    }


@card(
    "tensor",
    Operand("dst", "out", spaces=PSUM, dtypes=_WIDE | {"bfloat16", "float16"}),
    Operand("stationary", "in", spaces=SBUF, dtypes=_MATMUL, math="auto"),
    Operand("moving", "in", spaces=SBUF, dtypes=_MATMUL),
    rules=(_dtypes, _shapes, _transpose),
    always=(one_bank, _column_tiling),
    values=(_identity,),
    writer=accumulate,
    math=lambda call: "raw" if call.args["is_transpose"] else "fp32",
    work=_work,
)
def nc_matmul(
    dst: Target, stationary: Array, moving: Array, is_stationary_onezero: bool = False,
    is_moving_onezero: bool = False, is_transpose: bool = False, accumulate: bool | None = None,
    tile_position: tuple[int, ...] = (), tile_size: tuple[int, ...] = (),
    perf_mode: matmul_perf_mode = matmul_perf_mode.none, name: str | None = None,
) -> Array:  # fmt: skip
    """Multiply stationary.T @ moving, each element rounded to fp32 once; with is_transpose, move bits."""
    if is_transpose:
        return stationary.T
    if perf_mode is matmul_perf_mode.double_row:
        # one sum over both halves
        stationary, moving = (np.concatenate(np.split(tile, 2, axis=1)) for tile in (stationary, moving))
    return products(stationary, moving)


def _transpose_engine(call: Call) -> str:
    if call.tensors["dst"].buffer.value == "psum" and call.tensors["data"].buffer.value == "sbuf":
        return "tensor"
    return "vector"


def _sixteen_bits(call: Call) -> None:
    """An fp8 transpose writes 16-bit elements, the upper 8 bits zero (architecture guide of Trainium2)."""
    dst = call.tensors["dst"]
    if dst.dtype in _FP8 and per_partition(dst) > 1 and dst.strides[-1] != 2:
        actual = f"has a step of {dst.strides[-1]}"
        call.refuse(ShapeMismatch, "dst", actual, "fp8 transposes write 16-bit elements: a step of 2 fp8 elements")


def _transpose_rules(call: Call) -> None:
    dst, data = call.tensors["dst"], call.tensors["data"]
    if dst.dtype != data.dtype:
        call.refuse(WrongDtype, "dst", f"is {dst.dtype}", f"a transpose keeps {data.dtype}")
    rows, columns = data.shape[0], per_partition(data)
    if dst.shape[0] != columns or per_partition(dst) != rows:
        call.refuse(ShapeMismatch, "dst", f"has shape {dst.shape}", f"the transpose is ({columns}, {rows})")
    limit = 128 if call.engine == "tensor" else 32
    if rows > limit or columns > limit:
        call.refuse(TileTooLarge, "data", f"is {rows} x {columns}", f"{call.engine} transposes {limit} x {limit}")
    if call.engine == "tensor":
        if dst.buffer.value != "psum" or data.buffer.value != "sbuf":
            actual = f"go from {data.buffer.value} to {dst.buffer.value}"
            call.refuse(WrongSpace, "data and dst", actual, "tensor transposes SBUF to PSUM")
        if data.dtype not in _MATMUL:
            call.refuse(WrongEngine, "engine", f"is tensor for {data.dtype}", "the Tensor Engine reads floats")


def _transpose_bank(call: Call) -> None:
    if call.engine == "tensor":
        one_bank(call)
        _sixteen_bits(call)


def _transpose_write(call: Call, operand: str, tensor: NkiTensor, result: Array | None) -> None:
    if call.engine == "tensor":
        _chain(call, tensor)
    access.mark(call.core, tensor, matmul=call.engine == "tensor")
    if result is None:
        return
    np.copyto(tensor._numpy(), result.reshape(tensor.shape))
    if call.core.unwritten:
        call.core.unwritten[:] = [mask.reshape(len(mask), -1).T for mask in call.core.unwritten]
        access.propagate_unwritten(call.core, tensor)


def _transpose_work(call: Call) -> Mapping[str, object]:
    data = call.tensors["data"]
    if call.engine == "vector":
        return {"elements": per_partition(data), "inputs": 1, "scalar_operands": 0, "function": "transpose"}
    columns = per_partition(data)
    return {"rows": data.shape[0], "cols_stationary": columns, "cols_moving": data.shape[0],
            "fp32": False, "dtype": data.dtype, "perf_mode": "none", "transpose": True,
            "onezero": True, "tile_position": (), "tile_size": ()}  # fmt: skip


@card(
    "tensor vector",
    Operand("dst", "out", spaces=ON_CHIP),
    Operand("data", "in", spaces=ON_CHIP, math="raw"),
    rules=(_transpose_rules,),
    always=(_transpose_bank,),
    pick=_transpose_engine,
    writer=_transpose_write,
    work=_transpose_work,
)
def nc_transpose(dst: Target, data: Array, engine: engine = engine.unknown, name: str | None = None) -> Array:
    """Exchange partitions and elements of a tile, bit for bit."""
    return data.T
