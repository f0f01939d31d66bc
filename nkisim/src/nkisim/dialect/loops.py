"""Rules of the dialect about registers and loops that run on the device."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace

from nkisim.dialect.names import NAME_RULES, SCALAR_OPERATORS, is_register
from nkisim.dialect.rules import SYNTAX_RULES, WARNING, Rule, Scope, is_none, words

LOOP_CALLS = frozenset({"fori_loop", "while_loop"})


def _member(node: ast.AST, scope: Scope) -> str:
    """Last part of a callee's name if it belongs to nki.language."""
    if not isinstance(node, ast.Call):
        return ""
    name = scope.dotted(node.func)
    return name.split(".")[-1] if name.startswith("nki.") else ""


def register_condition(node: ast.If | ast.IfExp | ast.Call, scope: Scope) -> bool:
    """`if reg:`, `reg and x`, `int(reg)`, `range(reg)`."""
    if not isinstance(node, ast.Call):
        return any(is_register(part, scope) for part in ast.walk(node.test))
    converts = isinstance(node.func, ast.Name) and node.func.id in ("int", "bool", "float", "range")
    return converts and any(is_register(a, scope) for a in node.args)


def deprecated_loop(node: ast.AST, scope: Scope) -> bool:
    """`for i in nl.dynamic_range(...)` and `while reg`."""
    if isinstance(node, ast.For):
        return _member(node.iter, scope) == "dynamic_range"
    return isinstance(node, ast.While) and is_register(node.test, scope)


