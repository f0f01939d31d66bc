"""How strict a simulation is: one frozen value, strict by default."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Policy:
    """Every choice of behaviour of a launch; leniency is always explicit.

    Attributes:
        tracking: raise when an instruction reads an element that nobody wrote.
            Default: True.
        recording: keep an event per instruction for the timeline.
            Default: False.
        capacity: raise when the live tensors do not fit SBUF or PSUM.
            Default: True.
        races: detect unordered accesses of two cores to shared HBM.
            Default: True.
        precise_fp: round on write to the destination's dtype; off stores all floats as fp32.
            Default: True.
        unwritten_output: "raise" or "allow" for output elements that nobody wrote.
            Default: "raise".
        accumulate: "raise" or "warn" when a matmul accumulates on data that no matmul wrote.
            Default: "raise".
        barrier_scope: "data" (a core_barrier orders its own tensor, as the manual says) or
            "all" (it orders every tensor in shared HBM).
            Default: "data".
        seed: start of the random generators, which are undocumented on the hardware.
            Default: 0.
    """

    tracking: bool = True
    recording: bool = False
    capacity: bool = True
    races: bool = True
    precise_fp: bool = True
    unwritten_output: str = "raise"
    accumulate: str = "raise"
    barrier_scope: str = "data"
    seed: int = 0


STRICT = Policy()


def from_environment(base: Policy = STRICT) -> Policy:
    """Apply NKI_PRECISE_FP, the only variable of the official simulator that changes numbers."""
    if os.environ.get("NKI_PRECISE_FP", "1") == "0":
        return replace(base, precise_fp=False)
    return base
