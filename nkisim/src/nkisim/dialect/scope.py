"""The meaning of one function's names, as far as its own text says it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from nkisim.dialect.rules import Scope, words
from nkisim.dialect.source import FunctionNode, Module

CREATORS = words(
    "ndarray zeros ones full zeros_like empty_like rand load copy load_transpose2d shared_constant "
    "shared_identity_matrix matmul transpose"
)
TENSOR_TYPES = frozenset({"nki.language.ndarray", "nki.language.NkiTensor", "nki.typing.tensor"})
VIEWS = words(
    "ap reshape permute broadcast expand_dim squeeze_dim reshape_dim flatten_dims rearrange slice "
    "select vector_select view reinterpret_cast"
)
# attributes that only a tensor has
TENSOR_MARKS = frozenset({"ap", "is_contiguous", "get_pattern"})

# a name and the expression assigned to it; None for a value that cannot be seen
Binding = tuple[str, ast.AST | None]


def bindings(function: FunctionNode) -> Iterator[Binding]:
    """Every assignment to a plain name in the function, nested functions included."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from _targets(target, node.value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            yield from _targets(node.target, node.value)
        elif isinstance(node, (ast.For, ast.NamedExpr)):
            yield from _targets(node.target, None)
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            yield from _targets(node.optional_vars, None)
        elif isinstance(node, ast.FunctionDef) and node is not function:
            yield node.name, None


def _targets(target: ast.AST, value: ast.AST | None) -> Iterator[Binding]:
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, (ast.Tuple, ast.List)):
        for part in target.elts:
            yield from _targets(part, None)


def scope_of(module: Module, function: FunctionNode, is_kernel: bool, traced: bool = False) -> Scope:
    """Read the assignments and parameters of a function."""
    values: dict[str, list[ast.AST | None]] = {}
    for name, value in bindings(function):
        values.setdefault(name, []).append(value)
    parameters = [a for n in ast.walk(function) if isinstance(n, ast.arguments) for a in n.args]
    bound = frozenset(values) | {a.arg for a in parameters}
    scope = Scope(
        module,
        is_kernel,
        traced=traced,
        bound=bound,
        lists=_all(values, lambda v: _is_display(v, ast.List, "list")),
        dicts=_all(values, lambda v: _is_display(v, ast.Dict, "dict")),
        registers=_all(values, lambda v: _is_call(module, v, frozenset({"register_alloc", "scalar_load"}))),
        scalars=_all(values, lambda v: _is_call(module, v, frozenset({"scalar_load"}))),
        private_outputs=_all(values, lambda v: _is_private(module, v)),
        functions={n.name: n for n in ast.walk(function) if isinstance(n, ast.FunctionDef)},
    )
    scope.tensors = _tensors(module, function, values, parameters)
    return scope


def _all(values: dict[str, list[ast.AST | None]], test: object) -> frozenset[str]:
    """Names whose every assignment passes the test."""
    assert callable(test)
    return frozenset(name for name, result in values.items() if all(v and test(v) for v in result))


def _is_display(value: ast.AST, display: type[ast.AST], call: str) -> bool:
    return isinstance(value, display) or (
        isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == call
    )


def _is_call(module: Module, value: ast.AST, members: frozenset[str]) -> bool:
    if not isinstance(value, ast.Call):
        return False
    name = module.dotted(value.func) or ""
    return name.startswith(("nki.", "neuronxcc.nki.")) and name.split(".")[-1] in members


def _is_private(module: Module, value: ast.AST) -> bool:
    """An allocation whose buffer is written out and is not shared_hbm."""
    if not (isinstance(value, ast.Call) and _is_call(module, value, frozenset({"ndarray"}))):
        return False
    buffers = [k.value for k in value.keywords if k.arg == "buffer"] + value.args[2:3]
    if not buffers:
        return True
    name = module.dotted(buffers[0]) or ""
    return name.startswith("nki.") and not name.endswith("shared_hbm")


def _tensors(
    module: Module, function: FunctionNode, values: dict[str, list[ast.AST | None]], parameters: list[ast.arg]
) -> frozenset[str]:
    """Names that hold tensors: allocated, annotated or used as one, and views of those."""
    annotated = {a.arg for a in parameters if a.annotation and _is_tensor_type(module, a.annotation)}
    marked = {
        n.value.id
        for n in ast.walk(function)
        if isinstance(n, ast.Attribute) and n.attr in TENSOR_MARKS and isinstance(n.value, ast.Name)
    }
    names = {a.arg for a in parameters}
    tensors = {n for n in annotated | (marked & names) if n not in values}
    while True:
        before = len(tensors)
        tensors |= _created(module, values, frozenset(tensors)) - names
        if len(tensors) == before:
            return frozenset(tensors)


def _created(module: Module, values: dict[str, list[ast.AST | None]], known: frozenset[str]) -> frozenset[str]:
    """Names whose every assignment allocates a tensor or views a known one."""
    return _all(values, lambda v: _is_call(module, v, CREATORS) or _is_view(v, known))


def _is_tensor_type(module: Module, annotation: ast.AST) -> bool:
    base = annotation.value if isinstance(annotation, ast.Subscript) else annotation
    return module.dotted(base) in TENSOR_TYPES


def _is_view(value: ast.AST, tensors: frozenset[str]) -> bool:
    """A name, index or view method of a tensor."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        return value.func.attr in VIEWS and _is_view(value.func.value, tensors)
    if isinstance(value, ast.Subscript):
        return _is_view(value.value, tensors)
    return isinstance(value, ast.Name) and value.id in tensors
