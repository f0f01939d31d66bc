"""Crossing between host arrays and device tensors: numpy, and torch if it is there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from nkisim.core import access
from nkisim.core.context import Core
from nkisim.dtypes import INFO, WIDE, name_of, storage_of, store
from nkisim.errors import BadInput, BadOutput, Relaxed
from nkisim.memory.memory import Request, SharedMemory
from nkisim.memory.storage import Storage
from nkisim.memory.tensor import NkiTensor
from nkisim.objects import MemoryRegion

_WHO = ("launch", "output")


@dataclass(slots=True, eq=False)
class Argument:
    """A host array that became HBM, and how to give changes back."""

    host: Any
    array: Any
    storage: Storage
    name: str


def is_torch(value: object) -> bool:
    """Return whether a value is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_array(value: object) -> bool:
    """Return whether a value becomes an HBM tensor."""
    return isinstance(value, np.ndarray) or is_torch(value)


def to_numpy(value: Any) -> Any:
    """Return a host array as numpy; bf16 and fp8 of torch pass by their bits."""
    if isinstance(value, np.ndarray):
        return value
    value = value.detach()
    if value.device.type != "cpu":
        raise BadInput("launch", "argument", f"is on {value.device}", "move it to the cpu")
    name = str(value.dtype).removeprefix("torch.")
    special = {
        "bfloat16": (ml_dtypes.bfloat16, "int16"),
        "float8_e5m2": (ml_dtypes.float8_e5m2, "int8"),
        "float8_e4m3fn": (ml_dtypes.float8_e4m3fn, "int8"),
    }
    if name in special:
        torch = sys.modules["torch"]
        kind, bits = special[name]
        return value.contiguous().view(getattr(torch, bits)).numpy().view(kind)
    return value.numpy()


def to_device(memory: SharedMemory, value: Any, name: str) -> Argument:
    """Copy a host array into HBM.

    Raises:
        BadInput: the array's type has no NKI counterpart, or it is empty.
    """
    array = to_numpy(value)
    try:
        dtype = name_of(array.dtype)
        if dtype in WIDE and not memory.policy.traced:
            raise KeyError(dtype)
    except (KeyError, TypeError):
        allowed = f"it can be {', '.join(n for n in INFO if n not in WIDE)}, in NKI 0.7 int64 and uint64 too"
        raise BadInput("launch", f"argument {name}", f"is {array.dtype}", allowed) from None
    if array.ndim == 0 or array.size == 0:
        raise BadInput("launch", f"argument {name}", f"has shape {array.shape}", "arrays hold at least one element")
    typed = np.empty(array.shape, storage_of(dtype, memory.policy.precise_fp))
    store(typed, array.view(np.uint8) if array.dtype == bool else array, dtype, memory.policy.precise_fp)
    request = Request(array.shape, dtype, "shared_hbm", name, ("<argument>", 0))
    storage = memory.hbm(request, -1 if memory.cores > 1 else 0, typed.reshape(1, -1).view(np.uint8))
    memory.inputs.append(storage)
    return Argument(value, array, storage, name)


def device_view(argument: Argument) -> NkiTensor:
    """Return the tensor that the kernel receives."""
    return NkiTensor(
        argument.array.shape, argument.storage.dtype, argument.storage, MemoryRegion.shared_hbm, argument.name
    )


def write_back(argument: Argument) -> None:
    """Copy changes of a mutated input into the host's array, in place."""
    storage = argument.storage
    if not storage.writes or storage.unknown:
        return
    typed = storage.data.view(storage_of(storage.dtype, storage.precise))
    values = typed.reshape(argument.array.shape).astype(argument.array.dtype)
    if is_torch(argument.host):
        torch = sys.modules["torch"]
        with torch.no_grad():
            argument.host.copy_(to_torch(values))
    else:
        if not argument.array.flags.writeable:
            raise BadInput("launch", argument.name, "is read-only but was written", "pass a writeable array")
        argument.array[...] = values


def to_torch(array: Any) -> Any:
    """Return numpy values as a torch tensor."""
    torch = sys.modules["torch"]
    name = array.dtype.name
    if name in ("bfloat16", "float8_e5m2", "float8_e4m3fn"):
        bits = array.view(np.int16 if array.dtype.itemsize == 2 else np.int8)
        return torch.from_numpy(bits.copy()).view(getattr(torch, name))
    if name in ("uint16", "uint32") and not hasattr(torch, name):
        array = array.astype(np.int64)
    if name == "float8_e4m3":
        array = array.astype(np.float32)
    return torch.from_numpy(np.ascontiguousarray(array))


def to_host(core: Core, value: Any, torch: bool) -> Any:
    """Turn a kernel's results into host values.

    Raises:
        BadOutput: a tensor is on chip, or private to one of two cores.
        UnwrittenRead: the kernel never wrote part of an output.
    """
    if isinstance(value, NkiTensor):
        return _release_tensor(core, value, torch)
    if isinstance(value, (tuple, list)):
        return type(value)(to_host(core, v, torch) for v in value)
    if isinstance(value, dict):
        return {k: to_host(core, v, torch) for k, v in value.items()}
    if value is None or isinstance(value, (int, float, str, bool)):
        return value
    raise BadOutput("launch", "return value", f"is {type(value).__name__}", "return tensors, or tuples of them")


def flat(value: Any, name: str = "output") -> Iterator[tuple[str, Any]]:
    """Every array that a kernel or its law returned, by a name with its place."""
    if isinstance(value, (tuple, list)):
        for number, part in enumerate(value):
            yield from flat(part, f"{name}.{number}")
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from flat(part, f"{name}.{key}")
    elif value is not None:
        yield name, np.asarray(value)


def is_same(a: Any, b: Any) -> bool:
    """Whether two cores return the same tensors and values."""
    if isinstance(a, NkiTensor) and isinstance(b, NkiTensor):
        return a._storage is b._storage and a.dtype == b.dtype and a._layout() == b._layout()
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(is_same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(is_same(a[key], b[key]) for key in a)
    return type(a) is type(b) and bool(a == b)


def _release_tensor(core: Core, tensor: NkiTensor, torch: bool) -> Any:
    space = tensor.buffer
    if tensor._on_chip:
        raise BadOutput("launch", "return value", f"is {tensor.name} in {space.value}", "outputs are in nl.shared_hbm")
    if space is MemoryRegion.private_hbm and core.programs > 1:
        actual = f"is {tensor.name} in private_hbm of one core"
        raise BadOutput("launch", "return value", actual, "with two cores use nl.shared_hbm")
    if core.policy.unwritten_output != "allow":
        fault = access.unwritten(tensor, _WHO)
        if fault is not None and core.policy.unwritten_output == "raise":
            raise fault
        if fault is not None:
            core.warn("unwritten output", f"{fault}; NaN (integers: 4) is given back there", Relaxed)
    tensor._storage.info.touch(core.clock)
    if tensor._storage.unknown:
        dtype = tensor._numpy().dtype
        array = np.full((), np.nan if INFO[tensor.dtype].kind == "float" else 0).astype(dtype)
        array = np.broadcast_to(array, tensor.shape)
    else:
        array = np.array(tensor._numpy())
    if tensor.dtype == "bool":
        array = array.astype(bool)
    return to_torch(array) if torch else array
