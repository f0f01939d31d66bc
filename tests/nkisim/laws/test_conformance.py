"""Every public name of NKI 0.6 exists here with the same parameters, order and defaults."""

from __future__ import annotations

import enum
import hashlib
import inspect
import json
from typing import Any

import pytest

from nkisim import coverage, language
from nkisim.isa.tokens import Token

# of the file made from the public stubs of NKI 0.6; the package must not bend it to what it implements
DIGEST = "26945ddf469cf1754d1d72d02b9dc0910aad43ce2821eeaca96ecd4cc360e3c6"
SIGNATURES = json.loads(coverage.SIGNATURES.read_text())
NOT_IN_TEXT = object()


def _functions() -> list[tuple[str, str, list[list[str]]]]:
    found = []
    for module, parts in SIGNATURES["modules"].items():
        found += [(module, name, params) for name, params in parts["functions"].items()]
        for cls, body in parts["classes"].items():
            if "Enum" not in body["bases"]:
                found += [(module, f"{cls}.{m}", p) for m, p in body["methods"].items()]
    return found


def _default(text: str) -> Any:
    """Return the value that a default's text stands for."""
    if text == "...":
        return NOT_IN_TEXT
    if text == "sbuf":
        return language.sbuf
    if text in ("equal", "maximum"):
        return getattr(language, text)
    head, _, member = text.partition(".")
    known = getattr(coverage.isa, head, None)
    if member and known is not None and not head.isdigit():
        return getattr(known, member)
    return text if text in vars(language) else eval(text, {"__builtins__": {}})


@pytest.mark.parametrize(("module", "path", "expected"), _functions(), ids=lambda v: str(v)[:40])
def test_signature(module: str, path: str, expected: list[list[str]]) -> None:
    value = coverage.lookup(module, path)
    names = [n for n, _ in coverage.parameters(value)]
    assert names == [item[0] for item in expected]
    found = inspect.signature(value).parameters
    for item in expected:
        parameter = found[item[0].lstrip("*")]
        if len(item) == 1:
            assert parameter.default is parameter.empty
            continue
        wanted = _default(item[1])
        if wanted is not NOT_IN_TEXT:
            assert parameter.default == wanted, item


def test_enums() -> None:
    for module, parts in SIGNATURES["modules"].items():
        for name, body in parts["classes"].items():
            if "Enum" in body["bases"]:
                cls = coverage.lookup(module, name)
                assert issubclass(cls, enum.Enum)
                assert {m: v.value for m, v in cls.__members__.items()} == {
                    m: eval(v) for m, v in body["members"].items()
                }


def test_nothing_is_missing() -> None:
    result = coverage.report(SIGNATURES)
    assert result["missing"] == []
    assert len(result["implemented"]) > 240


def test_a_missing_name_is_reported() -> None:
    wrong = {"modules": {"nki.isa": {"functions": {"no_such_op": []}, "classes": {}, "constants": []}}}
    assert coverage.report(wrong)["missing"] == ["nki.isa.no_such_op"]


def test_the_signatures_are_the_manuals() -> None:
    assert hashlib.sha256(coverage.SIGNATURES.read_bytes()).hexdigest() == DIGEST


def test_math_names_are_operators_and_functions() -> None:
    assert isinstance(language.add, Token)
    assert callable(language.add)
