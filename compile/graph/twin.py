"""A graph's StableHLO twin, which neuronx-cc takes as well: the native PyTorch route compiles this form alone."""

from __future__ import annotations

from trnspec.runtime.jax_compat import module_of
from trnspec.runtime.pjrt import without_copies


def stablehlo(proto: bytes) -> str:
    """The text of the StableHLO module of an HLO proto: its calls, loops, scatters and aliases as they are."""
    with module_of(proto) as module:
        without_copies(module)
        return str(module)
