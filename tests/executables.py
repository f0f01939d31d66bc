"""Compiled graphs of the test session on disk, shared by its workers: XLA compiles each graph once.

Named by the digest of everything that compiling reads: the proto, the weights' form, the options, the
number of devices, the compiler's version and the code of the seam. Only tests use this: a bundle has no executables.
"""

from __future__ import annotations

import hashlib
import inspect
from pathlib import Path
from typing import Any

import jaxlib
import pytest
from jaxlib import xla_client

from model.bundle.graph_spec import GraphSpec
from model.serving import columns, pjrt, quicker

_COMPILE = pjrt.compile_hlo
_CODE = "".join(inspect.getsource(module) for module in (pjrt, columns, quicker))


def share(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Let every graph of this process be compiled once, into the folder."""
    folder.mkdir(exist_ok=True)

    def compile_hlo(proto: bytes, devices: list[Any], graph: GraphSpec | None = None) -> Any:
        if devices[0].platform != "cpu":
            return _COMPILE(proto, devices, graph)
        listed, client = xla_client.DeviceList(tuple(devices)), devices[0].client
        read = [repr(graph), [d.id for d in devices], sorted(pjrt.SAME_BITS.items()), jaxlib.__version__, _CODE]
        file = folder / hashlib.sha256(proto + repr(read).encode()).hexdigest()
        if file.exists():
            return client.deserialize_executable(file.read_bytes(), listed, None)
        made = _COMPILE(proto, devices, graph)
        temporary = file.with_suffix(f".{id(made)}")
        temporary.write_bytes(made.serialize())
        temporary.replace(file)
        return made

    patch.setattr(pjrt, "compile_hlo", compile_hlo)
