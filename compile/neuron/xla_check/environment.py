"""An environment with torch_xla that runs without CUDA: its wheels, and libraries that do nothing in place of CUDA's.

For x86-64 the package index has torch 2.9 as a CUDA build only, linked to libraries that no check on a CPU calls. Each
becomes an empty library of that name; one more, which a process preloads, defines their symbols.
About 2.3 GB and a minute and a half; needs gcc.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from model.errors import UserError

ROOT = Path(__file__).resolve().parents[3]
TORCH, TORCH_XLA = "2.9.1", "2.9.0"
# preload it to run the environment's Python with torch
SYMBOLS = "lib/symbols.so"
_WHEELS = (f"torch=={TORCH}", f"torch_xla=={TORCH_XLA}", "nvidia-cuda-runtime-cu12==12.8.90")
# for torch, for our plan and module, and a reader of ELF files
_PURE = (
    "numpy", "filelock", "fsspec", "jinja2", "networkx", "sympy", "typing_extensions", "absl-py", "pyyaml", "requests",
    "ml_dtypes", "safetensors", "tokenizers", "protobuf", "pyelftools",
)  # fmt: skip
# the beginnings of the names in CUDA's libraries
_CUDA = ("cu", "nccl", "nv")
_SYSTEM = (
    "libc.", "libm.", "libdl.", "librt.", "libpthread.", "libgcc_s", "libstdc++", "ld-linux", "libgomp", "libutil",
)  # fmt: skip


def make(folder: Path) -> Path:
    """The environment's Python; made once, and kept."""
    python = folder / "bin" / "python"
    if (folder / SYMBOLS).is_file():
        return python
    _run(sys.executable, "-m", "venv", "--clear", str(folder))
    _run(str(python), "-m", "pip", "install", "-q", "--no-deps", *_WHEELS)
    _run(str(python), "-m", "pip", "install", "-q", *_PURE)
    _run(str(python), "-m", "compile.neuron.xla_check.environment", str(folder))
    return python


def _run(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
        raise UserError(f"{' '.join(command[:4])} ended with {done.returncode} and said: {said}; fix it and run again")


def stand_ins(folder: Path) -> None:
    """Compile the libraries that torch's own need and that are missing, and the one with their symbols."""
    (torch_lib,) = (folder / "lib").glob("python*/site-packages/torch/lib")
    files = [*torch_lib.glob("*.so*"), *torch_lib.parents[1].glob("nvidia/*/lib/*.so*")]
    ours = tuple(file.name for file in files)
    needed, undefined, defined = set[str](), set[str](), set[str]()
    for file in files:
        _read(file, (*ours, *_SYSTEM), needed, undefined, defined)
    for library in needed:
        if not library.startswith((*ours, *_SYSTEM)):
            _compile(torch_lib / library, ())
    _compile(folder / SYMBOLS, undefined - defined)


def _read(file: Path, there: tuple[str, ...], needed: set[str], undefined: set[str], defined: set[str]) -> None:
    # in the environment that is made, not in the one that makes it
    from elftools.elf.elffile import ELFFile  # type: ignore[import-not-found]  # noqa: PLC0415

    with file.open("rb") as opened:
        elf = ELFFile(opened)
        needed |= {tag.needed for tag in elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")}
        versions: Any = elf.get_section_by_name(".gnu.version_r")
        numbers: Any = elf.get_section_by_name(".gnu.version")
        library_of: dict[int, str] = {}
        for library, entries in versions.iter_versions() if versions else ():
            library_of |= {entry["vna_other"]: library.name for entry in entries}
        for i, symbol in enumerate(elf.get_section_by_name(".dynsym").iter_symbols()):
            if symbol["st_shndx"] != "SHN_UNDEF":
                defined.add(symbol.name)
            elif symbol.name.lower().startswith(_CUDA):
                library = library_of.get(numbers.get_symbol(i)["ndx"] if numbers else -1, "")
                if not library.startswith(there):
                    undefined.add(symbol.name)


def _compile(library: Path, names: Iterable[str]) -> None:
    """A library whose functions return CUDA's "unknown error"."""
    source = "".join(f"int {n}(void) {{ return 999; }}\n" for n in sorted(names) if n.isidentifier())
    command = ["gcc", "-shared", "-fPIC", "-w", "-fno-builtin", "-O0", "-x", "c", "-", f"-Wl,-soname,{library.name}"]
    subprocess.run([*command, "-o", str(library)], input=source, text=True, check=True)


if __name__ == "__main__":
    stand_ins(Path(sys.argv[1]))
