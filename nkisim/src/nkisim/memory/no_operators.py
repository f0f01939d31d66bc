"""Tensors take functions, not Python's operators."""

from __future__ import annotations

from typing import NoReturn

from nkisim.errors import WrongOperator
from nkisim.objects import NKIObject


class NoOperators(NKIObject):
    """An object of the language that refuses arithmetic and comparison in Python."""

    name: str

    def __init__(self) -> None:
        """Hold nothing; a subclass has its own."""


def _no_operator(self: NoOperators, *_other: object) -> NoReturn:
    raise WrongOperator(
        "operator", self.name, "is used with a Python operator", "tensors take nki.isa or nki.language functions"
    )


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or",
              "xor", "lshift", "rshift"):  # fmt: skip
    for _form in (f"__{_name}__", f"__r{_name}__", f"__i{_name}__"):
        setattr(NoOperators, _form, _no_operator)
for _name in ("neg", "pos", "abs", "invert", "lt", "le", "gt", "ge"):
    setattr(NoOperators, f"__{_name}__", _no_operator)
