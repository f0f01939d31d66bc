"""The seam to torchax, through which torch code is traced as JAX.

torchax 0.0.13 names overloads of ATen operators that later torch releases dropped (the ones with
named dimensions). They are given placeholders before the import; no code here can reach them.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import torch

_OVERLOAD = re.compile(r"torch\.ops\.aten\.(\w+)\.(\w+)")


def _fill_dropped_overloads() -> None:
    spec = importlib.util.find_spec("torchax")
    if spec is None or spec.origin is None:
        return
    for source in Path(spec.origin).parent.rglob("*.py"):
        for name, overload in _OVERLOAD.findall(source.read_text(encoding="utf-8")):
            packet = getattr(torch.ops.aten, name, None)
            if packet is not None and not hasattr(packet, overload):
                packet.__dict__[overload] = f"aten.{name}.{overload} is not in this torch"


_fill_dropped_overloads()

from torchax import interop  # noqa: E402

__all__ = ["interop"]
