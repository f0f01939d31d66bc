"""NKI kernels for neuronx-cc: a graph's launches as IR of the vendor's `nki`, named by the vendor's configurations.

A kernel is specialised from shapes. The seam is private and undocumented: `CompileKernel` of `nki.framework.compiled`,
as nkipy calls it (aws-neuron/nkipy, nkipy/core/nki_op.py, for the front end that it calls beta 3). neuronx-cc finds a
kernel's file as `<folder>/<file>` below the folder that it runs in (NCC_EVRF059).
"""

import base64
import dataclasses
import functools
import hashlib
import importlib
import inspect
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from compile.neuron.flags import TARGET
from model.dtypes import BY_NAME
from model.errors import UserError
from model.nki.launches import CUSTOM_CALL_TARGET, LNC, Launch, Result, filled, from_text
from model.nki.table import KERNELS
from trnspec.bundle import hlo

# of a bundle
KERNELS_FOLDER = "kernels"
_SEAM = "nki.framework.compiled"
_CALLED = ("_cached_compile_to_bir", "_compile_opts", "_frontend_cls")


def available() -> bool:
    """Whether the vendor's `nki` is installed, with the seam."""
    try:
        kernel = getattr(importlib.import_module(_SEAM), "CompileKernel", None)
    except ImportError:
        return False
    return all(hasattr(kernel, name) for name in _CALLED)


def specialised(proto: bytes, folder: Path, configured: dict[bytes, bytes]) -> bytes:
    """A graph whose launches have the vendor's configuration; their IR is in `folder`, `<digest>/<file>` each.

    `configured` has the configurations of the launches so far: graphs share most of them. Raises UserError if `nki`
    refuses a kernel, or gives it other results than the graph has.
    """
    module = hlo.parse(proto)
    for call in _calls(module):
        if (text := call.backend_config) not in configured:
            launch, operands = from_text(text.decode())
            try:
                configured[text] = _configured(launch, operands, folder)
            except UserError:
                raise
            except Exception as error:
                why = (str(error).strip() or type(error).__name__).splitlines()[0]
                refused = f"nki does not take the kernel {launch.kernel}: {why}"
                raise UserError(f"{refused}; build with --kernels reference, and report it") from error
        call.backend_config = configured[text]
        # as the vendor's frameworks leave it
        call.ClearField("custom_call_api_version")
    return module.SerializeToString(deterministic=True)  # type: ignore[no-any-return]


def _calls(module: Any) -> list[Any]:
    return [i for c in module.computations for i in c.instructions if i.custom_call_target == CUSTOM_CALL_TARGET]


def binaries(proto: bytes) -> list[str]:
    """The files that the calls of a specialised graph name."""
    configs = (json.loads(base64.b64decode(c.backend_config, validate=True)) for c in _calls(hlo.parse(proto)))
    return sorted({config["klir_binary"]["binary"] for config in configs})


def _configured(launch: Launch, operands: Sequence[Result], folder: Path) -> bytes:
    """nki's configuration of a launch, with its IR in `folder`."""
    work = folder / ".work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    config = _compiled(launch, operands, work)
    call = json.loads(base64.b64decode(config.backend_config_b64))
    aliases = {int(i): int(o) for i, o in dict(config.operand_output_aliases or {}).items()}
    shapes = [(tuple(s.shape), np.dtype(s.dtype)) for s in config.output_specs]
    changed = {number: len(launch.results) + at for at, number in enumerate(launch.changed)}
    planned = [(r.shape, np.dtype(BY_NAME[r.dtype].numpy)) for r in launch.outputs(operands)]
    if aliases != changed or shapes != planned or call["grid"] not in ([], [LNC]):
        raise UserError(
            f"nki gives {launch.kernel} the results {shapes}, the aliases {aliases} and the cores {call['grid']}, the "
            f"graph has {planned}, {changed} and {LNC}; build with --kernels reference, and report it"
        )
    source = work / call["klir_binary"]["binary"]
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    call["klir_binary"]["binary"] = place = f"{digest}/{source.name}"
    (folder / digest).mkdir(exist_ok=True)
    shutil.move(source, folder / place)
    return base64.b64encode(json.dumps(call).encode())


def _compiled(launch: Launch, operands: Sequence[Result], work: Path) -> Any:
    """nki's configuration of a launch for a framework; its artifacts are in `work`."""
    # vendor seam
    vendor: Any = importlib.import_module(_SEAM)
    kernel, (function, arguments) = KERNELS[launch.kernel], _flat(launch)
    fields = {f.name: getattr(kernel, f.name) for f in dataclasses.fields(kernel) if f.name != "func"}
    fields |= {"lnc": launch.lnc, "target": TARGET, "artifacts_dir": str(work)}
    compiling = vendor.CompileKernel(function, **fields)
    arrays = [np.empty(o.shape, BY_NAME[o.dtype].numpy) for o in operands]
    inputs = inspect.signature(function).bind(*filled(arguments, arrays))
    inputs.apply_defaults()
    made = compiling._cached_compile_to_bir(
        frontend=compiling._frontend_cls(enable_backend_opt=compiling._enable_backend_opt),
        inputs=dict(inputs.arguments),
        compile_opts=compiling._compile_opts(),
    )
    return made.build_config()


def _flat(launch: Launch) -> tuple[Callable[..., Any], list[Any]]:
    """The kernel's function for a framework, and its arguments.

    The function also returns what it changes in place, as the vendor's kernels do, so that nki sees aliases. Each
    tensor is a parameter: frameworks name a call's operands by the parameters, and take a tuple for a constant
    (nki-library calls its transformer kernel through such a function: test_transformer_tkg.py).
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
        returned = function(*filled(nested, given))
        results = (returned if isinstance(returned, tuple) else (returned,))[: len(launch.results)]
        return (*results, *(given[plain.index(f"#{number}")] for number in launch.changed))

    returning.__signature__ = signature  # type: ignore[attr-defined]
    return (returning if launch.changed else function), plain
