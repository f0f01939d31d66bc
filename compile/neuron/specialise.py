"""NKI kernels for neuronx-cc: a graph's launches as IR of the vendor's `nki`, named by the vendor's configurations.

A kernel is specialised from shapes, without a device and without data. The seam is private: `CompileKernel` of
`nki.framework.compiled` and the methods below, as nkipy calls them (aws-neuron/nkipy, nkipy/core/nki_op.py, for the
front end that it calls beta 3). No page documents it, so it is looked for by its attributes and called here alone.
The compiler finds a kernel's file as `<folder>/<file>` below the folder that it runs in (NCC_EVRF059).
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import importlib
import inspect
import json
import shutil
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from compile.neuron.flags import TARGET
from model.dtypes import BY_NAME
from model.errors import UserError
from model.nki.launches import LNC, Launch, Result, filled, from_text
from model.nki.launches import TARGET as CALL
from model.nki.table import KERNELS
from trnspec.bundle import hlo

# of a bundle
KERNELS_FOLDER = "kernels"
_SEAM = "nki.framework.compiled"
_CALLED = ("_cached_compile_to_bir", "_compile_opts", "_frontend_cls")
# the vendor's configuration of a call, base64 of JSON, as far as its form is known; other fields stay as they are
_FORM: dict[str, type] = {
    "func_name": str, "platform_target": str, "kernel_format": str, "kernel_version": int, "klir_binary": dict,
    "grid": list, "has_collectives": bool, "mac_count": int,
}  # fmt: skip
# of its klir_binary: the file of the IR, names of operands and results, who made it, [operand, result] in one place
_BINARY: dict[str, type] = {
    "binary": str, "input_names": list, "output_names": list, "version_identifier": str, "aliases": list,
}  # fmt: skip


def available() -> bool:
    """Whether the vendor's `nki` is installed, with the seam."""
    try:
        seam = importlib.import_module(_SEAM)
    except ImportError:
        return False
    return all(hasattr(getattr(seam, "CompileKernel", None), name) for name in _CALLED)


def specialised(proto: bytes, folder: Path, configured: dict[bytes, bytes]) -> bytes:
    """A graph whose launches have the vendor's configuration; their IR is in `folder`, `<digest>/<file>` each.

    `configured` holds the configurations of the launches so far: graphs share most of them.

    Raises:
        UserError: `nki` refuses a kernel, or configures it in an unknown form.
    """
    module = hlo.parse(proto)
    for instruction in _calls(module):
        text = instruction.backend_config
        if text not in configured:
            configured[text] = _configured(*from_text(text.decode()), folder)
        instruction.backend_config = configured[text]
        # as the vendor's frameworks leave it
        instruction.ClearField("custom_call_api_version")
    serialized: bytes = module.SerializeToString(deterministic=True)
    return serialized


def _calls(module: Any) -> list[Any]:
    return [i for c in module.computations for i in c.instructions if i.custom_call_target == CALL]


def binaries(proto: bytes) -> list[str]:
    """The files that the calls of a specialised graph name."""
    return sorted({checked(call.backend_config)["klir_binary"]["binary"] for call in _calls(hlo.parse(proto))})


def missing_kernel_files(proto: bytes, files: Container[str]) -> list[str]:
    """One clause for each kernel of a specialised graph whose IR is not among a bundle's files."""
    try:
        names = binaries(proto)
    except (UserError, DecodeError) as error:
        return [f"it is no specialised graph ({error})"]
    return [
        f"it calls {n}, which the bundle lacks (NCC_EVRF059)" for n in names if f"{KERNELS_FOLDER}/{n}" not in files
    ]


def checked(config: bytes) -> dict[str, Any]:
    """The JSON of a vendor's configuration; UserError names the first field that is not of the known form."""
    try:
        value: dict[str, Any] = json.loads(base64.b64decode(config, validate=True))
        fields = [(n, value.get(n), kind) for n, kind in _FORM.items()]
        fields += [(f"klir_binary.{n}", value["klir_binary"].get(n), kind) for n, kind in _BINARY.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"nki's configuration of a kernel cannot be read ({type(error).__name__}); upgrade nki"
        ) from error
    for name, found, kind in fields:
        if type(found) is not kind or (kind is str and not found):
            raise UserError(
                f"nki configures a kernel with {name} {found!r}, which neuronx-cc does not take (NCC_EVRF065); "
                "upgrade nki to the version of the compiler's release"
            )
    return value


