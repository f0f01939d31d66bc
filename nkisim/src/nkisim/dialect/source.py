"""Kernel source as syntax trees: modules, what names mean, and the code that a kernel reaches."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
Definition = FunctionNode | ast.ClassDef

JIT = frozenset({"nki.jit", "neuronxcc.nki.jit", "nki.simulate"})
# methods that the host calls
HOST_METHODS = frozenset({"__repr__", "__hash__"})
# packages whose source is not part of a kernel's project
FOREIGN = frozenset({"nki", "neuronxcc", "numpy", "torch", "jax", "nkisim"}) | sys.stdlib_module_names


@dataclass(frozen=True, slots=True)
class Imported:
    """The meaning of an imported name: a dotted path, relative by `level`, and maybe a member."""

    dotted: str
    level: int
    member: str | None

    @property
    def full(self) -> str:
        """The absolute dotted name, as far as the import says it."""
        return f"{self.dotted}.{self.member}" if self.member else self.dotted


@dataclass
class Module:
    """One source file: its top-level definitions and imports."""

    path: Path
    tree: ast.Module
    definitions: dict[str, Definition] = field(default_factory=dict)
    imports: dict[str, Imported] = field(default_factory=dict)

    def dotted(self, node: ast.AST) -> str | None:
        """The absolute dotted name of a name or attribute chain, through the imports."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return None
        known = self.imports.get(node.id)
        base = known.full if known else node.id
        return ".".join([base, *reversed(parts)])


class NotPython(ValueError):
    """A file that is not Python: its line and the fault there."""

    def __init__(self, line: int, what: str) -> None:
        super().__init__(f"is not Python ({what})")
        self.line = line


@cache
def load(path: Path) -> Module:
    """Parse a file once.

    Raises:
        NotPython: the file cannot be read as Python.
    """
    try:
        module = Module(path, ast.parse(path.read_text(encoding="utf-8"), str(path)))
    except SyntaxError as error:
        raise NotPython(error.lineno or 1, error.msg) from None
    except ValueError as error:
        raise NotPython(1, str(error)) from None
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.split(".")[0]
                target = alias.name if alias.asname else name
                module.imports[name] = Imported(target, 0, None)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                imported = Imported(node.module or "", node.level, alias.name)
                module.imports[alias.asname or alias.name] = imported
    for node in module.tree.body:
        for statement in _statements(node):
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                module.definitions[statement.name] = statement
    return module


def _statements(node: ast.stmt) -> Iterator[ast.stmt]:
    """A top-level statement, or those inside a top-level if or try."""
    yield node
    if isinstance(node, (ast.If, ast.Try)):
        for child in [*node.body, *node.orelse]:
            yield from _statements(child)


def find_module(origin: Path, dotted: str, level: int) -> Path | None:
    """The file of an import inside the project, or None if it is foreign."""
    parts = [part for part in dotted.split(".") if part]
    if level:
        bases = [origin.parents[level - 1]]
    elif not parts or parts[0] in FOREIGN:
        return None
    else:
        bases = list(origin.parents)[:8]
    for base in bases:
        target = base.joinpath(*parts)
        for candidate in (target.with_suffix(".py"), target / "__init__.py"):
            if parts and candidate.is_file():
                return candidate
        if level and not parts and (target / "__init__.py").is_file():
            return target / "__init__.py"
    return None


def resolve(module: Module, name: str, depth: int = 0) -> tuple[Module, Definition] | None:
    """The project definition that a top-level or imported name means."""
    if name in module.definitions:
        return module, module.definitions[name]
    imported = module.imports.get(name)
    if imported is None or imported.member is None or depth > 8:
        return None
    path = find_module(module.path, imported.dotted, imported.level)
    if path is None or path == module.path:
        return None
    return _resolve_in(path, imported.member, depth + 1)


def _resolve_in(path: Path, name: str, depth: int = 0) -> tuple[Module, Definition] | None:
    try:
        return resolve(load(path), name, depth)
    except NotPython:
        # a file that cannot be read is reported where it is checked
        return None


