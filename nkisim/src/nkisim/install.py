"""Answering to the name `nki` where the vendor's package is absent."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from nkisim import collectives, isa, language, launch
from nkisim import compiler as nki_compiler
from nkisim.core.context import running
from nkisim.errors import NkiValidationError
from nkisim.isa import constants as isa_constants
from nkisim.memory.tensor import NkiTensor
from nkisim.policy import chosen


def install(force: bool = False) -> bool:
    """Register nkisim as nki, nki.language, nki.isa, ...; return whether that happened.

    Nothing happens where a real nki can be imported, unless `force` is set.
    """
    if not force and not _ours() and _real():
        return False
    for name, module in _modules().items():
        sys.modules[name] = module
    return True


def _ours() -> bool:
    return getattr(sys.modules.get("nki"), "__nkisim__", False)


def _real() -> bool:
    """Return whether `nki` can be imported and has instructions; the public index holds empty look-alikes."""
    try:
        return hasattr(importlib.import_module("nki.isa"), "nc_matmul")
    except ImportError:
        return False


def _module(name: str, **members: Any) -> ModuleType:
    module = ModuleType(name, f"{name}, simulated by nkisim.")
    module.__dict__.update(members, __nkisim__=True)
    return module


class _Annotation:
    """nt.tensor[shape]: an annotation that says nothing to the simulator."""

    def __class_getitem__(cls, shape: object) -> type:
        return cls


def _version(name: str) -> str:
    """Answer nki.__version__ by the version of the running launch, or of one that would start here."""
    if name != "__version__":
        raise AttributeError(f"module 'nki' has no attribute {name!r}")
    core = running()
    return f"{(core.policy if core else chosen()).nki}.0"


def _modules() -> dict[str, ModuleType]:
    typing = _module("nki.typing", tensor=_Annotation, mutable_tensor=_Annotation)
    # `from nki.isa import constants` looks for an attribute, so the module itself is there too
    constants = _module("nki.isa.constants", **_public(isa_constants))
    dtypes = _module("nki.language.dtypes", **_public(sys.modules["nkisim.language.dtypes"]))
    dtype = _module("nki.dtype", **_public(sys.modules["nkisim.language.dtypes"]))
    tensor = _module("nki.tensor", tensor=NkiTensor, Tensor=NkiTensor)
    meta = _module("nki.meta", tensor=tensor)
    builder = _module("nki.compiler.kernel_builder")
    compiler = _module("nki.compiler", kernel_builder=builder, **_public(nki_compiler))
    builtin = _module("nki.builtin")
    experimental = _module("nki.experimental", while_loop=language.while_loop)
    root = _module(
        "nki", jit=launch.jit, simulate=launch.simulate, cpu_simulate=cpu_simulate,
        Kernel=launch.Kernel, language=language, isa=isa, collectives=collectives, typing=typing,
        dtype=dtype, tensor=tensor, meta=meta, compiler=compiler, builtin=builtin,
        experimental=experimental, NkiValidationError=NkiValidationError, __getattr__=_version,
    )  # fmt: skip
    root.__path__ = []
    rooms = {
        "nki": root, "nki.language": language, "nki.isa": isa, "nki.collectives": collectives,
        "nki.typing": typing, "nki.isa.constants": constants, "nki.language.dtypes": dtypes,
        "nki.dtype": dtype, "nki.tensor": tensor, "nki.meta": meta, "nki.meta.tensor": tensor,
        "nki.compiler": compiler, "nki.compiler.kernel_builder": builder,
        "nki.builtin": builtin, "nki.experimental": experimental,
    }  # fmt: skip
    # published kernels also import nki through older names
    older = _module("nki_cpu_simulator", cpu_simulate=cpu_simulate, simulate=launch.simulate, nki=root)
    older.__path__ = []
    return {**rooms, **{f"nki_cpu_simulator.{name}": room for name, room in rooms.items()}, "nki_cpu_simulator": older}


def _public(module: ModuleType) -> dict[str, Any]:
    return {n: v for n, v in vars(module).items() if not n.startswith("__")}


class CpuSimulate:
    """nki.cpu_simulate(kernel)[lnc](**inputs): the older entry."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel if isinstance(kernel, launch.Kernel) else launch.Kernel(kernel)

    def __getitem__(self, lnc: Any) -> CpuSimulate:
        return CpuSimulate(self.kernel[lnc])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return launch.run(self.kernel, args, kwargs).outputs


cpu_simulate: Callable[[Any], CpuSimulate] = CpuSimulate