def _leaves(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that leave the loop whose body this is."""
    for statement in body:
        if isinstance(statement, (ast.Return, ast.Break, ast.Continue)):
            yield statement
        elif isinstance(statement, (ast.For, ast.While)):
            inner = list(_leaves(statement.body))
            yield from (s for s in inner if isinstance(s, ast.Return))
        elif isinstance(statement, (ast.If, ast.With)):
            yield from _leaves(statement.body)
            yield from _leaves(getattr(statement, "orelse", []))


def leaves_loop(node: ast.For | ast.While, scope: Scope) -> bool:
    """return, break or continue inside a loop that runs on the device."""
    return deprecated_loop(node, scope) and any(_leaves(node.body))


def _body(node: ast.Call, scope: Scope, loop: str, position: int) -> ast.FunctionDef | None:
    """The function passed as the body of fori_loop or while_loop, if it can be seen."""
    if _member(node, scope) != loop:
        return None
    given = [k.value for k in node.keywords if k.arg == "body_fun"]
    given += node.args[position : position + 1]
    name = given[0].id if given and isinstance(given[0], ast.Name) else ""
    local = scope.functions.get(name)
    if local is not None:
        return local
    known = scope.module.definitions.get(name)
    return known if isinstance(known, ast.FunctionDef) else None


def _returns(body: ast.FunctionDef) -> list[ast.Return]:
    returns = [n for n in ast.walk(body) if isinstance(n, ast.Return)]
    return [r for r in returns if r.value is not None and not is_none(r.value)]


def fori_returns(node: ast.Call, scope: Scope) -> bool:
    """The body of fori_loop returns a value."""
    body = _body(node, scope, "fori_loop", 2)
    return body is not None and bool(_returns(body))


def while_returns_nothing(node: ast.Call, scope: Scope) -> bool:
    """The body of while_loop does not return the next condition."""
    body = _body(node, scope, "while_loop", 1)
    return body is not None and not _returns(body)


def loop_variable_arithmetic(node: ast.Call, scope: Scope) -> bool:
    """Python arithmetic on the loop variable of fori_loop."""
    body = _body(node, scope, "fori_loop", 2)
    if body is None or not body.args.args:
        return False
    name = body.args.args[0].arg
    sums = [n for n in ast.walk(body) if isinstance(n, (ast.BinOp, ast.AugAssign))]
    if scope.traced:
        # there it is an NkiScalar, unless a bound is a register
        sums = [n for n in sums if not isinstance(n.op, SCALAR_OPERATORS)]
    sides = [getattr(n, side, None) for n in sums for side in ("left", "right", "target")]
    return any(isinstance(s, ast.Name) and s.id == name for s in sides)


def loop_in_no_reorder(node: ast.With, scope: Scope) -> bool:
    """A loop that runs on the device inside nl.no_reorder()."""
    if not any(_member(i.context_expr, scope) == "no_reorder" for i in node.items):
        return False
    inner = [n for statement in node.body for n in ast.walk(statement)]
    return any(deprecated_loop(n, scope) or _member(n, scope) in LOOP_CALLS for n in inner)


def _names(node: ast.AST | None) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} if node is not None else set()


def open_chains(node: ast.For, scope: Scope) -> bool:
    """`for j in ...: nc_matmul(dst=psum[:, j], accumulate=t > 0)`: a loop over chains, not over a chain's products."""
    calls = (n for statement in node.body for n in ast.walk(statement) if isinstance(n, ast.Call))
    for call in (n for n in calls if _member(n, scope) == "nc_matmul"):
        given = {k.arg: k.value for k in call.keywords}
        dst, mode = given.get("dst", call.args[0] if call.args else None), _names(given.get("accumulate"))
        parts = isinstance(dst, ast.Subscript) and isinstance(dst.slice, ast.Tuple)
        inner = [n.target for n in ast.walk(node) if isinstance(n, ast.For) and call in ast.walk(n)]
        if parts and mode and _names(node.target) & _names(dst) and not any(mode & _names(n) for n in inner):
            return True
    return False


LOOP_RULES: tuple[Rule, ...] = (
    Rule("register-condition", (ast.If, ast.IfExp, ast.Call), register_condition,
         "a register has no value while the kernel is traced; branch with nl.while_loop, count "
         "with nl.fori_loop", "VR"),
    Rule("dynamic-loop", (ast.For, ast.While), deprecated_loop,
         "dynamic_range and `while register` are deprecated in 0.6 and gone in 0.7; use nl.fori_loop or nl.while_loop",
         "MG 0.6, 0.7", severity=WARNING),
    Rule("leaves-loop", (ast.For, ast.While), leaves_loop,
         "a loop on the device cannot be left early; end it by its bound or its register", "PF"),
    Rule("fori-return", (ast.Call,), fori_returns,
         "the body of nl.fori_loop returns nothing; keep state in SBUF or HBM", "MG 0.6"),
    Rule("while-return", (ast.Call,), while_returns_nothing,
         "the body of nl.while_loop returns the next condition register", "MG 0.6"),
    Rule("loop-variable", (ast.Call,), loop_variable_arithmetic,
         "the loop variable is no number (0.7: it has +, - and *); use it as scalar_offset, the stride multiplies",
         "MG 0.6"),
    Rule("loop-in-no-reorder", (ast.With,), loop_in_no_reorder,
         "a loop on the device cannot stand inside nl.no_reorder(); move the loop out", "MG 0.6"),
    Rule("open-chains", (ast.For,), open_chains,
         "accumulation chains of one PSUM tensor that are open together are reported to lose partial sums; give each a "
         "tensor, or end one before the next", "KI", WARNING, WARNING),
)  # fmt: skip

# rules of the parser only: where Python runs a kernel, these constructs are Python's
PARSED = words(
    "is is-none loop-target loop-else format-spec keyword-only positional-only varargs kwargs starred "
    "keyword-expansion lambda comprehension try raise with import del global yield walrus match set value-type "
    "dict-key unpack-target chained-mutation nested-class builtin math method decorator class-base kernel-in-kernel"
)
RULES: tuple[Rule, ...] = tuple(
    replace(rule, traced=None) if rule.name in PARSED else rule for rule in SYNTAX_RULES + NAME_RULES + LOOP_RULES
)
