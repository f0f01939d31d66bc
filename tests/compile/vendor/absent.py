"""Packages that are not on this machine, as names that do nothing: enough to import source that needs them."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
from collections.abc import Iterator
from types import ModuleType
from typing import Any


class _Kind(type):
    def __getattr__(cls, name: str) -> Any:
        return _dunder(name) or cls

    def __getitem__(cls, key: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__


class Anything(metaclass=_Kind):
    """Any class, decorator, function or constant of a package that is absent."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return _dunder(name) or Anything

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        decorates = len(arguments) == 1 and callable(arguments[0]) and not named
        return arguments[0] if decorates else Anything()

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def _dunder(name: str) -> None:
    if name.startswith("__"):
        raise AttributeError(name)


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return _dunder(name) or Anything


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of some packages; each is empty until it is asked for a name."""

    def __init__(self, *packages: str) -> None:
        self.packages = packages

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        ours = name.partition(".")[0] in self.packages
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if ours else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass
