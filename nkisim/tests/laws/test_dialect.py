"""Every rule of the dialect, once broken and once followed, in both versions of the language."""

from __future__ import annotations

from pathlib import Path

import pytest

from nkisim.dialect.loops import RULES
from nkisim.dialect.rules import Rule
from nkisim.lint import Finding, lint, main
from nkisim.versions import VERSIONS

# text under lint, which nothing imports
HEAD = """
import math, nki, nki.isa as nisa, nki.language as nl, numpy as np, neuronxcc.nki.language as old
from dataclasses import dataclass
from enum import Enum
"""

TILE = "t = nl.ndarray((128, 4), dtype=nl.float32)"
# rule -> (broken, followed); lines of the body of a kernel with parameters a (a tensor) and n
BODIES: dict[str, tuple[str, str]] = {
    "is": ("n is True", "n == True"),
    "is-none": ("x = n is None", "x = n == None"),
    "loop-target": ("for i, j in ((1, 2),): print(i)", "for p in ((1, 2),): i, j = p"),
    "loop-else": ("for i in range(2): print(i)\nelse: print(n)", "for i in range(2): print(i)"),
    "format-spec": ("print(f'{n:03d}')", "print(f'{n} {n!r} {n=}')"),
    "keyword-only": ("def f(x, *, y=1): return y", "def f(x, y=1): return y"),
    "positional-only": ("def f(x, /): return x", "def f(x): return x"),
    "varargs": ("def f(*x): return x", "def f(x): return x"),
    "kwargs": ("def f(**x): return 1", "def f(x): return 1"),
    "starred": ("print(*(1, 2))", "print(1, 2)"),
    "keyword-expansion": ("print(**{'sep': ''})", "print(n, n)"),
    "lambda": ("f = lambda x: x", "def f(x): return x"),
    "comprehension": ("x = [i for i in range(3)]", "x = []\nfor i in range(3): x.append(i)"),
    "try": ("try: print(n)\nexcept ValueError: print(1)", "if n > 1: print(n)"),
    "raise": ("raise ValueError('n')", "assert n > 0, 'n'"),
    "with": ("with open('f') as f: print(f)", "with nl.no_reorder(): print(n)"),
    "import": ("import os", "print(math.pi)"),
    "del": ("x = 1\ndel x", "x = 1"),
    "global": ("global G\nG = 1", "g = 1"),
    "async": ("async def f(): return 1", "def f(): return 1"),
    "yield": ("def f(): yield 1", "def f(): return (1,)"),
    "walrus": ("if (x := n) > 1: print(x)", "x = n\nif x > 1: print(x)"),
    "match": ("match n:\n    case 1: print(n)", "if n == 1: print(n)"),
    "set": ("x = {1, 2}", "x = (1, 2)"),
    "value-type": ("x = b'a'", "x = 'a'"),
    "dict-key": ("x = {1: 2}", "x = {'1': 2}"),
    "unpack-target": ("x = [0, 1]\nx[0], y = 1, 2", "x = [0, 1]\ny, z = 1, 2\nx[0] = y"),
    "chained-mutation": ("x = [0, 1]\nx[0] = x[1] = 2", "x = [0, 1]\ny = x[0] = 2"),
    "nested-class": ("class C(nl.NKIObject): pass", "x = (1, 2)"),
    "matmul-operator": ("x = n @ n", "x = n * n"),
    "tensor-operator": (f"{TILE}\nu = t[:, 0:2] + 1", f"{TILE}\nu = t.shape[0] + 1"),
    "store-call": (f"{TILE}\nt[...] = nisa.tensor_copy(a)", f"{TILE}\nnisa.tensor_copy(dst=t, src=a)"),
    "store-value": (f"{TILE}\nt[:, 0] = 0", "t = [0, 1]\nt[0] = 2"),
    "builtin": ("for i in enumerate((1, 2)): print(i)", "for i in range(len((1, 2))): print(i)"),
    "math": ("x = math.prod((1, 2))", "x = math.ceil(n / 2)"),
    "method": ("x = [2, 1]\nx.sort()", "x = [2, 1]\nx.reverse()"),
    "string-buffer": (
        "t = nl.ndarray((128, 4), nl.float32, buffer='sbuf')",
        "t = nl.ndarray((128, 4), nl.float32, buffer=nl.sbuf)",
    ),
    "raw-enum": (
        "nisa.dma_copy(dst=a, src=a, dge_mode=2)",
        "nisa.dma_copy(dst=a, src=a, dge_mode=nisa.dge_mode.hwdge)",
    ),
    "removed-keyword": ("nisa.tensor_copy(dst=a, src=a, mask=n)", "nisa.tensor_copy(dst=a, src=a)"),
    "removed-name": ("x = nl.arange(128)", "x = nl.ds(0, 128)"),
    "newer-name": ("x = nisa.scalar_load(src=a)", "x = nisa.register_alloc(1)\nnisa.register_load(x, a)"),
    "scalar-operator": ("x = nisa.scalar_load(src=a)\ny = x // 2", "x = nisa.scalar_load(src=a)\ny = 2 * x - n"),
    "call": ("nisa.tensor_copy(dst=a, src=a, dtype=n)", "nisa.tensor_copy(a, src=a, name='copy')"),
    "old-namespace": ("x = old.float32", "x = nl.float32"),
    "private-output": (
        "t = nl.ndarray((128, 4), nl.float32, buffer=nl.hbm)\nreturn t",
        "t = nl.ndarray((128, 4), nl.float32, buffer=nl.shared_hbm)\nreturn t",
    ),
    "register-condition": (
        "r = nisa.register_alloc(1)\nif r: print(n)",
        "r = nisa.register_alloc(1)\nif n: nisa.register_load(r, a)",
    ),
    "dynamic-loop": ("for i in nl.dynamic_range(n): print(n)", "for i in nl.affine_range(n): print(n)"),
    "leaves-loop": (
        "for i in nl.dynamic_range(n):\n    if n: break",
        "for i in nl.dynamic_range(n):\n    for j in range(3):\n        if n: break",
    ),
    "fori-return": ("def f(i): return 1\nnl.fori_loop(0, n, f)", "def f(i): print(n)\nnl.fori_loop(0, n, f)"),
    "while-return": ("def f(r): print(n)\nnl.while_loop(n, f)", "def f(r): return r\nnl.while_loop(n, f)"),
    "loop-variable": (
        "def f(i): print(a[i // 128])\nnl.fori_loop(0, n, f)",
        "def f(i): print(a.ap([[1, 1]], scalar_offset=i))\nnl.fori_loop(0, n, f)",
    ),
    "open-chains": (
        "for t in range(n):\n    for j in range(4): nisa.nc_matmul(a[:, j], a, a, accumulate=t > 0)",
        "for j in range(4):\n    for t in range(n): nisa.nc_matmul(a[:, j], a, a, accumulate=t > 0)",
    ),
    "loop-in-no-reorder": (
        "def f(i): print(n)\nwith nl.no_reorder(): nl.fori_loop(0, n, f)",
        "def f(i): print(n)\nwith nl.no_reorder(): f(1)\nnl.fori_loop(0, n, f)",
    ),
}

