"""Inputs of a kernel in words: `x=float32:128x512:large:7`, or a Python literal such as `eps=1e-6`.

An array is DTYPE:SHAPE[:VALUES][:SEED]; the same words always make the same array.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from nkisim.dtypes import INFO, Array

# values that a kernel meets in addition to ordinary numbers; integers stay as they are
HOSTILE = ("large", "tiny", "nan", "equal")
VALUES = ("normal", *HOSTILE, "zeros", "ones", "arange")
DTYPES = tuple(name for name, info in INFO.items() if info.kind != "packed" and name != "tfloat32")
_ARRAY = re.compile(r"(?P<dtype>\w+):(?P<shape>\d+(?:x\d+)*)(?::(?P<values>[a-z]\w*))?(?::(?P<seed>\d+))?")
_BELOW = re.compile(r"below(\d+)")


class BadInputWord(ValueError):
    """A word is neither an array nor a literal."""


@dataclass(frozen=True, slots=True)
class ArrayInput:
    """An array that its words determine.

    Attributes:
        values: normal numbers (integers: below 8); `large` and `tiny` times a factor whose square the dtype holds,
            `nan` with one NaN in the middle, `equal` one random number everywhere, `belowN` integers below N.
    """

    dtype: str
    shape: tuple[int, ...]
    values: str = "normal"
    seed: int = 0

    def __post_init__(self) -> None:
        below = _BELOW.fullmatch(self.values)
        if self.dtype not in DTYPES:
            raise BadInputWord(f"an array cannot be of dtype {self.dtype!r}; it can be {', '.join(DTYPES)}")
        if (below and not int(below[1])) or not (below or self.values in VALUES):
            raise BadInputWord(f"an array cannot hold {self.values!r}; it can hold {', '.join(VALUES)}, below16")

    def array(self) -> Array:
        """Make it."""
        random = np.random.default_rng(self.seed)
        below, info = _BELOW.fullmatch(self.values), INFO[self.dtype]
        storage = np.dtype(bool) if self.dtype == "bool" else info.storage
        if self.values in ("zeros", "ones"):
            return np.full(self.shape, float(self.values == "ones")).astype(storage)
        if self.values == "arange":
            return np.arange(math.prod(self.shape)).reshape(self.shape).astype(storage)
        if below or info.kind == "int":
            top = int(below[1]) if below else 2 if self.dtype == "bool" else 8
            return random.integers(0, top, self.shape).astype(storage)
        numbers = random.standard_normal(self.shape) * self._scale()
        if self.values == "equal":
            numbers[...] = numbers.flat[0]
        if self.values == "nan":
            numbers.flat[numbers.size // 2] = np.nan
        return numbers.astype(storage)

    def _scale(self) -> float:
        """A factor that keeps squares inside of the dtype."""
        limits = ml_dtypes.finfo(INFO[self.dtype].storage)
        return {
            "large": math.sqrt(float(limits.max)) / 16,
            "tiny": math.sqrt(float(limits.smallest_normal)) * 16,
        }.get(self.values, 1.0)


def read(word: str, seed: int = 0) -> tuple[str | None, Any]:
    """A word as (name or None, ArrayInput or literal); `seed` is for an array that names none.

    Raises:
        BadInputWord: the word is neither.
    """
    name, equals, rest = word.partition("=")
    if not equals or not name.isidentifier():
        name, rest = "", word
    match = _ARRAY.fullmatch(rest)
    if match:
        shape = tuple(int(size) for size in match["shape"].split("x"))
        values, seed_word = match["values"] or "normal", match["seed"]
        return name or None, ArrayInput(match["dtype"], shape, values, seed if seed_word is None else int(seed_word))
    try:
        return name or None, ast.literal_eval(rest)
    except (ValueError, SyntaxError):
        allowed = "write DTYPE:SHAPE[:VALUES][:SEED] such as float32:128x512:large:7, or a Python literal"
        raise BadInputWord(f"the argument {word!r} is neither an array nor a literal; {allowed}") from None


def arguments(words: Sequence[str], seed: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and named arguments; an array without a seed takes `seed` plus its position."""
    pairs = [read(word, seed + position) for position, word in enumerate(words)]
    named = {name: value for name, value in pairs if name}
    if len(named) < sum(1 for name, _ in pairs if name):
        raise BadInputWord(f"an argument is named twice in {' '.join(words)}; name each once")
    return tuple(value for name, value in pairs if not name), named


def filled(value: Any, values: str | None = None) -> Any:
    """The array of an ArrayInput, tuples entered; with `values`, float arrays hold those instead."""
    if isinstance(value, tuple):
        return tuple(filled(item, values) for item in value)
    if not isinstance(value, ArrayInput):
        return value
    return (replace(value, values=values) if values and INFO[value.dtype].kind == "float" else value).array()
