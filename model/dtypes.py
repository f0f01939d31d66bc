"""The one table of dtypes: a row for each dtype of a graph's tensors, with its names in every library."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy
    import torch


@dataclass(frozen=True)
class DType:
    """`flag` is the word of --dtype, empty for a dtype that no model has; torch, numpy and HLO share `name`."""

    flag: str
    name: str
    bytes: int
    safetensors: str

    # imported when needed: pushing and pulling bundles needs neither library
    @property
    def torch(self) -> "torch.dtype":
        import torch  # noqa: PLC0415

        dtype: torch.dtype = getattr(torch, self.name)
        return dtype

    @property
    def numpy(self) -> "numpy.dtype":
        import ml_dtypes  # noqa: F401, PLC0415 (numpy learns bfloat16 from it)
        import numpy  # noqa: PLC0415

        return numpy.dtype(self.name)


DTYPES = (DType("fp32", "float32", 4, "F32"), DType("bf16", "bfloat16", 2, "BF16"), DType("", "int32", 4, "I32"))
BY_FLAG = {d.flag: d for d in DTYPES if d.flag}
BY_NAME = {d.name: d for d in DTYPES}
