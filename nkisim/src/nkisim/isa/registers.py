"""Registers of the engine sequencers, and the scalars that replace them."""

from __future__ import annotations

import numpy as np

from nkisim.core import access
from nkisim.core.context import current, register, since
from nkisim.dtypes import COMPUTED, INFO
from nkisim.errors import ShapeMismatch, WrongArgument, WrongDtype, WrongSpace
from nkisim.isa import ambiguities
from nkisim.isa.card import record
from nkisim.isa.instruction import NkiInstruction
from nkisim.isa.statement import DMA, Call, Card, Operand
from nkisim.memory.tensor import NkiTensor
from nkisim.objects import NkiScalar, VirtualRegister

_NO_WORK = {"elements": 1, "inputs": 0, "scalar_operands": 0, "function": "register"}
_SCALARS = frozenset({"int32", "int64"})


def _card(op: str, operand: str, dtypes: frozenset[str]) -> Card:
    """Return the card of an instruction of the sync engine that moves one number."""
    moved = Operand(operand, "in" if operand == "src" else "out", spaces=DMA, dtypes=dtypes)
    return Card(op, ("sync",), (moved,), work=lambda _: _NO_WORK)


_LOAD, _STORE = _card("register_load", "src", COMPUTED), _card("register_store", "dst", COMPUTED)
_SCALAR_LOAD, _SCALAR_STORE = _card("scalar_load", "src", _SCALARS), _card("scalar_store", "dst", _SCALARS)


def register_alloc(x: int | None = None) -> VirtualRegister:
    """Allocate a register, set to an integer or unset."""
    current("register_alloc")
    if x is not None and not isinstance(x, (int, np.integer)):
        call = Call(current("register_alloc"), _LOAD, {}, "sync")
        call.refuse(WrongArgument, "x", f"is {x!r:.60}", "an int or None is needed")
    return register(current("register_alloc"), None if x is None else int(x))


def register_move(dst: VirtualRegister, src: VirtualRegister | int) -> None:
    """Copy an integer or another register into a register."""
    current("register_move")
    _register(dst, "register_move", "dst")
    if isinstance(src, NkiScalar):
        _register(src, "register_move", "src")
    value = src.value("register_move") if isinstance(src, VirtualRegister) else int(src)
    dst.set(value, "register_move")


def _register(value: object, op: str, operand: str) -> None:
    if not isinstance(value, VirtualRegister):
        call = Call(current(op), _LOAD if op == "register_load" else _STORE, {}, "sync")
        allowed = "scalar_load and scalar_store take it" if isinstance(value, NkiScalar) else "a register is needed"
        call.refuse(WrongArgument, operand, f"is {value!r:.60}", allowed)


def _one_element(call: Call, operand: str, tensor: NkiTensor) -> NkiTensor:
    if tensor.__class__ is not NkiTensor or tensor.size != 1:
        call.refuse(ShapeMismatch, operand, f"is {tensor!r:.60}", "a tensor with exactly one element is needed")
    if tensor.buffer.value not in DMA:
        call.refuse(WrongSpace, operand, f"is in {tensor.buffer.value}", "HBM or SBUF is needed")
    if tensor._dynamic is not None:
        settled = access.resolve_dynamic_offset(call.core, tensor, call.who(operand))
        if settled is None:
            raise access.out_of_range(call.core, tensor, call.who(operand))
        tensor = settled
    call.tensors[operand] = tensor
    return tensor  # type: ignore[no-any-return]


def register_load(dst: VirtualRegister, src: NkiTensor) -> NkiInstruction:
    """Load one element of HBM or SBUF into a register."""
    call = Call(current("register_load"), _LOAD, {"name": None}, "sync")
    _register(dst, "register_load", "dst")
    tensor = _one_element(call, "src", src)
    access.known(tensor, call.who("src"))
    value = access.read(call.core, tensor, call.who("src")).reshape(-1)[0]
    dst.set(int(value), "register_load")
    return record(call)


def register_store(dst: NkiTensor, src: VirtualRegister) -> NkiInstruction:
    """Store a register into one element of HBM or SBUF."""
    call = Call(current("register_store"), _STORE, {"name": None}, "sync")
    tensor = _one_element(call, "dst", dst)
    _register(src, "register_store", "src")
    value = np.array(src.value("register_store"), np.int64)
    if INFO[tensor.dtype].kind == "int" and value > np.iinfo(INFO[tensor.dtype].storage).max:
        value = value - 2**32
    access.write(call.core, tensor, value, call.who("dst"))
    return record(call)


def scalar_load(src: NkiTensor) -> NkiScalar:
    """Load a 1 x 1 int32 or int64 tensor of HBM or SBUF into a new scalar of its dtype."""
    call = Call(since("scalar_load", "use register_load"), _SCALAR_LOAD, {"name": None}, "sync")
    tensor = _one_by_one(call, "src", src)
    access.known(tensor, call.who("src"))
    value = access.read(call.core, tensor, call.who("src")).reshape(-1)[0]
    record(call)
    return NkiScalar(int(value), tensor.dtype)


def scalar_store(dst: NkiTensor, value: NkiScalar) -> None:
    """Store a scalar into a 1 x 1 tensor of its width in HBM or SBUF."""
    call = Call(since("scalar_store", "use register_store"), _SCALAR_STORE, {"name": None}, "sync")
    tensor = _one_by_one(call, "dst", dst)
    if not isinstance(value, NkiScalar):
        allowed = "an NkiScalar is needed; nisa.memset writes a constant, nisa.register_store a register"
        call.refuse(WrongArgument, "value", f"is {value!r:.60}", allowed)
    if value.dtype != tensor.dtype:
        actual = f"is {tensor.dtype} and the scalar is {value.dtype}"
        call.refuse(WrongDtype, "dst", actual, "store at the scalar's width and convert in memory")
    access.write(call.core, tensor, np.array(value.value("scalar_store"), tensor.dtype), call.who("dst"))
    record(call)


def _one_by_one(call: Call, operand: str, tensor: NkiTensor) -> NkiTensor:
    """Check the tensor of a scalar; say once that its time is a register's."""
    checked = _one_element(call, operand, tensor)
    if checked.shape != (1, 1):
        call.refuse(ShapeMismatch, operand, f"has shape {checked.shape}", "it is (1, 1)")
    if checked.dtype not in _SCALARS:
        call.refuse(WrongDtype, operand, f"is {checked.dtype}", "it is int32 or int64, not unsigned")
    if call.core.recording:
        ambiguities.warn_ambiguous(
            call, "its time, arithmetic of scalars included, is that of a register", "what it takes"
        )
    return checked
