"""The custom calls of a graph, served on the CPU: XLA hands over memory, nkisim runs the kernel.

The call's configuration is a launch as text (`model/nki/launches.py`), data of ours that names a kernel of a table:
no content of a bundle is executed. A failure inside of a call cannot cross XLA; it is kept and raised after the run.
"""

import ctypes
from typing import Any

import numpy as np
from jaxlib import xla_client

from model.dtypes import BY_NAME
from model.errors import UserError
from model.nki.launches import TARGET, Result, from_text
from model.nki.simulated import simulate

_failures: list[Exception] = []
_SIGNATURE = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p
)


def register() -> None:
    """Register the calls with XLA's CPU client; to register them again is harmless."""
    if not _registered:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        capsule = new(ctypes.cast(_SERVE, ctypes.c_void_p), b"xla._CUSTOM_CALL_TARGET", None)
        xla_client.register_custom_call_target(TARGET, capsule, "cpu", api_version=0)
        _registered.append(capsule)


def check(results: Any) -> None:
    """Wait for a run's results and raise the errors of its calls."""
    if not _registered:
        return
    for parts in results:
        for part in parts:
            part.block_until_ready()
    if _failures:
        failure = _failures[0]
        _failures.clear()
        raise UserError(f"a simulated kernel refused its operands: {failure}") from failure


def _view(address: int, of: Result) -> Any:
    dtype: Any = BY_NAME[of.dtype].numpy
    size = int(np.prod(of.shape, dtype=np.int64)) * dtype.itemsize
    memory = (ctypes.c_char * size).from_address(address)
    return np.frombuffer(memory, dtype).reshape(of.shape)


def _serve(out: int, given: Any, text: bytes, length: int, status: int) -> None:
    try:
        launch, operands = from_text(text[:length].decode())
        outputs = launch.outputs(operands)
        # one result comes as its memory, several as a list of addresses
        places = [out] if len(outputs) == 1 else (ctypes.c_void_p * len(outputs)).from_address(out)
        made = simulate(launch, [_view(given[i], o) for i, o in enumerate(operands)])
        for place, result, array in zip(places, outputs, made, strict=True):
            _view(place, result)[...] = array
    except Exception as error:  # nothing may be thrown through XLA
        _failures.append(error)


_SERVE = _SIGNATURE(_serve)
_registered: list[Any] = []
