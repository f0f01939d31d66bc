"""The refusals of the NKI compiler, one Rule per law; `nkisim.lint` applies them to kernels.

Severity "error" is code that the manual or the public parser front end refuses; "warning" is code that is
deprecated, or that published kernels contain although a document forbids it. Sources: LG language
guide, MG migration guides, VR the VirtualRegister docstring, PF the public parser front end, NS the page of NkiScalar,
SG the signatures of the API pages, KI foxl-ai/kiln (tools/probe_psum_interleave.py, on a trn1).
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nkisim.dialect.source import Module
from nkisim.versions import VERSIONS

ERROR, WARNING = "error", "warning"


@dataclass
class Scope:
    """The facts for a test about the function that a node is in."""

    module: Module
    is_kernel: bool = False
    # False while a class statement itself is judged
    in_function: bool = True
    # Python runs the kernel: 0.7
    traced: bool = False
    tensors: frozenset[str] = frozenset()
    # names that hold a register or a scalar of the device
    registers: frozenset[str] = frozenset()
    scalars: frozenset[str] = frozenset()
    lists: frozenset[str] = frozenset()
    dicts: frozenset[str] = frozenset()
    bound: frozenset[str] = frozenset()
    # names whose every assignment allocates outside shared_hbm
    private_outputs: frozenset[str] = frozenset()
    functions: dict[str, ast.FunctionDef] = field(default_factory=dict)

    def dotted(self, node: ast.AST) -> str:
        """Absolute dotted name of a name or attribute chain, "" if it is neither."""
        if isinstance(node, ast.Name) and node.id in self.bound:
            return node.id
        return self.module.dotted(node) or ""


def words(text: str) -> frozenset[str]:
    """A set of names, written as one line."""
    return frozenset(text.split())


# the node is of one of the rule's kinds; a text says more than the rule's message
Test = Callable[[Any, Scope], bool | str]


@dataclass(frozen=True, slots=True)
class Rule:
    """One law: which nodes it looks at, when it is broken, and how to write it instead."""

    name: str
    nodes: tuple[type[ast.AST], ...]
    test: Test
    message: str
    source: str
    # in 0.6 and in 0.7; None: that version accepts it
    severity: str | None = ERROR
    traced: str | None = ERROR

    def at(self, version: str) -> str | None:
        """The severity in a version of the language."""
        return self.severity if version == VERSIONS[0] else self.traced


def always(_node: ast.AST, _scope: Scope) -> bool:
    """The construct has no accepted form."""
    return True


def is_none(node: ast.AST) -> bool:
    """The constant None."""
    return isinstance(node, ast.Constant) and node.value is None


def _identity(node: ast.Compare) -> bool:
    return any(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops)


def identity_with_none(node: ast.Compare, _scope: Scope) -> bool:
    """`x is None`."""
    return _identity(node) and is_none(node.comparators[-1])


def identity(node: ast.Compare, scope: Scope) -> bool:
    """`x is y`."""
    return _identity(node) and not identity_with_none(node, scope)


def compound_target(node: ast.For, _scope: Scope) -> bool:
    """A loop variable that is not one name."""
    return not isinstance(node.target, ast.Name)


def has_else(node: ast.For | ast.While, _scope: Scope) -> bool:
    """A loop with an else part."""
    return bool(node.orelse)


def format_spec(node: ast.FormattedValue, _scope: Scope) -> bool:
    """`f"{x:03d}"`."""
    return node.format_spec is not None


def keyword_only(node: ast.FunctionDef, _scope: Scope) -> bool:
    """`def f(x, *, flag)`."""
    return bool(node.args.kwonlyargs) and node.args.vararg is None


def positional_only(node: ast.FunctionDef, _scope: Scope) -> bool:
    """`def f(x, /)`."""
    return bool(node.args.posonlyargs)


def varargs(node: ast.FunctionDef, _scope: Scope) -> bool:
    """`def f(*args)`."""
    return node.args.vararg is not None


def kwargs(node: ast.FunctionDef, _scope: Scope) -> bool:
    """`def f(**options)`."""
    return node.args.kwarg is not None


def keyword_expansion(node: ast.Call, _scope: Scope) -> bool:
    """`f(**options)`."""
    return any(k.arg is None for k in node.keywords)


def other_with(node: ast.With, scope: Scope) -> bool:
    """A with statement that is not nl.no_reorder()."""
    calls = [item.context_expr for item in node.items]
    names = [scope.dotted(c.func) if isinstance(c, ast.Call) else "" for c in calls]
    return any(not name.endswith("no_reorder") for name in names)


def _mutating(target: ast.AST) -> bool:
    return isinstance(target, (ast.Attribute, ast.Subscript))


def unpack_into_place(node: ast.Assign, _scope: Scope) -> bool:
    """`obj.a, x[0] = f()`."""
    groups = [t for t in node.targets if isinstance(t, (ast.Tuple, ast.List))]
    return any(_mutating(part) for group in groups for part in ast.walk(group))


def chained_mutation(node: ast.Assign, _scope: Scope) -> bool:
    """`obj.a = obj.b = value`."""
    return sum(map(_mutating, node.targets)) > 1


def value_type(node: ast.Constant, _scope: Scope) -> bool:
    """A constant of a type that kernels do not have."""
    return isinstance(node.value, (bytes, complex))


def dict_key(node: ast.Dict, _scope: Scope) -> bool:
    """A dictionary display with a key that is certainly no string."""
    return any(
        key is None
        or isinstance(key, (ast.Tuple, ast.BinOp))
        or (isinstance(key, ast.Constant) and not isinstance(key.value, str))
        for key in node.keys
    )


def nested_class(_node: ast.ClassDef, scope: Scope) -> bool:
    """A class statement inside a function."""
    return scope.in_function


SYNTAX_RULES: tuple[Rule, ...] = (
    Rule("is", (ast.Compare,), identity,
         "`is` and `is not` are not compiled; write == or !=", "MG 0.3"),
    Rule("is-none", (ast.Compare,), identity_with_none,
         "the 0.3 guide refuses `is None`, which published kernels use; write == None or != None",
         "MG 0.3", WARNING),
    Rule("loop-target", (ast.For,), compound_target,
         "a loop variable must be one name; unpack it in the loop's first line", "PF"),
    Rule("loop-else", (ast.For, ast.While), has_else,
         "a loop has no else part; set a flag in the loop and test it afterwards", "PF"),
    Rule("format-spec", (ast.FormattedValue,), format_spec,
         "a format specification in an f-string is dropped; write {value} only", "PF", WARNING),
    Rule("keyword-only", (ast.FunctionDef,), keyword_only,
         "the `*` separator is not accepted; make them parameters with defaults", "MG 0.3"),
    Rule("positional-only", (ast.FunctionDef,), positional_only,
         "the `/` separator is not accepted; make them ordinary parameters", "PF", WARNING),
    Rule("varargs", (ast.FunctionDef,), varargs,
         "*args is not accepted; pass one tuple", "PF"),
    Rule("kwargs", (ast.FunctionDef,), kwargs,
         "**kwargs stays empty in a kernel; name the parameters", "PF", WARNING),
    Rule("starred", (ast.Starred,), always,
         "`*x` is not expanded, in calls, displays or assignments; write the elements out", "PF"),
    Rule("keyword-expansion", (ast.Call,), keyword_expansion,
         "`**x` is not expanded in a call; write the keywords out", "PF"),
    Rule("lambda", (ast.Lambda,), always, "lambda is not compiled; define a function", "PF"),
    Rule("comprehension", (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp), always,
         "comprehensions are not compiled; append in a for loop", "PF"),
    Rule("try", (ast.Try,), always, "exceptions do not exist in a kernel; test with if", "PF"),
    Rule("raise", (ast.Raise,), always,
         "raise is not compiled; write assert condition, message", "PF"),
    Rule("with", (ast.With,), other_with, "the only context is nl.no_reorder()", "PF"),
    Rule("import", (ast.Import, ast.ImportFrom), always,
         "a kernel cannot import; import at the top of the file", "PF"),
    Rule("del", (ast.Delete,), always, "del is not compiled; let the name go out of use", "PF"),
    Rule("global", (ast.Global, ast.Nonlocal), always,
         "global and nonlocal are not compiled; return the value or keep it in an object", "PF"),
    Rule("async", (ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith, ast.Await), always,
         "async is not compiled; order comes from data dependence and depends_on", "PF"),
    Rule("yield", (ast.Yield, ast.YieldFrom), always,
         "generators are not compiled; return a list", "PF"),
    Rule("walrus", (ast.NamedExpr,), always, "`:=` is not compiled; assign in a statement", "PF"),
    Rule("match", (ast.Match,), always, "match is not compiled; write if and elif", "PF"),
    Rule("set", (ast.Set,), always, "sets do not exist in a kernel; use a tuple or a list", "LG"),
    Rule("value-type", (ast.Constant,), value_type,
         "a value is None, bool, int, float, str or a tensor; bytes and complex are not", "LG"),
    Rule("dict-key", (ast.Dict,), dict_key,
         "dictionary keys are strings; use str(key), and no ** in the display", "LG"),
    Rule("unpack-target", (ast.Assign,), unpack_into_place,
         "attributes and elements cannot be targets of an unpacking; unpack to names first", "PF"),
    Rule("chained-mutation", (ast.Assign,), chained_mutation,
         "only one attribute or element per assignment; write two statements", "PF"),
    Rule("nested-class", (ast.ClassDef,), nested_class,
         "a class cannot be defined in a kernel; define it at the top of the file", "PF"),
)  # fmt: skip
