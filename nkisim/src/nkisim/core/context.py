"""The core that is running a kernel on this thread, and its state other than memory."""

from __future__ import annotations

import threading
import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nkisim.core.cores import Rendezvous
from nkisim.dtypes import Flags
from nkisim.errors import NkiSimWarning, OtherVersion, OutsideKernel
from nkisim.geometry import Geometry
from nkisim.lines import kernel_line
from nkisim.memory.memory import CoreMemory
from nkisim.objects import VirtualRegister
from nkisim.policy import Policy

_RULES: dict[tuple[Geometry, str, str | None], int] = {}


@dataclass(eq=False)
class Lanes:
    """Reduction registers of one engine: one fp32 value per partition, or undefined."""

    values: NDArray[np.float32]
    # the operation that the values were reduced with; None while undefined
    operator: str | None = None
    # why the registers are undefined, for the message
    lost_to: str | None = None


@dataclass(eq=False)
class Core:
    """One simulated NeuronCore while it runs a kernel."""

    number: int
    program: int
    programs: int
    # the launch had a grid: program_ndim() is then 1
    grid: bool
    memory: CoreMemory
    policy: Policy
    geometry: Geometry
    meeting: Rendezvous
    rank: int = 0
    clock: int = 0
    # raw events, made into Event values when the launch ends
    log: list[tuple[Any, ...]] = field(default_factory=list)
    edges: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    lanes: dict[str, Lanes] = field(default_factory=dict)
    random: dict[str, Any] = field(default_factory=dict)
    constants: dict[object, Any] = field(default_factory=dict)
    # nl.* functions may use operators that the hardware lacks; they warn
    hardware_gaps: bool = False
    loop_depth: int = 0
    ordered_depth: int = 0
    # ordered instructions inside no_reorder: index of the previous one
    previous: int | None = None
    # which elements of the running instruction's operands are unwritten, where the policy lets it read them
    unwritten: list[Flags] = field(default_factory=list)
    # the compile_config of the launched kernel, and whether it overrides those of kernels that it calls
    config: tuple[Any, bool] = (None, False)
    # the prepare of a collective that waits for its trigger
    prepared: Any = None
    # the warnings so far, shared by the cores of a launch
    warned: set[str] = field(default_factory=set)
    # a small number for the facts that plans of instructions depend on in addition to their operands
    rules_key: int = 0
    recording: bool = False
    numerics: bool = True

    def __post_init__(self) -> None:
        self.rules_key = _RULES.setdefault((self.geometry, self.policy.enums, self.policy.nki), len(_RULES))
        self.recording, self.numerics = self.policy.recording, self.policy.numerics

    def registers(self, engine: str) -> Lanes:
        """Return the reduction registers of an engine."""
        result = self.lanes.get(engine)
        if result is None:
            result = Lanes(np.zeros((self.geometry.partitions, 1), np.float32))
            self.lanes[engine] = result
        return result

    def warn(self, key: str, text: str, kind: type[NkiSimWarning] = NkiSimWarning) -> None:
        """Warn once in a launch about `key`."""
        if key not in self.warned:
            self.warned.add(key)
            warnings.warn_explicit(kind(text), kind, *kernel_line())


class _Current(threading.local):
    core: Core | None = None


_CURRENT = _Current()


def current(op: str) -> Core:
    """Return the core of this thread.

    Raises:
        OutsideKernel: no kernel is running.
    """
    core = _CURRENT.core
    if core is None:
        raise OutsideKernel(op, None, "ran outside a kernel", "call the kernel through nki.simulate(kernel)")
    return core


def since(op: str, instead: str, operand: str | None = None) -> Core:
    """Return the core of this thread, for a name or an argument that came with NKI 0.7.

    Raises:
        OtherVersion: the launch is of 0.6; `instead` says what 0.6 has.
    """
    core = current(op)
    if not core.policy.traced:
        raise OtherVersion(
            op, operand, "came with NKI 0.7 and this launch is of 0.6", f"{instead}, or choose 0.7 (NKISIM_NKI)"
        )
    return core


def register(core: Core, value: int | None, frozen: bool = False) -> VirtualRegister:
    """Return a new register of a core; `frozen`, the counter of a loop."""
    made = VirtualRegister(value, frozen)
    made.traced = core.policy.traced
    return made


def running() -> Core | None:
    """Return the core of this thread, or None."""
    return _CURRENT.core


def enter(core: Core | None) -> Core | None:
    """Make `core` the core of this thread; return the one before."""
    before = _CURRENT.core
    _CURRENT.core = core
    return before
