"""Every public name of NKI 0.6 and 0.7 exists here with the same parameters, order and defaults."""

from __future__ import annotations

import enum
import hashlib
import inspect
import json
from typing import Any

import pytest

from nkisim import coverage, language

# of the files made from the public stubs and pages; the package must not bend them to what it implements
DIGESTS = {
    "0.6": "26945ddf469cf1754d1d72d02b9dc0910aad43ce2821eeaca96ecd4cc360e3c6",
    "0.7": "988e79500ff2287d59efb34291ce44d8a61fe9dec3808a5ee977ea7c46f40a33",
}
SIGNATURES = {version: json.loads(path.read_text()) for version, path in coverage.SIGNATURES.items()}
NOT_IN_TEXT = object()


def _functions(version: str) -> dict[tuple[str, str], list[list[str]]]:
    result = {}
    for module, parts in SIGNATURES[version]["modules"].items():
        result |= {(module, name): params for name, params in parts["functions"].items()}
        for cls, body in parts["classes"].items():
            if "Enum" not in body["bases"]:
                result |= {(module, f"{cls}.{m}"): p for m, p in body["methods"].items()}
    return result


FUNCTIONS = {version: _functions(version) for version in SIGNATURES}
# one function serves both versions: these parameters came with 0.7, and 0.6 refuses them
NEWER = {
    key: [item[0] for item in expected if item not in FUNCTIONS["0.6"].get(key, expected)]
    for key, expected in FUNCTIONS["0.7"].items()
}
CASES = [(version, *key, expected) for version, all_ in FUNCTIONS.items() for key, expected in all_.items()]


def _default(text: str) -> Any:
    """Return the value of a default's text."""
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


@pytest.mark.parametrize(("version", "module", "path", "expected"), CASES, ids=lambda v: str(v)[:40])
def test_signature(version: str, module: str, path: str, expected: list[list[str]]) -> None:
    value = coverage.lookup(module, path)
    newer = NEWER.get((module, path), []) if version == "0.6" else []
    names = [n for n, _ in coverage.parameters(value) if n not in newer]
    assert names == [item[0] for item in expected]
    result = inspect.signature(value).parameters
    for item in expected:
        parameter = result[item[0].lstrip("*")]
        if len(item) == 1:
            assert parameter.default is parameter.empty
            continue
        wanted = _default(item[1])
        if wanted is not NOT_IN_TEXT:
            assert parameter.default == wanted, item


@pytest.mark.parametrize("version", SIGNATURES)
def test_enums(version: str) -> None:
    for module, parts in SIGNATURES[version]["modules"].items():
        for name, body in parts["classes"].items():
            if "Enum" in body["bases"]:
                cls = coverage.lookup(module, name)
                assert issubclass(cls, enum.Enum)
                expected = {m: eval(v) for m, v in body["members"].items()}
                result = {m: v.value if expected.get(m) is not ... else ... for m, v in cls.__members__.items()}
                assert result == expected


def test_nothing_is_missing() -> None:
    results = {version: coverage.report(signatures) for version, signatures in SIGNATURES.items()}
    assert [version for version, result in results.items() if result["missing"]] == []
    assert {version: len(result["implemented"]) for version, result in results.items()} == {"0.6": 253, "0.7": 320}


def test_a_missing_name_is_reported() -> None:
    wrong = {"modules": {"nki.isa": {"functions": {"no_such_op": []}, "classes": {}, "constants": []}}}
    assert coverage.report(wrong)["missing"] == ["nki.isa.no_such_op"]


@pytest.mark.parametrize("version", SIGNATURES)
def test_the_signatures_are_the_manuals(version: str) -> None:
    assert hashlib.sha256(coverage.SIGNATURES[version].read_bytes()).hexdigest() == DIGESTS[version]


def test_every_name_that_0_7_changed_has_its_page() -> None:
    for key, expected in FUNCTIONS["0.7"].items():
        module, name = key[0], key[1].split(".")[0]
        if FUNCTIONS["0.6"].get(key) != expected:
            assert SIGNATURES["0.7"]["pages"][f"{module}.{name}"].startswith(("v2.33", "latest")), key
    assert {key for key in FUNCTIONS["0.6"] if key not in FUNCTIONS["0.7"]} == {("nki.language", "dynamic_range")}
