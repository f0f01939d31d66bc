"""nkisim as if it were another package, whose functions refuse those of nkisim."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import nkisim
import nkisim.isa as nisa
import nkisim.language as nl

Function = Callable[..., Any]


def package(**replaced: Function) -> Any:
    """Return the other package; `replaced` are instructions that it has instead of nkisim's."""
    ours: dict[int, Function] = {}
    others: dict[int, tuple[Function, Function]] = {}

    def given(value: Any) -> Any:
        """An argument as nkisim's function takes it."""
        if id(value) in ours:
            raise TypeError(f"{value.__name__} is a function of nkisim, not of the other package")
        if isinstance(value, (tuple, list)):
            return type(value)(map(given, value))
        return others[id(value)][1] if id(value) in others else value

    def other(function: Function) -> Function:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*map(given, args), **{name: given(value) for name, value in kwargs.items()})

        ours[id(function)], others[id(call)] = function, (call, function)
        return call

    def module(source: ModuleType, more: dict[str, Function]) -> SimpleNamespace:
        public = {name: value for name, value in vars(source).items() if not name.startswith("_")}
        functions = {name: value for name, value in public.items() if callable(value) and not isinstance(value, type)}
        return SimpleNamespace(**{**public, **{name: other(value) for name, value in functions.items()}, **more})

    isa, language = module(nisa, replaced), module(nl, {})
    return SimpleNamespace(isa=isa, language=language, jit=nkisim.jit, simulate=nkisim.simulate)
