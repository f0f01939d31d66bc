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


for _source in Path(str(importlib.util.find_spec("torchax").origin)).parent.rglob("*.py"):  # type: ignore[union-attr]
    for _name, _overload in _NAMED.findall(_source.read_text(encoding="utf-8")):
        if not hasattr(torch.ops.aten, _name):
            setattr(torch.ops.aten, _name, type(_name, (), {}))
        _packet = getattr(torch.ops.aten, _name)
        if _overload and not hasattr(_packet, _overload):
            setattr(_packet, _overload, f"aten.{_name}.{_overload} is not in this torch")

from torchax import interop  # noqa: E402
from torchax.ops import mappings  # noqa: E402

# a graph's FP8 is trn2's, for which torch has no dtype (model/fp8.py)
mappings.TORCH_DTYPE_TO_JAX[torch.float8_e4m3fn] = jax.numpy.dtype("float8_e4m3")
mappings.JAX_DTYPE_TO_TORCH[jax.numpy.dtype("float8_e4m3")] = torch.float8_e4m3fn

__all__ = ["interop"]
