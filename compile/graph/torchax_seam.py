"""The seam to torchax, through which torch code is traced as JAX.

torchax 0.0.13 names ATen operators, and overloads of them, that later torch releases dropped (those with named
dimensions; with 2.14 cholesky and qr). They are given placeholders before the import; no code here can reach them.
"""

import importlib.util
import re
from pathlib import Path

import jax
import torch

# a graph's places in the source are dropped at its end (`trnspec/bundle/hlo.py`); to find them is a tenth of a trace
jax.config.update("jax_traceback_in_locations_limit", 0)

_NAMED = re.compile(r"torch\.ops\.aten\.(\w+)(?:\.(\w+))?")


def _fill_dropped() -> None:
    spec = importlib.util.find_spec("torchax")
    if spec is None or spec.origin is None:
        return
    for source in Path(spec.origin).parent.rglob("*.py"):
        for name, overload in _NAMED.findall(source.read_text(encoding="utf-8")):
            if not hasattr(torch.ops.aten, name):
                setattr(torch.ops.aten, name, type(name, (), {}))
            packet = getattr(torch.ops.aten, name)
            if overload and not hasattr(packet, overload):
                setattr(packet, overload, f"aten.{name}.{overload} is not in this torch")


_fill_dropped()

from torchax import interop  # noqa: E402

__all__ = ["interop"]
