"""nki.compiler of 0.7: what a kernel may ask of the compiler; nothing of it changes numbers or times here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class AddressRotation(Enum):
    """Whether the compiler may rotate the addresses of tensors."""

    AUTO = "auto"
    ENABLE = "enable"
    DISABLE = "disable"


@dataclass(frozen=True)
class CompileConfig:
    """Options of a kernel for the compiler that follows the tracer; with None the compiler chooses.

    Attributes:
        address_rotation: rotate addresses.
            Default: AddressRotation.AUTO.
        non_ssa_legalization: legalize tensors that are written twice.
            Default: None.
        dead_code_elim: let results that nobody reads go.
            Default: None.
        barrier_check: check the barriers of two cores.
            Default: None.
        prefetch_auto: reserve a ring in SBUF for loads ahead of their use; not simulated.
            Default: False.
        nki_alloc_fallback: let neuronx-cc allocate where NKI's allocation fails.
            Default: True.
    """

    address_rotation: AddressRotation = AddressRotation.AUTO
    non_ssa_legalization: bool | None = None
    dead_code_elim: bool | None = None
    barrier_check: bool | None = None
    prefetch_auto: bool = False
    nki_alloc_fallback: bool = True


@dataclass(frozen=True)
class SpecializationConfig:
    """Options of a kernel for its tracing.

    Attributes:
        allow_nested_config_override: warn instead of refusing where a kernel that this one calls has other options.
            Default: False.
    """

    allow_nested_config_override: bool = False