# rule -> (broken, followed); complete files after the imports
FILES: dict[str, tuple[str, str]] = {
    "decorator": ("@nki.jit\n@print\ndef k(a): return a", "@nki.jit\ndef k(a): return a"),
    "jit-target": ("@nki.jit(platform_target='trn2')\ndef k(a): return a", "@nki.jit()\ndef k(a): return a"),
    "jit-mode": ("@nki.jit(mode='trace')\ndef k(a): return a", "@nki.jit()\ndef k(a): return a"),
    "class-base": (
        "class C: x = 1\n@nki.jit\ndef k(a): return C()",
        "@dataclass\nclass C(nl.NKIObject): x: int = 1\nclass E(Enum): y = 1\n@nki.jit\ndef k(a): return C(), E.y",
    ),
    "list-argument": ("@nki.jit\ndef k(a, b=[1]): return a", "@nki.jit\ndef k(a, b=(1,)): return a"),
    "kernel-in-kernel": (
        "@nki.jit\ndef f(a): return a\n@nki.jit\ndef k(a): return f(a)",
        "def f(a): return a\n@nki.jit\ndef k(a): return f(a)",
    ),
}


def findings(tmp_path: Path, text: str, nki: str = "0.6") -> list[Finding]:
    path = tmp_path / "kernels.py"
    path.write_text(HEAD + text, encoding="utf-8")
    return lint([path], nki)[0]


