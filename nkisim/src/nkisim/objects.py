"""NKIObject, the memory regions, the virtual register and the scalar: the plain objects of the language."""

from __future__ import annotations

import operator as _operators
from collections.abc import Callable
from dataclasses import MISSING, Field
from enum import Enum
from inspect import Parameter, Signature
from types import MemberDescriptorType
from typing import Any, NoReturn

import numpy as np

from nkisim.errors import RegisterMisuse

_NO_VALUE = "the {} has no value while a kernel is traced; {}"


class NKIObject:
    """Base of the objects that a kernel may define and pass around.

    A subclass without an initializer gets the documented one (language guide, Class Support), decorated as a
    dataclass or not: one parameter a field, None where the class gives no value, then __post_init__().
    """

    def __init__(self, **kwargs: object) -> None:
        for key, value in kwargs.items():
            setattr(self, key, value)

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        fields, initializers = _fields(cls), [vars(c)["__init__"] for c in _classes(cls) if "__init__" in vars(c)]
        if fields and all(hasattr(init, "fields") for init in initializers):
            # in the class itself, where dataclass() keeps an existing initializer
            cls.__init__ = _initializer(fields)  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        """Run at the end of the initializer; a subclass may say more."""


def _classes(cls: type) -> list[type]:
    """Return a class and its bases below NKIObject, bases first."""
    return [c for c in reversed(cls.__mro__) if c is not NKIObject and issubclass(c, NKIObject)]


def _fields(cls: type) -> dict[str, object]:
    """Return the default of every field: annotated names in order, then attributes that only have a value."""
    fields: dict[str, object] = {}
    for owner in _classes(cls):
        body = vars(owner)
        annotated = [n for n, kind in body.get("__annotations__", {}).items() if "ClassVar" not in str(kind)]
        valued = [n for n, v in body.items() if not n.startswith("_") and not _is_behaviour(v)]
        for name in [*annotated, *(n for n in valued if n not in annotated)]:
            fields[name] = body.get(name, fields.get(name))
    return fields


def _is_behaviour(value: object) -> bool:
    return callable(value) or isinstance(value, (property, classmethod, staticmethod, MemberDescriptorType))


def _initializer(fields: dict[str, object]) -> Callable[..., None]:
    """Return the documented __init__ of a class with these fields."""
    parameters = [Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)]
    parameters += [Parameter(n, Parameter.POSITIONAL_OR_KEYWORD, default=None) for n in fields]
    signature = Signature(parameters)

    def __init__(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs).arguments
        self = given.pop("self")
        for name, default in fields.items():
            # past the guard of a frozen dataclass
            object.__setattr__(self, name, given[name] if name in given else _default(default))
        self.__post_init__()

    __init__.fields = fields  # type: ignore[attr-defined]
    __init__.__signature__ = signature  # type: ignore[attr-defined]
    return __init__


def _default(value: object) -> object:
    """Return a field's value when the call passes none; dataclasses.field() may describe it."""
    if not isinstance(value, Field):
        return value
    if value.default_factory is not MISSING:
        return value.default_factory()
    return None if value.default is MISSING else value.default


class MemoryRegion(Enum):
    """The memories a tensor can live in."""

    sbuf = "sbuf"
    psum = "psum"
    private_hbm = "private_hbm"
    shared_hbm = "shared_hbm"


class VirtualRegister(NKIObject):
    """A 32-bit scalar of the engine sequencers, known only at run time.

    Python arithmetic, int(), range() and comparisons raise TypeError, as they would while a
    kernel is traced. `while register:` is the deprecated spelling of nl.while_loop, which works in 0.6 only.
    """

    def __init__(self, state: int | None = None, frozen: bool = False) -> None:
        self.state = state
        self.frozen = frozen
        # the launch is of a version in which Python runs the kernel
        self.traced = False

    def value(self, op: str) -> int:
        """Return the run-time value for an instruction.

        Raises:
            RegisterMisuse: the register was never set.
        """
        if self.state is None:
            raise RegisterMisuse(op, "register", "was never set", "load or move a value first")
        return self.state

    def set(self, value: int, op: str) -> None:
        """Store a 32-bit value.

        Raises:
            RegisterMisuse: the register is the counter of a loop.
        """
        if self.frozen:
            allowed = "a loop counter is read-only, copy it with register_move"
            raise RegisterMisuse(op, "register", "is the counter of a dynamic loop", allowed)
        self.state = (int(value) + 2**31) % 2**32 - 2**31 if not 0 <= value < 2**32 else int(value)

    def __bool__(self) -> bool:
        if self.traced:
            raise TypeError(_NO_VALUE.format("VirtualRegister", "branch with nl.while_loop, count with nl.fori_loop"))
        return self.value("while") != 0

    def __int__(self) -> int:
        raise TypeError(_NO_VALUE.format("VirtualRegister", "use it as scalar_offset or with register_store"))

    __index__ = __int__

    def __eq__(self, other: object) -> bool:
        if isinstance(other, VirtualRegister):
            return self is other
        raise TypeError(_NO_VALUE.format("VirtualRegister", "compute the condition in SBUF and load it"))

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"VirtualRegister({self.state})"


