"""A graph's StableHLO twin, which neuronx-cc takes as well: the native PyTorch route compiles this form alone."""

from __future__ import annotations

from jax._src.interpreters import mlir
from jaxlib.mlir import ir

from trnspec.runtime.pjrt import stablehlo_of


def stablehlo(proto: bytes) -> str:
    """The text of the StableHLO module of an HLO proto: its calls, loops, scatters and aliases as they are."""
    with mlir.make_ir_context(), ir.Location.unknown():
        return str(stablehlo_of(proto))
