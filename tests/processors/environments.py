"""Environments that force a library's instruction set, which of them this processor can run, and a child in one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nkisim import machine
from trnspec.runtime.processor import processor_flags

ROOT = Path(__file__).resolve().parents[2]
# what a child gets from the environment under test alone
_VARIABLES = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "NPY_DISABLE_CPU_FEATURES", "NPY_ENABLE_CPU_FEATURES",
              "GLIBC_TUNABLES", "XLA_FLAGS", "ATEN_CPU_CAPABILITY", "DNNL_MAX_CPU_ISA")  # fmt: skip
_AVX2 = {"avx2", "fma"}
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"}
_NEEDS = {"Haswell": _AVX2, "Zen": _AVX2, "SkylakeX": _AVX512, "Nehalem": {"sse4_2"}}
# below AVX-512, which is what nothing forces
_ISA = {"AVX2": _AVX2, "SSE4_2": {"sse4_2"}}
_ATEN = {"default": {"sse4_2"}, "avx2": _AVX2}


@dataclass(frozen=True)
class Environment:
    """Variables that force an instruction set, and why they cannot here, if they cannot."""

    name: str
    variables: dict[str, str] = field(default_factory=dict)
    why_not: str = ""

    def __str__(self) -> str:
        return self.name


def _missing(needed: set[str]) -> str:
    missing = sorted(needed - processor_flags())
    return f"{machine.processor()} has no {', '.join(missing)}" if missing else ""


def _numpy(name: str, without: list[str]) -> Environment:
    return Environment(name, {"NPY_DISABLE_CPU_FEATURES": " ".join(without)}, "" if without else "numpy has found none")


def _found_by_numpy() -> list[str]:
    """The instruction sets above numpy's baseline, when nothing is forced."""
    program = "import json, numpy; print(json.dumps(numpy.show_config('dicts')['SIMD Extensions'].get('found', [])))"
    result: list[str] = json.loads(_python(Environment("unforced"), "-c", program))
    return result


UNFORCED = Environment("unforced")


def kernel_environments() -> list[Environment]:
    """Every kernel of the BLAS, numpy's loops without AVX-512 and at their baseline, the C library without FMA."""
    found = _found_by_numpy()
    wide = [name for name in found if name.startswith("AVX512") or name == "X86_V4"]
    # two spellings, of older and newer glibc
    tunables = "glibc.cpu.hwcaps=-AVX2,-AVX2_Usable,-FMA,-FMA_Usable,-AVX512F"
    return [
        *(Environment(f"BLAS-{name}", {"OPENBLAS_CORETYPE": name}, _missing(needs)) for name, needs in _NEEDS.items()),
        _numpy("numpy-without-AVX512", wide),
        _numpy("numpy-baseline", found),
        # numpy asks the C library where it has no loop of its own
        Environment("libm-without-FMA", {"GLIBC_TUNABLES": tunables} | _numpy("", found).variables, _missing(_AVX2)),
    ]


def graph_environments() -> list[Environment]:
    """XLA up to an instruction set."""
    return [
        Environment(f"XLA-{name}", {"XLA_FLAGS": f"--xla_cpu_max_isa={name}"}, _missing(needs))
        for name, needs in _ISA.items()
    ]


def product_environment() -> Environment:
    """oneDNN, which multiplies for XLA, at what it takes by itself on a processor without AVX-512."""
    has = f"{machine.processor()} has AVX-512, where oneDNN takes other code by itself"
    why_not = _missing(_AVX2) or (has if processor_flags() >= _AVX512 else "")
    return Environment("oneDNN-AVX2", {"DNNL_MAX_CPU_ISA": "AVX2"}, why_not)


def held_back() -> Environment:
    """What the runtime sets up on a processor without AVX-512."""
    variables = {"XLA_FLAGS": "--xla_cpu_max_isa=AVX2", "DNNL_MAX_CPU_ISA": "SSE41"}
    return Environment("held-back", variables, _missing(_AVX2))


def torch_environments() -> list[Environment]:
    """torch at an instruction set."""
    return [
        Environment(f"torch-{name}", {"ATEN_CPU_CAPABILITY": name}, _missing(needs)) for name, needs in _ATEN.items()
    ]


def _python(environment: Environment, *words: str) -> str:
    """Run Python in a process of its own; return what it prints."""
    kept = {name: value for name, value in os.environ.items() if name not in _VARIABLES}
    one = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "NPROC": "1", "PYTHONPATH": str(ROOT)}
    child = subprocess.run(
        [sys.executable, *words], env=kept | one | environment.variables, cwd=ROOT, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert child.returncode == 0, f"{environment}: {child.stderr[-2000:]}"
    return child.stdout


def results(environment: Environment, module: str, *words: str) -> dict[str, Any]:
    """What a module of this folder prints last, as JSON, in an environment."""
    result: dict[str, Any] = json.loads(
        _python(environment, "-m", f"tests.processors.{module}", *words).splitlines()[-1]
    )
    return result
