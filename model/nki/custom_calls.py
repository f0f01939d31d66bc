"""XLA:CPU custom calls: XLA passes the addresses of buffers, nkisim runs the kernel on them.

The call's configuration is a launch as JSON (`model/nki/launches.py`) and names a kernel of a table; no code from a
bundle is executed. An exception cannot pass through XLA; it is stored and raised after the run.
"""

import ctypes
from typing import Any

import numpy as np
from jaxlib import xla_client

from model.dtypes import BY_NAME
from model.errors import UserError
from model.nki.launches import CUSTOM_CALL_TARGET, Result, from_text
from model.nki.simulated import simulate

_failures: list[Exception] = []
_SIGNATURE = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p
)


def register() -> None:
    """Registers the custom call target with XLA's CPU client, once."""
    if not _registered:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        capsule = new(ctypes.cast(_SERVE, ctypes.c_void_p), b"xla._CUSTOM_CALL_TARGET", None)
        xla_client.register_custom_call_target(CUSTOM_CALL_TARGET, capsule, "cpu", api_version=0)
        _registered.append(capsule)


def check(results: Any) -> None:
    """Waits for a run's results. Raises UserError if a custom call failed."""
    if not _registered:
        return
    for parts in results:
        for part in parts:
            part.block_until_ready()
    if _failures:
        failure = _failures[0]
        _failures.clear()
        raise UserError(f"a simulated kernel rejected its operands: {failure}; build the bundle again") from failure


def _view(address: int, spec: Result) -> Any:
    """The buffer at an address as a NumPy array."""
    dtype: Any = BY_NAME[spec.dtype].numpy
    size = int(np.prod(spec.shape, dtype=np.int64)) * dtype.itemsize
    memory = (ctypes.c_char * size).from_address(address)
    return np.frombuffer(memory, dtype).reshape(spec.shape)


def _serve(out: int, buffers: Any, text: bytes, length: int, status: int) -> None:
    """XLA's untyped custom call ABI: result address, operand addresses, configuration and its length, status."""
    try:
        launch, operands = from_text(text[:length].decode())
        outputs = launch.outputs(operands)
        # `out` is the buffer of a single result, or an array of the addresses of several
        addresses = [out] if len(outputs) == 1 else (ctypes.c_void_p * len(outputs)).from_address(out)
        arrays = simulate(launch, [_view(buffers[i], o) for i, o in enumerate(operands)])
        for address, result, array in zip(addresses, outputs, arrays, strict=True):
            _view(address, result)[...] = array
    except Exception as error:  # an exception cannot pass through XLA
        _failures.append(error)


_SERVE = _SIGNATURE(_serve)
_registered: list[Any] = []
