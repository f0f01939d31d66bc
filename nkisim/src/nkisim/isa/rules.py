"""Rules between the operands of an instruction; each raises the law that it guards."""

from __future__ import annotations

from collections.abc import Iterable

from nkisim.dtypes import INTS
from nkisim.errors import (
    BothInPsum,
    NeedsNewerCore,
    OtherVersion,
    ShapeMismatch,
    TileTooLarge,
    WrongDtype,
    WrongOperator,
)
from nkisim.isa.operators import Op
from nkisim.isa.statement import Call, Rule, is_psum
from nkisim.isa.tokens import resolve
from nkisim.memory.tensor import NkiTensor

_COMPARE = {"equal", "not_equal", "less", "less_equal", "greater", "greater_equal"}
_LOGICAL = {"logical_and", "logical_or", "logical_xor"}
ARITHMETIC = frozenset({"add", "subtract", "multiply", "maximum", "minimum", "power", *_COMPARE, *_LOGICAL})
BITVEC = frozenset({"bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift"})
# unary operators of tensor_scalar; square and relu came with trn3
UNARY = frozenset({"abs", "rsqrt", "reciprocal"})
# names without a hardware instruction (release notes, known issues)
HARDWARE_GAPS = frozenset({"divide", "fmod", "mod"})
# operators of trn3, and the one in whose places each is allowed there
NEWER = {"abs_max": "maximum", "abs_min": "maximum", "square": "abs", "relu": "abs", "bypass": "", "prelu": ""}


def newer(argument: str) -> Rule:
    """Return the rule that an argument that came with NKI 0.7 keeps its default in 0.6."""

    def rule(call: Call) -> None:
        if not call.core.policy.traced and call.args[argument] != call.card.defaults[argument]:
            actual = f"is {call.args[argument]!r:.60} and came with NKI 0.7"
            call.refuse(OtherVersion, argument, actual, "leave it out in 0.6, or choose 0.7 (NKISIM_NKI)")

    return rule


def per_partition(tensor: NkiTensor) -> int:
    """Return the number of elements in each partition of a view."""
    return tensor.size // tensor.shape[0]


def same_partitions(*names: str) -> Rule:
    """All named tensors have the same number of partitions."""

    def rule(call: Call) -> None:
        first = None
        for name in names:
            tensor = call.tensors.get(name)
            if tensor is None:
                continue
            if first is None:
                first = (name, tensor.shape[0])
            elif tensor.shape[0] != first[1]:
                actual = f"has {tensor.shape[0]} partitions, shape {tensor.shape}"
                call.refuse(ShapeMismatch, name, actual, f"{first[0]} has {first[1]} partitions")

    return rule


def same_elements(*names: str) -> Rule:
    """All named tensors have the same partitions and elements per partition; ranks may differ."""
    partitions = same_partitions(*names)

    def rule(call: Call) -> None:
        first: NkiTensor | None = None
        for name in names:
            tensor = call.tensors.get(name)
            if tensor is None:
                continue
            if first is None:
                first = tensor
            elif tensor.shape != first.shape:
                partitions(call)
                if tensor.size != first.size:
                    allowed = f"{names[0]} has {per_partition(first)}"
                    call.refuse(ShapeMismatch, name, f"has {per_partition(tensor)} elements per partition", allowed)

    return rule


def same_dtype(*names: str) -> Rule:
    """All named tensors have one dtype."""

    def rule(call: Call) -> None:
        present = [(n, call.tensors[n].dtype) for n in names if n in call.tensors]
        for name, dtype in present[1:]:
            if dtype != present[0][1]:
                call.refuse(WrongDtype, name, f"is {dtype}", f"{present[0][0]} is {present[0][1]} and they must agree")

    return rule


def not_both_psum(a: str, b: str) -> Rule:
    """Two inputs are not in PSUM together."""

    def rule(call: Call) -> None:
        if is_psum(call.tensors.get(a)) and is_psum(call.tensors.get(b)):
            call.refuse(BothInPsum, f"{a} and {b}", "are both in PSUM", "move one to SBUF")

    return rule


def elements(name: str, exactly: int = 0, maximum: int = 0, minimum: int = 0) -> Rule:
    """A tensor has a given number of elements per partition."""

    def rule(call: Call) -> None:
        tensor = call.tensors.get(name)
        if tensor is None:
            return
        count = per_partition(tensor)
        actual = f"has {count} elements per partition"
        if exactly and count != exactly:
            call.refuse(ShapeMismatch, name, actual, f"exactly {exactly} are needed")
        if (maximum and count > maximum) or count < minimum:
            limit = f"{minimum} to {maximum}" if minimum else f"at most {maximum}"
            call.refuse(TileTooLarge, name, actual, f"{limit} can be processed")

    return rule


def rank(name: str, maximum: int) -> Rule:
    """A tensor has at most a given number of dimensions."""

    def rule(call: Call) -> None:
        tensor = call.tensors.get(name)
        if tensor is not None and tensor.ndim > maximum:
            call.refuse(ShapeMismatch, name, f"has {tensor.ndim} dimensions", f"at most {maximum} are allowed")

    return rule


def operator(name: str, allowed: Iterable[str], optional: bool = False) -> Rule:
    """Resolve an operator parameter and check that it is one of the allowed names."""
    names = frozenset(allowed)

    def rule(call: Call) -> None:
        token = call.args[name]
        if token is None and optional:
            return
        op = token if token.__class__ is Op else resolve(token, call.who(name))
        newer = call.core.geometry.generation > 3
        gap = op.name in HARDWARE_GAPS and call.core.hardware_gaps
        if op.name not in names and not gap and not (newer and NEWER.get(op.name) in names):
            if op.name in NEWER and not newer:
                raise NeedsNewerCore(f"{call.card.op} with nl.{op.name}")
            call.refuse(WrongOperator, name, f"is nl.{op.name}", f"it can be {', '.join(sorted(names))}")
        call.args[name] = op

    return rule


def integers_for_bitvec(op_name: str, *names: str) -> Rule:
    """With a bitvec operator, the named tensors are integers of one width."""

    def rule(call: Call) -> None:
        op = call.args[op_name]
        if op is None or op.kind != "bitvec":
            return
        for name in names:
            tensor = call.tensors.get(name)
            if tensor is not None and tensor.dtype not in INTS:
                actual = f"is {tensor.dtype} with the bitvec operator {op.name}"
                call.refuse(WrongDtype, name, actual, "bitvec operators take integers")

    return rule