def resolve_chain(module: Module, node: ast.AST) -> tuple[Module, Definition] | None:
    """Like resolve, for `name` and for `imported_module.name`."""
    if isinstance(node, ast.Name):
        return resolve(module, node.id)
    if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)):
        return None
    imported = module.imports.get(node.value.id)
    if imported is None:
        return None
    dotted = imported.full
    path = find_module(module.path, dotted, imported.level)
    return _resolve_in(path, node.attr) if path else None


def is_jit(module: Module, decorator: ast.expr) -> bool:
    """Whether a decorator or callee is nki.jit, bare or called with options."""
    if isinstance(decorator, ast.Call):
        decorator = decorator.func
    return module.dotted(decorator) in JIT


def kernels(module: Module) -> list[tuple[Module, FunctionNode]]:
    """Functions decorated with nki.jit anywhere in the file, or passed to nki.jit by a name, imported or not."""
    result: dict[int, tuple[Module, FunctionNode]] = {}
    for node in ast.walk(module.tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if any(is_jit(module, decorator) for decorator in node.decorator_list):
                result[id(node)] = module, node
        elif isinstance(node, ast.Call) and node.args and is_jit(module, node.func):
            owner, target = resolve_chain(module, node.args[0]) or (module, None)
            if isinstance(target, (ast.FunctionDef, ast.AsyncFunctionDef)):
                result[id(target)] = owner, target
    return list(result.values())


def kernel_nodes(definition: ast.AST) -> Iterator[ast.AST]:
    """Every node that the compiler evaluates: no annotations, decorators or docstrings."""
    yield definition
    for name, value in ast.iter_fields(definition):
        if name in ("decorator_list", "annotation", "returns", "type_comment"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from kernel_nodes(child)


@dataclass
class Reached:
    """One definition that a kernel uses, with its module."""

    module: Module
    definition: Definition
    kernel: str
    is_kernel: bool = False


class Reach:
    """Collects the functions, classes and methods that kernels use, across modules."""

    def __init__(self) -> None:
        self.reached: dict[int, Reached] = {}
        self._classes: list[tuple[Reached, ast.ClassDef]] = []
        self._attributes: set[str] = {"__init__", "__post_init__"}
        # jitted functions that other kernels call: plain functions there
        self.inner: set[int] = set()

    def kernel(self, module: Module, definition: FunctionNode) -> None:
        """Add a kernel and everything that it uses."""
        self._visit(Reached(module, definition, definition.name, True))
        before = -1
        while before != len(self.reached):
            before = len(self.reached)
            for owner, definition_ in list(self._classes):
                self._methods(owner, definition_)

    def _visit(self, reached: Reached) -> None:
        if id(reached.definition) in self.reached:
            return
        self.reached[id(reached.definition)] = reached
        if isinstance(reached.definition, ast.ClassDef):
            self._classes.append((reached, reached.definition))
            return
        for node in kernel_nodes(reached.definition):
            if isinstance(node, ast.Attribute):
                self._attributes.add(node.attr)
            if isinstance(node, (ast.Name, ast.Attribute)):
                self._follow(reached, node)
            elif isinstance(node, ast.arg) and node.annotation is not None:
                for part in ast.walk(node.annotation):
                    self._follow(reached, part, only_classes=True)

    def _follow(self, reached: Reached, node: ast.AST, only_classes: bool = False) -> None:
        target = resolve_chain(reached.module, node)
        if target is None:
            return
        module, definition = target
        is_class = isinstance(definition, ast.ClassDef)
        if only_classes and not is_class:
            return
        jitted = any(is_jit(module, decorator) for decorator in definition.decorator_list)
        if jitted:
            self.inner.add(id(definition))
        else:
            self._visit(Reached(module, definition, reached.kernel))

    def _methods(self, owner: Reached, definition: ast.ClassDef) -> None:
        for node in definition.body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                used = node.name in self._attributes
                if used or (node.name.startswith("__") and node.name not in HOST_METHODS):
                    self._visit(Reached(owner.module, node, owner.kernel))
