"""Strict validation of JSON: reads an object into a frozen dataclass, or raises ValidationError for the first error.

Fields have plain type hints; `Annotated` adds a `Range`, a `Length` or a `Text`. A bool is not accepted as a number,
nor 7.0 as an integer. Fields without a default are required, unknown fields are rejected.
"""

import dataclasses
import functools
import re
import types
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


class ValidationError(ValueError):
    """A clause that names the field, its value and what was expected."""


@dataclass(frozen=True)
class Range:
    """Inclusive bounds of a number, which is a multiple of `step`."""

    low: float
    high: float
    step: int = 1


@dataclass(frozen=True)
class Length:
    """Inclusive bounds of the number of entries of a list or an object."""

    min: int
    max: int


@dataclass(frozen=True)
class Text:
    """A regular expression that a string matches completely, and its description in errors."""

    pattern: str
    expected: str


# a character of a string: no control characters, line separators or surrogates
PRINTABLE = r"[^\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]"
_LINE = Text(PRINTABLE + "{0,4096}", "a line of text")


def read(cls: type[T], value: Any, at: str = "") -> T:
    """Reads a dataclass from a parsed JSON object at path `at`; ValidationError names the first invalid field."""
    return _read(cls, value, at, ())


def shown(value: Any) -> str:
    """A value as at most 60 printable characters, for errors."""
    text = ascii(value) if isinstance(value, (str, int, float, bool, type(None))) else f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:50]}..."


def _expect(holds: bool, value: Any, at: str, expected: str) -> None:
    if not holds:
        raise ValidationError(f"{at or 'it'} is {shown(value)}, expected {expected}")


@functools.cache
def _fields(cls: Any) -> dict[str, tuple[Any, bool]]:
    hints, none = get_type_hints(cls, include_extras=True), dataclasses.MISSING
    fields = dataclasses.fields(cls)
    return {f.name: (hints[f.name], f.default is none and f.default_factory is none) for f in fields}


def _read(kind: Any, value: Any, at: str, rules: tuple[Any, ...]) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _read(inner[0], value, at, (*rules, *inner[1:]))
    if origin in (Union, types.UnionType):
        (only,) = (i for i in inner if i is not type(None))
        return None if value is None else _read(only, value, at, rules)
    if origin is Literal:
        same = any(type(value) is type(choice) and value == choice for choice in inner)
        _expect(same, value, at, "one of " + ", ".join(map(str, inner)) if len(inner) > 1 else repr(inner[0]))
        return value
    length = next((r for r in rules if isinstance(r, Length)), Length(0, 64))
    if origin is tuple:
        fits = isinstance(value, list) and length.min <= len(value) <= length.max
        _expect(fits, value, at, f"a list of {length.min} to {length.max}")
        return tuple(_read(inner[0], item, f"{at}[{i}]", rules) for i, item in enumerate(value))
    if origin is dict:
        fits = isinstance(value, dict) and length.min <= len(value) <= length.max
        _expect(fits, value, at, f"an object of at most {length.max} entries")
        names = {key: _read(inner[0], key, f"a name in {at}", ()) for key in value}
        return {name: _read(inner[1], value[key], _below(at, key), rules) for key, name in names.items()}
    return _record(kind, value, at) if dataclasses.is_dataclass(kind) else _scalar(kind, value, at, rules)


def _below(at: str, name: Any) -> str:
    return f"{at}.{shown(name)[1:-1]}" if at else shown(name)[1:-1]


def _record(cls: Any, value: Any, at: str) -> Any:
    _expect(isinstance(value, dict), value, at, "an object")
    prefix, fields = f"{at}." if at else "", _fields(cls)
    for name, (_, required) in fields.items():
        if required and name not in value:
            raise ValidationError(f"{prefix}{name} is missing")
    for name in value:
        if name not in fields:
            raise ValidationError(f"{_below(at, name)} is not a field; the fields are {', '.join(fields)}")
    return cls(**{name: _read(fields[name][0], item, prefix + name, ()) for name, item in value.items()})


def _scalar(kind: Any, value: Any, at: str, rules: tuple[Any, ...]) -> Any:
    if kind is bool:
        _expect(type(value) is bool, value, at, "true or false")
        return value
    if kind is str:
        text = next((r for r in rules if isinstance(r, Text)), _LINE)
        _expect(isinstance(value, str) and bool(re.fullmatch(text.pattern, value)), value, at, text.expected)
        return value
    numbers = {int: (int,), float: (int, float)}[kind]
    bounds = next((r for r in rules if isinstance(r, Range)), Range(0, 1 << 53))
    what = f"a multiple of {bounds.step}" if bounds.step > 1 else "a whole number" if kind is int else "a number"
    fits = (
        type(value) in numbers and bounds.low <= value <= bounds.high and (bounds.step == 1 or value % bounds.step == 0)
    )
    _expect(fits, value, at, f"{what} from {bounds.low:g} to {bounds.high:g}")
    return kind(value)
