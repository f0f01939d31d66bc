"""Creating tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nkisim import isa
from nkisim.core.context import current, since
from nkisim.dtypes import INFO, WIDE, Array, name_of, storage_of, store
from nkisim.errors import IllegalView, Misaligned, WrongArgument, WrongDtype
from nkisim.isa.tokens import TOKENS
from nkisim.lines import kernel_line
from nkisim.memory.memory import Request
from nkisim.memory.tensor import NkiTensor
from nkisim.objects import MemoryRegion

__all__ = [
    "full", "ndarray", "ones", "rand", "random_seed", "shared_constant", "shared_identity_matrix", "zeros",
    "zeros_like",
]  # fmt: skip

sbuf = MemoryRegion.sbuf


def _dtype(dtype: object, op: str) -> str:
    try:
        named = name_of(dtype)
    except (KeyError, TypeError):
        raise WrongDtype(op, "dtype", f"is {dtype!r}", f"it can be {', '.join(INFO)}") from None
    if named in WIDE:
        since(op, "0.6 has 32 bits", f"dtype {named}")
    return named


def ndarray(
    shape: Sequence[int], dtype: object, buffer: MemoryRegion = sbuf, name: str = "",
    address: tuple[int, int] | None = None,
) -> NkiTensor:  # fmt: skip
    """Allocate a tensor without initializing it.

    `address` is (start partition, byte offset in the partition) of an on-chip tensor.
    """
    core = current("ndarray")
    shape = tuple(int(s) for s in shape)
    region = _region(buffer)
    on_chip = region in (MemoryRegion.sbuf, MemoryRegion.psum)
    # register_load takes a tensor of shape [1] (its docstring)
    if not shape or min(shape) < 1 or (on_chip and len(shape) < 2 and shape != (1,)):
        need = "on-chip tensors have two or more dimensions" if on_chip else "it must not be empty"
        raise IllegalView("ndarray", f"shape {shape}", f"is requested in {region.value}", need)
    if address is not None:
        if not on_chip or len(address) != 2 or any(a is None for a in address):
            allowed = "on-chip addresses are (partition, bytes)"
            raise Misaligned("ndarray", f"address {address}", f"is given in {region.value}", allowed)
        address = (int(address[0]), int(address[1]))
    named = _dtype(dtype, "ndarray")
    request = Request(shape, named, region.value, name, kernel_line(), address)
    return NkiTensor(shape, named, core.memory.allocate(request), region, name)


def _region(buffer: object) -> MemoryRegion:
    if isinstance(buffer, MemoryRegion):
        return buffer
    raise WrongArgument("ndarray", "buffer", f"is {buffer!r}", "pass nl.sbuf, nl.psum, nl.hbm or nl.shared_hbm")


def full(
    shape: Sequence[int], fill_value: float, dtype: object, buffer: MemoryRegion = sbuf, name: str = ""
) -> NkiTensor:
    """Allocate a tensor and fill it with a constant."""
    tensor = ndarray(shape, dtype, buffer, name)
    if INFO[tensor.dtype].kind == "int" and float(fill_value).is_integer():
        fill_value = int(fill_value)
    if tensor._on_chip:
        isa.memset(dst=tensor, value=fill_value)
        return tensor
    # hbm is filled through a tile of one row
    flat = tensor.reshape((tensor.size,)) if tensor.ndim > 1 else tensor
    step = min(tensor.size, 8192)
    row = ndarray((1, step), dtype)
    isa.memset(dst=row, value=fill_value)
    for start in range(0, tensor.size, step):
        count = min(step, tensor.size - start)
        isa.dma_copy(dst=flat[start : start + count], src=row[:, 0:count])
    return tensor


def zeros(shape: Sequence[int], dtype: object, buffer: MemoryRegion = sbuf, name: str = "") -> NkiTensor:
    """Allocate a tensor of zeros."""
    return full(shape, 0, dtype, buffer, name)


def ones(shape: Sequence[int], dtype: object, buffer: MemoryRegion = sbuf, name: str = "") -> NkiTensor:
    """Allocate a tensor of ones."""
    return full(shape, 1, dtype, buffer, name)


def zeros_like(x: NkiTensor, dtype: object = None, buffer: MemoryRegion | None = None, name: str = "") -> NkiTensor:
    """Allocate zeros with the shape, and by default the dtype and memory, of `x`."""
    return zeros(x.shape, dtype or x.dtype, buffer or x.buffer, name)


def rand(shape: Sequence[int], dtype: object, buffer: MemoryRegion = sbuf, name: str = "") -> NkiTensor:
    """Generate uniform numbers of [0, 1) with 24 random bits."""
    words = ndarray(shape, "uint32", buffer)
    isa.rng(dst=words)
    # the low 24 bits are exact in fp32, and their largest value stays below 1
    isa.tensor_scalar(dst=words, data=words, op0=TOKENS["right_shift"], operand0=8)
    tensor = ndarray(shape, dtype, buffer, name)
    isa.tensor_scalar(dst=tensor, data=words, op0=TOKENS["multiply"], operand0=2.0**-24)
    return tensor


def random_seed(seed: NkiTensor) -> None:
    """Seed the generator with a [1, 1] tensor."""
    isa.set_rng_seed(src_seeds=seed)


def shared_constant(constant: Array | str) -> NkiTensor:
    """Embed a numpy array, or the .npy file at a path, as a tensor in shared HBM."""
    core = current("shared_constant")
    values = np.load(constant) if isinstance(constant, str) else np.asarray(constant)
    key = ("constant", values.shape, str(values.dtype), values.tobytes())
    result = core.constants.get(key)
    if result is None:
        result = host_tensor(values, _dtype(values.dtype, "shared_constant"), "constant")
        core.constants[key] = result
    return result


def host_tensor(values: Array, dtype: str, name: str) -> NkiTensor:
    """Return an HBM tensor whose bytes the host filled."""
    core = current(name)
    precise = core.policy.precise_fp
    typed = np.empty(values.shape, storage_of(dtype, precise))
    store(typed, values, dtype, precise)
    request = Request(values.shape, dtype, "shared_hbm", name, kernel_line())
    data = typed.reshape(1, -1).view(np.uint8)
    storage = core.memory.shared.hbm(request, -1, data)
    return NkiTensor(values.shape, dtype, storage, MemoryRegion.shared_hbm, name)


def shared_identity_matrix(n: int, dtype: object = "uint8", dst: NkiTensor | None = None) -> NkiTensor:
    """Return an n x n identity in SBUF; a core shares one per size and dtype."""
    core = current("shared_identity_matrix")
    named = _dtype(dtype, "shared_identity_matrix")
    key = ("identity", n, named)
    if dst is None and key in core.constants:
        known: NkiTensor = core.constants[key]
        return known
    source = core.constants.get(("eye", n, named))
    if source is None:
        source = host_tensor(np.eye(n, dtype=np.float32), named, "identity")
        core.constants["eye", n, named] = source
    tile = ndarray((n, n), named) if dst is None else dst
    isa.dma_copy(dst=tile, src=source)
    if dst is None:
        core.constants[key] = tile
    return tile
