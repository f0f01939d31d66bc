"""The dtypes of a graph's tensors, with their names in --dtype, torch, NumPy, HLO and safetensors."""

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy
    import torch


@dataclass(frozen=True)
class DType:
    """`flag`: the value of --dtype, empty if models do not use the dtype; `name`: its name in torch, NumPy and HLO."""

    flag: str
    name: str
    bytes: int
    safetensors: str

    # imported lazily: pushing and pulling bundles needs neither library
    @property
    def torch(self) -> "torch.dtype":
        # torch has no float8_e4m3; see model/fp8.py
        return getattr(importlib.import_module("torch"), self.name.replace("float8_e4m3", "float8_e4m3fn"))

    @property
    def numpy(self) -> "numpy.dtype":
        # registers bfloat16 with NumPy
        importlib.import_module("ml_dtypes")
        return importlib.import_module("numpy").dtype(self.name)


FP8 = DType("", "float8_e4m3", 1, "F8_E4M3")
DTYPES = (DType("fp32", "float32", 4, "F32"), DType("bf16", "bfloat16", 2, "BF16"), DType("", "int32", 4, "I32"), FP8)
BY_FLAG = {d.flag: d for d in DTYPES if d.flag}
BY_NAME = {d.name: d for d in DTYPES}
