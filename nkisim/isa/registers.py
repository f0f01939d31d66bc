"""Registers of the engine sequencers."""

from __future__ import annotations

from typing import Any

import numpy as np

from nkisim.core import access
from nkisim.core.context import current
from nkisim.dtypes import COMPUTED, INFO
from nkisim.errors import ShapeMismatch, WrongArgument, WrongSpace
from nkisim.isa.card import record
from nkisim.isa.instruction import NkiInstruction
from nkisim.isa.statement import DMA, Call, Card, Operand
from nkisim.memory.tensor import NkiTensor
from nkisim.objects import VirtualRegister


def _body(**_: Any) -> None:
    """A sequencer moves 32 bits; there is no arithmetic body."""


_NO_WORK = {"elements": 1, "inputs": 0, "scalar_operands": 0, "function": "register"}
_LOAD = Card(
    "register_load", ("sync",), (Operand("src", "in", spaces=DMA, dtypes=COMPUTED),), _body, work=lambda _: _NO_WORK
)
_STORE = Card(
    "register_store", ("sync",), (Operand("dst", "out", spaces=DMA, dtypes=COMPUTED),), _body, work=lambda _: _NO_WORK
)


def register_alloc(x: int | None = None) -> VirtualRegister:
    """Allocate a register, set to an integer or unset."""
    current("register_alloc")
    if x is not None and not isinstance(x, (int, np.integer)):
        call = Call(current("register_alloc"), _LOAD, {}, "sync")
        call.refuse(WrongArgument, "x", f"is {x!r:.60}", "an int or None is needed")
    return VirtualRegister(None if x is None else int(x))


def register_move(dst: VirtualRegister, src: VirtualRegister | int) -> None:
    """Copy an integer or another register into a register."""
    current("register_move")
    _register(dst, "register_move", "dst")
    value = src.value("register_move") if isinstance(src, VirtualRegister) else int(src)
    dst.set(value, "register_move")


def _register(value: object, op: str, operand: str) -> None:
    if not isinstance(value, VirtualRegister):
        call = Call(current(op), _LOAD if op == "register_load" else _STORE, {}, "sync")
        call.refuse(WrongArgument, operand, f"is {value!r:.60}", "a register is needed")


def _one_element(call: Call, operand: str, tensor: NkiTensor) -> NkiTensor:
    if tensor.__class__ is not NkiTensor or tensor.size != 1:
        found = f"is {tensor!r:.60}"
        call.refuse(ShapeMismatch, operand, found, "a tensor with exactly one element is needed")
    if tensor.buffer.value not in DMA:
        call.refuse(WrongSpace, operand, f"is in {tensor.buffer.value}", "HBM or SBUF is needed")
    if tensor._dynamic is not None:
        settled = access.settle(call.core, tensor, call.who(operand))
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
