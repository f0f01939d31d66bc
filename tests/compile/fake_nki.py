"""A stand-in of the private seam by which frameworks specialise kernels with the vendor's `nki`, as nkipy calls it.

Its IR is the list of instructions that nkisim runs on zeros; names, results and aliases are those of the kernel. Form
of the configuration: zml/zml and aws-neuron/nkipy.
"""

from __future__ import annotations

import base64
import inspect
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import nkisim
from model.nki.table import KERNELS

VERSION = "0.7.0+stand-in"
# names of the kernels that were specialised, and aliases that each gets in addition
SPECIALISED: list[str] = []
ALIASES: dict[int, int] = {}


@dataclass(frozen=True)
class Kernel:
    """What `nki.jit` gives there."""

    func: Callable[..., Any]
    lnc: int = 1
    schedule: tuple[Any, ...] = ()
    _enable_backend_opt: bool = False


@dataclass(frozen=True)
class CompileKernel(Kernel):
    target: str = ""
    artifacts_dir: str = ""
    _frontend_cls: Any = field(default=SimpleNamespace)

    def _compile_opts(self) -> Any:
        return SimpleNamespace(target=self.target)

    def _cached_compile_to_bir(self, *, frontend: Any, inputs: dict[str, Any], compile_opts: Any) -> Any:
        SPECIALISED.append(self.func.__name__)
        assert list(inputs) == list(inspect.signature(self.func).parameters)
        assert not any(isinstance(value, (tuple, list)) for value in inputs.values()), "only top-level tensors count"
        config = _config(self, {n: np.zeros_like(v) if isinstance(v, np.ndarray) else v for n, v in inputs.items()})
        return SimpleNamespace(build_config=lambda: config)


def _config(kernel: CompileKernel, inputs: dict[str, Any]) -> Any:
    tensors = [name for name, value in inputs.items() if isinstance(value, np.ndarray)]
    aliases: dict[int, int] = {}

    def traced(*given: Any) -> Any:
        actual, fresh = kernel.func(*given), []
        for at, value in enumerate(actual if isinstance(actual, tuple) else (actual,)):
            same = [name for name, one in zip(inputs, given, strict=True) if one is value]
            if same:
                aliases[tensors.index(same[0])] = at
            else:
                fresh.append(value)
        return tuple(fresh)

    done = nkisim.run(nkisim.jit(traced)[kernel.lnc], tuple(inputs.values()), policy=nkisim.Policy(recording=True))
    outputs = list(done.outputs if isinstance(done.outputs, tuple) else (done.outputs,))
    for operand, at in sorted(aliases.items(), key=lambda pair: pair[1]):
        outputs.insert(at, inputs[tensors[operand]])
    names = [f"output{at}" for at in range(len(outputs))]
    for operand, at in aliases.items():
        names[at], tensors[operand] = tensors[operand], f"{tensors[operand]}.must_alias_input"
    file = Path(kernel.artifacts_dir) / f"{kernel.func.__name__}.bir"
    instructions = (f"{e.core} {e.engine} {e.op} {dict(e.work)}" for e in done.recording.events)
    file.write_text("\n".join(["a stand-in's IR: the instructions", *instructions]), encoding="utf-8")
    binary = {
        "binary": str(file), "input_names": tensors, "output_names": names, "version_identifier": VERSION,
        "aliases": [[tensors[operand], names[at]] for operand, at in aliases.items()],
    }  # fmt: skip
    call = {
        "func_name": kernel.func.__name__, "platform_target": kernel.target, "kernel_format": "bir",
        "kernel_version": 1, "klir_binary": binary, "grid": [kernel.lnc], "has_collectives": False, "mac_count": 0,
    }  # fmt: skip
    return SimpleNamespace(
        backend_config_b64=base64.b64encode(json.dumps(call).encode()),
        output_specs=[SimpleNamespace(shape=o.shape, dtype=o.dtype) for o in outputs],
        operand_output_aliases=aliases | ALIASES,
        has_collectives=False,
    )


def install(patch: pytest.MonkeyPatch) -> None:
    """Install the seam, and wrap our kernels as the vendor's `nki.jit` would."""
    patch.setitem(sys.modules, "nki.framework.compiled", SimpleNamespace(CompileKernel=CompileKernel))
    for name, kernel in KERNELS.items():
        patch.setitem(KERNELS, name, Kernel(kernel.fn))
