"""A launch in words: `FILE.py:FUNCTION [ARGUMENT ...]`, or `@FILE` with one launch a line."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from nkisim import inputs
from nkisim.command import Parser
from nkisim.errors import NkiValidationError
from nkisim.geometry import NEURONX_CC, Geometry
from nkisim.install import install
from nkisim.isa.target import VARIABLE as VARIABLE_OF_TARGET
from nkisim.isa.target import target as target_of
from nkisim.launch import Kernel, Result, jit, run
from nkisim.lines import failing_line
from nkisim.policy import POLICIES, Policy, using
from nkisim.versions import VARIABLE, VERSIONS

ARGUMENTS = (
    "a kernel and its arguments: FILE.py:FUNCTION [NAME=]DTYPE:SHAPE[:VALUES][:SEED] ..., such as "
    f"add.py:add float32:128x512 float32:128x512:large:7 scale=2.0; VALUES are {', '.join(inputs.VALUES)} or below16; "
    "@FILE reads such lines"
)


MEMORIES = {"all": None, "neuronx-cc": NEURONX_CC}


class KernelFailed(ValueError):
    """The kernel's Python raised."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel, its arguments and how it is launched; `name` is the user's text."""

    name: str
    kernel: Kernel
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    policy: Policy
    geometry: Geometry | None = None

    def run(self, **policy: Any) -> Result:
        """Simulate it.

        Raises:
            KernelFailed: its Python raised.
        """
        kwargs = {name: inputs.filled(value) for name, value in self.kwargs.items()}
        rules = replace(self.policy, **policy)
        try:
            return run(self.kernel, tuple(map(inputs.filled, self.args)), kwargs, rules, self.geometry)
        except NkiValidationError:
            raise
        except Exception as error:
            file, line = failing_line(error.__traceback__) or (self.name, 0)
            raise KernelFailed(f"the kernel raised {type(error).__name__} ({error}) [{file}:{line}]") from error


def add_options(parser: Parser) -> None:
    """The words of a launch and how it is launched, the same for every command."""
    parser.add_argument("launch", nargs="+", metavar="KERNEL", help=ARGUMENTS)
    parser.add_argument("--lnc", type=int, choices=(1, 2), default=1, help="logical cores: 1 or 2 (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first array (default: 0)")
    parser.add_argument(
        "--sbuf", choices=sorted(MEMORIES), default="all", help="of SBUF: all, or what neuronx-cc uses (default: all)"
    )
    chips = f"the chip; trn3 has no times (default: ${VARIABLE_OF_TARGET}, or trn2)"
    parser.add_argument("--target", choices=("trn2", "trn3"), help=chips)
    parser.add_argument("--policy", choices=sorted(POLICIES), default="default", help="how strict")
    parser.add_argument("--nki", choices=VERSIONS, help=f"the version of the language (default: ${VARIABLE}, or 0.6)")


def launches(options: Any) -> list[Launch]:
    """The launches that the words name.

    Raises:
        ValueError: a word is not one of a launch, or nothing is launched.
    """
    first, *rest = options.launch
    if not first.startswith("@"):
        return [_launch(options)]
    if rest:
        raise ValueError(f"{first} names complete launches, and {rest[0]!r} follows; put arguments into the file")
    parser = Parser(prog=first)
    add_options(parser)
    try:
        lines = [shlex.split(line, comments=True) for line in Path(first[1:]).read_text(encoding="utf-8").splitlines()]
    except ValueError as error:
        raise ValueError(f"{first[1:]} is no list of launches ({error}); write one launch a line") from None
    listed = [_launch(parser.parse_args(words)) for words in lines if words]
    if not listed:
        raise ValueError(f"{first[1:]} names no launch; write FILE.py:FUNCTION and its arguments, one launch a line")
    return listed


def _launch(options: Any) -> Launch:
    target, *words = options.launch
    cores = [f"--lnc {options.lnc}"] if options.lnc > 1 else []
    args, kwargs = inputs.arguments(words, options.seed)
    policy = replace(POLICIES[options.policy], nki=options.nki)
    with using(policy):
        kernel = jit(function(target))[options.lnc]
    try:
        inspect.signature(kernel.fn).bind(*args, **kwargs)
    except TypeError as error:
        known = ", ".join(inspect.signature(kernel.fn).parameters)
        raise ValueError(f"{target}: {error}; its arguments are {known}") from None
    geometry = MEMORIES[options.sbuf] or target_of(options.target)
    if geometry is NEURONX_CC and options.target == "trn3":
        raise ValueError("what neuronx-cc uses of SBUF is known for trn2 only; leave --sbuf out for trn3")
    return Launch(" ".join([target, *words, *cores]), kernel, args, kwargs, policy, geometry)


def function(target: str) -> Any:
    """The function that FILE.py:FUNCTION names.

    Raises:
        ValueError: there is no such function.
    """
    file, colon, name = target.rpartition(":")
    if not colon or not file.endswith(".py") or not name.isidentifier():
        raise ValueError(f"{target!r} is no kernel; write FILE.py:FUNCTION, such as add.py:add")
    module = _module(Path(file))
    value = getattr(module, name, None)
    if not callable(value):
        known = [key for key, item in vars(module).items() if isinstance(item, Kernel)]
        raise ValueError(f"{file} has no function {name!r}; its kernels are {', '.join(known) or 'none'}")
    return value


def _module(file: Path) -> ModuleType:
    """Import a file with nkisim as `nki`, as a member of its package if it has one."""
    install(force=True)
    # it raises with the user's words, as resolve(strict=True) does up to Python 3.12
    file.stat()
    path = file.resolve()
    folder, names = path.parent, [path.stem]
    while (folder / "__init__.py").exists():
        folder, names = folder.parent, [folder.name, *names]
    sys.path.insert(0, str(folder))
    try:
        if len(names) > 1:
            return importlib.import_module(".".join(names))
        # a file of its own may have the name of a module of the standard library
        spec = importlib.util.spec_from_file_location(f"kernel_file_{path.stem}", path)
        assert spec
        assert spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module
    except (ImportError, SyntaxError, NameError, AttributeError, TypeError) as error:
        raise ValueError(f"{file} cannot be imported ({type(error).__name__}: {error}); mend it") from error
