"""The nl.* math names: callable as functions, and accepted as op= by nki.isa."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

from nkisim.errors import WrongOperator
from nkisim.isa.activations import UNARY
from nkisim.isa.operators import BINARY, Op
from nkisim.isa.statement import bound_to

_PARAMETERS = {1: "x", 2: "x y"}


class Token:
    """One math name of nki.language."""

    # set by nki.language: how to execute a token on tensors
    run: ClassVar[Callable[..., Any] | None] = None

    def __init__(self, name: str, op: Op | None, parameters: str, doc: str) -> None:
        self.__name__ = self.__qualname__ = name
        self.__module__ = "nki.language"
        self.__doc__ = doc
        self.op = op
        self.__signature__ = _signature(parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = bound_to(repr(self), self.__signature__, args, kwargs)
        run = Token.run
        assert run is not None, "nki.language is not imported"
        return run(self, bound.arguments)

    def __repr__(self) -> str:
        return f"nl.{self.__name__}"


def _signature(parameters: str) -> inspect.Signature:
    result = []
    for item in parameters.split():
        name, _, default = item.partition("=")
        value = {"": inspect.Parameter.empty, "None": None, "False": False}[default]
        result.append(inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=value))
    return inspect.Signature(result)


def _elementwise(op: Op) -> Token:
    names = _PARAMETERS[op.arity]
    return Token(op.name, op, f"{names} dtype=None", f"Element-wise {op.name}.")


# reductions double as operators: nl.max is accepted where nl.maximum is
_REDUCE = {"sum": "add", "max": "maximum", "min": "minimum", "prod": "multiply"}

TOKENS: dict[str, Token] = {
    **{name: _elementwise(op) for name, op in {**UNARY, **BINARY}.items()},
    **{
        name: Token(name, BINARY[op], "x axis dtype=None keepdims=False", f"Reduce by {op}.")
        for name, op in _REDUCE.items()
    },
    "mean": Token("mean", None, "x axis dtype=None keepdims=False", "Mean over free axes."),
    "var": Token("var", None, "x axis dtype=None keepdims=False", "Variance over free axes."),
    "all": Token("all", BINARY["logical_and"], "x axis dtype=None", "All non-zero."),
    "average": Token("average", Op("average", "arith", 2, lambda x, y: (x + y) / 2), "", "Op only."),
    "prelu": Token("prelu", Op("prelu", "activation", 1, lambda x: x), "", "Op only, trn3."),
    "bypass": Token("bypass", Op("bypass", "arith", 2, lambda x, _: x), "", "Op only, trn3."),
}
# numpy functions that older kernels pass as operators
_NUMPY = {"divide": "divide", "multiply": "multiply", "true_divide": "divide", "absolute": "abs"}


def resolve(token: object, who: tuple[str, str]) -> Op:
    """Return the operator of a token.

    Raises:
        WrongOperator: the value is not a math name of nki.language.
    """
    if isinstance(token, Token) and token.op is not None:
        return token.op
    name = getattr(token, "__name__", None)
    if type(token).__module__ == "numpy" and isinstance(name, str):
        name = _NUMPY.get(name, name)
        result = TOKENS.get(name)
        if result is not None and result.op is not None:
            return result.op
    raise WrongOperator(*who, f"is {token!r}", "pass an nl.* operator such as nl.add")