def _configured(launch: Launch, operands: Sequence[Result], folder: Path) -> bytes:
    work = folder / ".work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    found = _compiled(launch, operands, work)
    call = checked(found.backend_config_b64)
    first = len(launch.results)
    changed = {number: first + at for at, number in enumerate(launch.changed)}
    aliases = {int(i): int(o) for i, o in dict(found.operand_output_aliases or {}).items()}
    shapes = [(tuple(s.shape), np.dtype(s.dtype)) for s in found.output_specs]
    planned = [(r.shape, np.dtype(BY_NAME[r.dtype].numpy)) for r in launch.outputs(operands)]
    if aliases != changed or shapes != planned:
        raise UserError(
            f"nki gives {launch.kernel} the results {shapes} and the aliases {aliases}, the graph has {planned} and "
            f"{changed}; build with --kernels reference, and report it"
        )
    if call["grid"] not in ([], [LNC]):
        raise UserError(f"nki launches {launch.kernel} on {call['grid']} cores, the graph is for {LNC} (NCC_EVRF066)")
    source = work / call["klir_binary"]["binary"]
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    place = f"{digest}/{source.name}"
    (folder / digest).mkdir(exist_ok=True)
    shutil.move(source, folder / place)
    call["klir_binary"]["binary"] = place
    return base64.b64encode(json.dumps(call).encode())


def _flat(launch: Launch) -> tuple[Callable[..., Any], list[Any]]:
    """The kernel's function for a framework, and its arguments.

    It returns what it changes too, as the vendor's own do: nki sees aliases. Its tensors are parameters one by one:
    frameworks name the operands of a call by the parameters, and take a tuple for a constant (nki-library calls its
    transformer kernel, which takes lists of weights, through such a function: test_transformer_tkg.py).
    """
    function: Callable[..., Any] = KERNELS[launch.kernel].func
    leaves: dict[str, Any] = {}

    def split(name: str, argument: Any) -> Any:
        if isinstance(argument, list) and "#" in str(argument):
            return [split(f"{name}_{i}", item) for i, item in enumerate(argument)]
        leaves[name] = argument
        return f"#{len(leaves) - 1}"

    nested = [split(n, a) for n, a in zip(inspect.signature(function).parameters, launch.arguments, strict=False)]
    plain = list(leaves.values())
    signature = inspect.Signature([inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in leaves])

    @functools.wraps(function)
    def returning(*args: Any, **kwargs: Any) -> Any:
        given = list(signature.bind(*args, **kwargs).arguments.values())
        found = function(*filled(nested, given))
        results = (found if isinstance(found, tuple) else (found,))[: len(launch.results)]
        return (*results, *(given[plain.index(f"#{number}")] for number in launch.changed))

    returning.__signature__ = signature  # type: ignore[attr-defined]
    return (returning if launch.changed else function), plain


def _compiled(launch: Launch, operands: Sequence[Result], work: Path) -> Any:
    """nki's configuration of a launch for a framework, its artifacts in `work`."""
    # vendor seam
    vendor: Any = importlib.import_module(_SEAM)
    kernel, (function, plain) = KERNELS[launch.kernel], _flat(launch)
    fields = {f.name: getattr(kernel, f.name) for f in dataclasses.fields(kernel) if f.name != "func"}
    fields |= {"lnc": launch.lnc, "target": TARGET, "artifacts_dir": str(work)}
    arrays = [np.empty(o.shape, BY_NAME[o.dtype].numpy) for o in operands]
    arguments = filled(plain, arrays)
    try:
        compiling = vendor.CompileKernel(function, **fields)
        inputs = inspect.signature(function).bind(*arguments)
        inputs.apply_defaults()
        made = compiling._cached_compile_to_bir(
            frontend=compiling._frontend_cls(enable_backend_opt=compiling._enable_backend_opt),
            inputs=dict(inputs.arguments),
            compile_opts=compiling._compile_opts(),
        )
        return made.build_config()
    except Exception as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"nki does not take the kernel {launch.kernel}: {said}; build with --kernels reference, and report it"
        ) from error
