"""An environment with torch_xla that runs without CUDA: its wheels, and do-nothing libraries in the place of CUDA's.

On x86-64 the package index has torch 2.9 as a CUDA build alone, which links to libraries that no check on a CPU calls.
About 2.3 GB and a minute and a half; needs gcc.
"""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from model.errors import UserError

ROOT = Path(__file__).resolve().parents[3]
TORCH, TORCH_XLA = "2.9.1", "2.9.0"
_WHEELS = (f"torch=={TORCH}", f"torch_xla=={TORCH_XLA}", "nvidia-cuda-runtime-cu12==12.8.90")
# what torch imports, what our code of the plan and of the module imports, and a reader of ELF files
_PURE = (
    "numpy", "filelock", "fsspec", "jinja2", "networkx", "sympy", "typing_extensions", "absl-py", "pyyaml", "requests",
    "ml_dtypes", "safetensors", "tokenizers", "protobuf", "pyelftools",
)  # fmt: skip
_SYSTEM = (
    "libc.",
    "libm.",
    "libdl.",
    "librt.",
    "libpthread.",
    "libgcc_s",
    "libstdc++",
    "ld-linux",
    "libgomp",
    "libutil",
)


def make(folder: Path) -> Path:
    """The environment's Python; made once, and kept."""
    python, done = folder / "bin" / "python", folder / "made"
    if done.is_file():
        return python
    _run(sys.executable, "-m", "venv", "--clear", str(folder))
    _run(str(python), "-m", "pip", "install", "-q", "--no-deps", *_WHEELS)
    _run(str(python), "-m", "pip", "install", "-q", *_PURE)
    _run(str(python), "-m", "compile.neuron.xla_check.environment", str(folder))
    done.write_text("\n".join(_WHEELS), encoding="utf-8")
    return python


def _run(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
        raise UserError(f"{' '.join(command[:4])} ended with {done.returncode} and said: {said}; see to it, run again")


def stand_ins(folder: Path) -> None:
    """Write the libraries that torch's own ask for and that are nowhere, with the names that are asked of them."""
    (torch_lib,) = (folder / "lib").glob("python*/site-packages/torch/lib")
    files = list(torch_lib.glob("*.so*"))
    here = {f.name for f in files} | {"libcudart.so.12"}
    asked: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    unversioned: set[str] = set()
    defined: set[str] = set()
    for file in files:
        _read(file, here, asked, unversioned, defined)
    for library, versions in asked.items():
        named = set().union(*versions.values()) if versions else set()
        _compile(torch_lib / library, versions, _loose(library, unversioned - defined) - named)


def _read(file: Path, here: set[str], asked: dict, unversioned: set[str], defined: set[str]) -> None:  # type: ignore[type-arg]
    # in the environment that is made, not in the one that makes it
    from elftools.elf.elffile import ELFFile  # type: ignore[import-not-found]  # noqa: PLC0415

    with file.open("rb") as opened:
        elf = ELFFile(opened)
        for tag in elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED"):
            if tag.needed not in here and not tag.needed.startswith(_SYSTEM):
                asked[tag.needed].setdefault("", set())
        needs, numbers = elf.get_section_by_name(".gnu.version_r"), elf.get_section_by_name(".gnu.version")
        of_number: dict[int, tuple[str, str]] = {}
        for library, versions in needs.iter_versions() if needs else ():
            of_number |= {version["vna_other"]: (library.name, version.name) for version in versions}
        for i, symbol in enumerate(elf.get_section_by_name(".dynsym").iter_symbols()):
            if symbol["st_shndx"] != "SHN_UNDEF":
                defined.add(symbol.name)
                continue
            library, version = of_number.get(numbers.get_symbol(i)["ndx"] if numbers else -1, ("", ""))
            if not library:
                unversioned.add(symbol.name)
            elif library not in here and not library.startswith(_SYSTEM):
                asked[library][version].add(symbol.name)


def _loose(library: str, names: Iterable[str]) -> set[str]:
    """Names without a version that only this library can mean: they begin as it does."""
    if library == "libcuda.so.1":
        others = ("cuda", "cublas", "cudnn", "cusparse", "cufft", "curand", "cusolver", "cupti", "cuFile")
        return {n for n in names if n.startswith("cu") and not n.startswith(others)}
    start = library.partition(".so")[0].removeprefix("lib").lower().replace("_host", "").rstrip("0123456789")[:6]
    return {n for n in names if n.lower().startswith(start)}


def _compile(library: Path, versions: dict[str, set[str]], loose: set[str]) -> None:
    named = sorted(n for n in loose.union(*versions.values()) if n.isidentifier())
    source, script = library.with_suffix(library.suffix + ".c"), library.with_suffix(library.suffix + ".map")
    source.write_text("".join(f"int {n}(void) {{ return 999; }}\n" for n in named), encoding="utf-8")
    blocks = (f"{v} {{ global: {' '.join(s + ';' for s in sorted(names))} }};\n" for v, names in versions.items() if v)
    script.write_text("".join(blocks), encoding="utf-8")
    command = ["gcc", "-shared", "-fPIC", "-w", "-fno-builtin", "-O0", str(source), f"-Wl,-soname,{library.name}"]
    command += [f"-Wl,--version-script={script}"] if any(versions) else []
    subprocess.run([*command, "-o", str(library)], check=True)
    source.unlink()
    script.unlink()


if __name__ == "__main__":
    stand_ins(Path(sys.argv[1]))