class NkiScalar(NKIObject):
    """One integer on the device, int32 or int64, known only at run time; nisa.scalar_load makes it.

    `+`, `-` and `*` with an int or a scalar of the same dtype are traced and give a new scalar, which wraps at its
    width. A comparison of int32 is traced too, and its result cannot be used.
    """

    def __init__(self, state: int, dtype: str | None = None, is_comparison: bool = False) -> None:
        self.dtype = dtype or "int32"
        half = 1 << (int(self.dtype[3:]) - 1)
        self.state = (int(state) + half) % (2 * half) - half
        self.is_comparison = is_comparison

    def value(self, op: str) -> int:
        """Return the run-time value for an instruction.

        Raises:
            RegisterMisuse: it is the result of a comparison.
        """
        if self.is_comparison:
            actual = "is the result of a comparison of scalars"
            raise RegisterMisuse(op, "scalar", actual, "compute the condition in SBUF and load it with scalar_load")
        return self.state

    def _other(self, name: str, other: object) -> int:
        """Return the value of the other side of an operator."""
        if isinstance(other, NkiScalar):
            if other.dtype != self.dtype:
                actual = f"are {self.dtype} and {other.dtype}"
                raise RegisterMisuse(name, "scalars", actual, "load both from tiles of one dtype")
            return other.value(name)
        if type(other) is not int and not isinstance(other, np.integer):
            raise RegisterMisuse(name, "operand", f"is {other!r:.60}", "an int or an NkiScalar is needed")
        number, half = int(other), 1 << (int(self.dtype[3:]) - 1)
        if not -half <= number < half:
            raise RegisterMisuse(name, "operand", f"is {number}", f"it must fit {self.dtype}; load an int64 scalar")
        return number

    def __neg__(self) -> NkiScalar:
        return NkiScalar(-self.value("-"), self.dtype)

    def __bool__(self) -> bool:
        raise TypeError(_NO_VALUE.format("NkiScalar", "branch with nl.while_loop, count with nl.fori_loop"))

    def __int__(self) -> int:
        raise TypeError(_NO_VALUE.format("NkiScalar", "use it as scalar_offset or as a bound of nl.fori_loop"))

    __index__ = __int__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"NkiScalar({self.state}, {self.dtype!r})"


Operator = Callable[[NkiScalar, object], NkiScalar]


def _arithmetic(name: str, function: Callable[[int, int], int], reverse: bool) -> Operator:
    def operator(self: NkiScalar, other: object) -> NkiScalar:
        mine, right = self.value(name), self._other(name, other)
        return NkiScalar(function(right, mine) if reverse else function(mine, right), self.dtype)

    return operator


def _comparison(name: str, function: Callable[[int, int], bool]) -> Operator:
    def operator(self: NkiScalar, other: object) -> NkiScalar:
        if self.dtype == "int64":
            raise RegisterMisuse(name, "scalar", "is int64", "64 bits have +, - and * only; compare in SBUF")
        return NkiScalar(function(self.value(name), self._other(name, other)), self.dtype, is_comparison=True)

    return operator


def _refused(name: str) -> Callable[[NkiScalar, object], NoReturn]:
    def operator(self: NkiScalar, _other: object = None) -> NoReturn:
        raise RegisterMisuse(name, "scalar", "has no such operator", "it has +, - and *; compute the rest in SBUF")

    return operator


def _no_arithmetic(_self: VirtualRegister, _other: object = None) -> NoReturn:
    advice = "use it as scalar_offset, which the stride multiplies, or compute in SBUF and load with register_load"
    raise TypeError(_NO_VALUE.format("VirtualRegister", advice))


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and", "or", "xor"):
    setattr(VirtualRegister, f"__{_name}__", _no_arithmetic)
    setattr(VirtualRegister, f"__r{_name}__", _no_arithmetic)
for _name in ("lt", "le", "gt", "ge", "neg", "abs", "invert"):
    setattr(VirtualRegister, f"__{_name}__", _no_arithmetic)
for _name in ("add", "sub", "mul"):
    setattr(NkiScalar, f"__{_name}__", _arithmetic(f"NkiScalar.{_name}", getattr(_operators, _name), reverse=False))
    setattr(NkiScalar, f"__r{_name}__", _arithmetic(f"NkiScalar.{_name}", getattr(_operators, _name), reverse=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(NkiScalar, f"__{_name}__", _comparison(f"NkiScalar.{_name}", getattr(_operators, _name)))
for _name in ("truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift"):
    setattr(NkiScalar, f"__{_name}__", _refused(f"NkiScalar.{_name}"))
    setattr(NkiScalar, f"__r{_name}__", _refused(f"NkiScalar.{_name}"))
for _name in ("abs", "invert", "pos"):
    setattr(NkiScalar, f"__{_name}__", _refused(f"NkiScalar.{_name}"))