def body(lines: str) -> str:
    indented = "\n".join("    " + line for line in lines.splitlines())
    return f"@nki.jit\ndef k(a: nl.ndarray, n):\n{indented}\n"


CASES = {**{r: tuple(map(body, pair)) for r, pair in BODIES.items()}, **FILES}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_rule_refuses_and_allows(rule: Rule, tmp_path: Path) -> None:
    # the file is parsed once per path
    broken, remaining = tmp_path / "broken", tmp_path / "remaining"
    broken.mkdir()
    remaining.mkdir()
    for version in VERSIONS:
        result = {f.severity for f in findings(broken, CASES[rule.name][0], version) if f.rule == rule.name}
        assert result == {rule.at(version)} - {None}
        assert rule.name not in {f.rule for f in findings(remaining, CASES[rule.name][1], version)}


def test_every_rule_has_its_pair() -> None:
    assert {rule.name for rule in RULES} == set(CASES)
    assert len({rule.name for rule in RULES}) == len(RULES)


def test_finding_names_file_line_and_the_accepted_way(tmp_path: Path) -> None:
    (result,) = findings(tmp_path, body("x = 1\nf = lambda y: y"))
    line = HEAD.count("\n") + 4
    assert str(result).endswith(
        f"kernels.py:{line}:9: error: lambda is not compiled; define a function [lambda; PF; in k]"
    )


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        ("nisa.tensor_copy(dst=a, src=a, dtype=n)", "isa.tensor_copy has no argument 'dtype'"),
        ("nisa.tensor_tensor(a, data1=a, op=nl.add)", "isa.tensor_tensor needs 'data2'"),
        ("nisa.tensor_copy(a, a, a, a, a)", "isa.tensor_copy has 5 arguments without a name"),
        ("nl.load(a, foo=1)", "language.load has no argument 'foo'"),
        ("nl.add(a)", "language.add needs 'y'"),
    ],
)
def test_a_call_is_checked_by_the_manual_s_signature(call: str, fault: str, tmp_path: Path) -> None:
    (finding,) = findings(tmp_path, body(call))
    assert (finding.rule, finding.severity) == ("call", "error")
    assert finding.message.startswith(f"{fault}; its arguments are ")


def test_two_findings_of_a_line_have_two_columns(tmp_path: Path) -> None:
    printed = [str(finding) for finding in findings(tmp_path, body("f = [lambda y: y, lambda y: y]"))]
    assert len(set(printed)) == len(printed) == 2


# what Python runs in 0.7 and the parser of 0.6 refuses, and the other way round
PYTHON = "f = lambda y, *z, **w: [y for y in range(n) if y is not None]\nx = sum(f(n))\nraise ValueError(f'{x:03d}')"
DEVICE = "r = nisa.register_alloc(1)\nfor i in nl.dynamic_range(n): print(i)\nif r: print(n)"


def test_the_rules_of_a_version(tmp_path: Path) -> None:
    assert {"lambda", "comprehension", "is-none", "raise"} <= {f.rule for f in findings(tmp_path, body(PYTHON))}
    assert not findings(tmp_path, body(PYTHON), "0.7")
    (tmp_path / "device").mkdir()
    result = {f.rule: f.severity for f in findings(tmp_path / "device", body(DEVICE), "0.7")}
    assert result == {"dynamic-loop": "error", "register-condition": "error"}


def test_a_file_that_is_not_python_is_a_sentence_and_the_others_are_checked(tmp_path: Path) -> None:
    (tmp_path / "binary.py").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "good.py").write_text(f"{HEAD}{body('return eval(n)')}")
    result, count = lint([tmp_path])
    assert (count, sorted(f.rule for f in result)) == (1, ["builtin", "syntax", "syntax"])
    assert "is not Python" in str(next(f for f in result if f.path.endswith("broken.py")))


def test_an_inner_kernel_may_return_private_tensors(tmp_path: Path) -> None:
    inside = "@nki.jit\ndef inner(x):\n    t = nl.ndarray((8, 8), nl.float32, nl.sbuf)\n    return t"
    result = findings(tmp_path, f"{inside}\n@nki.jit\ndef outer(x): return inner(x)")
    assert [finding.rule for finding in result] == ["kernel-in-kernel"]
    assert [main([str(tmp_path), *more]) for more in ([], ["--policy", "vendor"])] == [1, 0]
