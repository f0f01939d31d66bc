"""The part of the public API that exists here, by version of the language: `nkisim coverage [--json]`."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nkisim import collectives, command, compiler, isa, language, launch
from nkisim.command import Parser
from nkisim.versions import SIGNATURES

# NeuronCore-v4 only (manual of nki.isa)
REFUSED = frozenset(
    {"nki.isa.nc_matmul_mx", "nki.isa.activate2", "nki.isa.exponential", "nki.isa.quantize_mx",
     "nki.isa.rand2", "nki.language.abs_max", "nki.language.abs_min", "nki.language.prelu",
     "nki.language.bypass", "nki.language.NkiTensor.indirect"}
)  # fmt: skip
MODULES = {"nki": launch, "nki.isa": isa, "nki.language": language, "nki.collectives": collectives,
           "nki.compiler": compiler}  # fmt: skip


def public_names(signatures: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return (full name, module, dotted path in it) of every function, member and constant."""
    result = []
    for module, parts in signatures["modules"].items():
        paths = list(parts["functions"]) + list(parts["constants"])
        for name, cls in parts["classes"].items():
            paths.append(name)
            for kind in ("members", "methods", "properties"):
                paths += [f"{name}.{member}" for member in cls[kind]]
        result += [(f"{module}.{p}", module, p) for p in paths]
    return result


def lookup(module: str, path: str) -> Any:
    """Return the object here; raise AttributeError when it is missing."""
    value: Any = MODULES[module]
    for part in path.split("."):
        if part in _FIELDS.get(value, ()):
            return part
        value = getattr(value, part)
    return value


# set by __init__, so the class itself does not carry them
_FIELDS: dict[Any, frozenset[str]] = {
    language.NkiTensor: frozenset({"shape", "strides", "offset", "name", "dtype", "buffer"}),
    isa.NkiScalar: frozenset({"dtype"}),
}


def report(signatures: dict[str, Any]) -> dict[str, list[str]]:
    """Sort every public name into implemented, refused (needs a newer core) and missing."""
    result: dict[str, list[str]] = {"implemented": [], "refused": [], "missing": []}
    for full, module, path in public_names(signatures):
        try:
            lookup(module, path)
        except AttributeError:
            result["missing"].append(full)
        else:
            result["refused" if full in REFUSED else "implemented"].append(full)
    return result


def parameters(value: Any) -> list[tuple[str, bool]]:
    """Return (name, has a default) of a callable, stars included."""
    listed = []
    for p in inspect.signature(value).parameters.values():
        star = "*" * ((p.kind is p.VAR_POSITIONAL) + 2 * (p.kind is p.VAR_KEYWORD))
        listed.append((star + p.name, p.default is not p.empty))
    return listed


def main(arguments: Sequence[str] | None = None) -> int:
    """Print which names of the public API are implemented, refused and missing; exit with 1 when one is missing."""
    parser = Parser(prog="nkisim coverage", description=main.__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--signatures", type=Path, help="a signatures file, instead of those of every version")
    options = parser.parse_args(arguments)
    files = [options.signatures] if options.signatures else SIGNATURES.values()
    read = [_signatures(file) for file in files]
    results = {signatures["nki_version"]: report(signatures) for signatures in read}
    if options.json:
        print(json.dumps(results))
    else:
        print("\n".join(_text(version, result) for version, result in results.items()))
    return 1 if any(result["missing"] for result in results.values()) else 0


def _signatures(file: Path) -> dict[str, Any]:
    """Read a signatures file.

    Raises:
        ValueError: it is not one.
    """
    how = f"a signatures file is laid out as {SIGNATURES['0.6'].name}"
    signatures: dict[str, Any] = command.read_json(file, how)
    try:
        public_names(signatures)
        unknown = sorted(set(signatures["modules"]) - set(MODULES))
        if unknown or not isinstance(signatures["nki_version"], str):
            raise KeyError(f"modules {', '.join(unknown)}")
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} holds no signatures ({type(error).__name__}: {error}); {how}") from None
    return signatures


def _text(version: str, result: dict[str, list[str]]) -> str:
    here, needed = len(result["implemented"]), len(result["implemented"]) + len(result["missing"])
    lines = [f"NKI {version}: {here / needed:.1%} of {needed} names for trn2"]
    for kind, names in result.items():
        lines += [f"  {kind}: {len(names)}", *(f"    {name}" for name in names if kind != "implemented")]
    return "\n".join(lines)


if __name__ == "__main__":
    command.run(main)
