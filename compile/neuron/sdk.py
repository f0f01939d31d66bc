"""neuronx-cc and nki on this machine: whether they are installed, their versions, one call of the compiler.

The real packages come from AWS's package index; the public index has empty packages of the same names.
"""

import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from compile.neuron import specialise
from compile.neuron.flags import TARGET
from model.errors import UserError

COMPILER, NKI = "neuronx-cc", "nki"
# host memory of a neuronx-cc: 10 to 30 GB for a decode graph with NKI kernels, once 174 (foxl-ai/kiln, neuron-notes.md)
JOB_BYTES = 40 * 10**9


def compiler_program() -> str | None:
    """The path of neuronx-cc, from the folder of this Python or from PATH."""
    installed = Path(sys.executable).with_name(COMPILER)
    return str(installed) if installed.is_file() else shutil.which(COMPILER)


def missing(launches_kernels: bool) -> str:
    """What this machine lacks to make NEFFs, as a clause; "" if nothing."""
    if compiler_program() is None:
        return f"this machine has no {COMPILER}; install it from AWS's package index"
    if launches_kernels and not specialise.available():
        why = f"its graphs launch NKI kernels and this machine has {COMPILER} without {NKI}"
        return f"{why}; install {NKI} from AWS's package index, or use --kernels reference"
    return ""


def versions(*packages: str) -> dict[str, str]:
    """Package -> installed version."""
    named = {package: importlib.metadata.distributions(name=package) for package in packages}
    return {package: next((d.version for d in ds), "(unknown version)") for package, ds in named.items()}


def default_jobs() -> int:
    """Compilers at a time: one per processor and JOB_BYTES of free memory, at most of a container's limit."""
    memory = [1024 * int(n) for n in re.findall(r"MemAvailable: *(\d+)", Path("/proc/meminfo").read_text("ascii"))]
    if (limit := Path("/sys/fs/cgroup/memory.max")).is_file():
        memory += map(int, re.findall(r"\d+", limit.read_text("ascii")))
    return max(1, min(len(os.sched_getaffinity(0)), min(memory) // JOB_BYTES))


def compile_hlo(hlo: Path, neff: Path, log: Path, flags: str, folder: Path) -> None:
    """Compile an HLO proto with neuronx-cc, run in ``folder``; UserError with its last line if it refuses the graph."""
    command = [
        compiler_program() or COMPILER, "compile", "--framework=XLA", str(hlo.absolute()),
        "--output", str(neff.absolute()), f"--target={TARGET}", *shlex.split(flags),
        f"--logfile={log.absolute()}", "--verbose=35",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode or not neff.is_file():
        last = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
        raise UserError(
            f"{COMPILER} failed on {hlo.name} with status {done.returncode}: {last}; read {log}, change "
            "compiler_flags, and run the command again: compiled graphs are reused"
        )
