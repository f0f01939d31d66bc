"""How strict a simulation is: one frozen value, and who chooses it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

from nkisim import versions
from nkisim.errors import BadLaunch


@dataclass(frozen=True, slots=True)
class Policy:
    """Every choice of behaviour of a launch; leniency is always explicit, and warns once when it is used.

    Attributes:
        tracking: know which elements are unwritten; off, memory holds the bytes that the host left there.
            Default: True.
        unwritten_read: what happens when an instruction reads an unwritten element: "raise", or
            "sentinel": it reads NaN (integers: 4), and its results count as unwritten too.
            Default: "raise".
        unwritten_output: what happens when an output holds such elements: "raise", "warn" or "allow".
            Default: "raise".
        recording: keep an event per instruction for the timeline.
            Default: False.
        numerics: compute; off, the same events, addresses and laws of memory without arithmetic: only integers
            that follow from inputs are computed, since they may be addresses, and outputs are NaN or 0.
            Default: True.
        capacity: raise when the live tensors do not fit SBUF or PSUM. "warn" warns instead, and still raises
            when recording, since times need addresses; off, nothing is placed, which recording refuses.
            Default: True.
        packing: "columns" (a tensor takes its bytes in all partitions) or "partitions" (tensors on disjoint
            partitions may share bytes, where columns do not fit). No document says which a compiler does.
            Default: "columns".
        races: detect unordered accesses of two cores to shared HBM; equal bytes written by both only warn. With
            "outcome" so do different ones that nobody reads, where each core's last bytes are the same.
            Default: True.
        ranks: ranks that the launch of one represents: in a collective the others bring what this one brings, at the
            same time. For times only: numerics must be off.
            Default: 0, the ranks that are launched.
        precise_fp: round on write to the destination's dtype; off stores all floats as fp32.
            Default: True.
        accumulate: "raise" or "warn" when a matmul accumulates on data that no matmul wrote.
            Default: "raise".
        reported: "warn" or "raise" where a kernel does what no document forbids and is reported to fail on a device.
            Default: "warn".
        barrier_scope: "data" (a core_barrier orders its tensor, as the manual says) or
            "all" (it orders every tensor in shared HBM).
            Default: "data".
        enums: "members", or "integers": an integer is taken for the member with that value.
            Default: "members".
        inner_kernels: what happens when a kernel calls a jitted one: "raise", or "inline" it.
            Default: "raise".
        seed: start of the random generators, which are undocumented on the hardware.
            Default: 0.
        nki: the version of the language, "0.6" (the compiler parses kernels) or "0.7" (it runs them in Python).
            Default: None, which is NKISIM_NKI, and without it "0.6".

    Raises:
        BadLaunch: the times of such a launch would be wrong.
    """

    tracking: bool = True
    unwritten_read: str = "raise"
    unwritten_output: str = "raise"
    recording: bool = False
    numerics: bool = True
    capacity: bool | str = True
    packing: str = "columns"
    races: bool | str = True
    ranks: int = 0
    precise_fp: bool = True
    accumulate: str = "raise"
    reported: str = "warn"
    barrier_scope: str = "data"
    enums: str = "members"
    inner_kernels: str = "raise"
    seed: int = 0
    nki: str | None = None

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise BadLaunch(
                    "Policy", name, f"is {getattr(self, name)!r}", f"it can be {', '.join(map(str, choices))}"
                )
        if self.recording and not self.capacity:
            allowed = "without addresses all tensors alias and times are wrong; leave capacity on, or recording off"
            raise BadLaunch("Policy", "capacity", "is off in a launch that records", allowed)
        if self.ranks and self.numerics:
            allowed = "other ranks have other numbers; turn numerics off, or launch them by simulate_ranks"
            raise BadLaunch("Policy", "ranks", f"is {self.ranks} in a launch that computes", allowed)

    @property
    def traced(self) -> bool:
        """Python runs the kernel, and every call of the language is traced: NKI 0.7."""
        return self.nki == "0.7"


_CHOICES: dict[str, tuple[object, ...]] = {
    "nki": (None, *versions.VERSIONS),
    "unwritten_read": ("raise", "sentinel"),
    "unwritten_output": ("raise", "warn", "allow"),
    "capacity": (True, False, "warn"),
    "packing": ("columns", "partitions"),
    "accumulate": ("raise", "warn"),
    "races": (True, False, "outcome"),
    "reported": ("raise", "warn"),
    "barrier_scope": ("data", "all"),
    "enums": ("members", "integers"),
    "inner_kernels": ("raise", "inline"),
}
STRICT = Policy(reported="raise")
# the documented behaviour of the vendor's simulator (nki/guides/nki_simulator.rst), on which its library relies
VENDOR = Policy(
    unwritten_read="sentinel",
    unwritten_output="warn",
    capacity="warn",
    packing="partitions",
    accumulate="warn",
    races="outcome",
    barrier_scope="all",
    enums="integers",
    inner_kernels="inline",
)
POLICIES = {"default": Policy(), "strict": STRICT, "vendor": VENDOR}
VARIABLE = "NKISIM_POLICY"
_USED: ContextVar[Policy | None] = ContextVar("policy", default=None)


def chosen(policy: Policy | str | None = None) -> Policy:
    """Return the policy of a launch: as given, else of `using`, else of NKISIM_POLICY, else the default.

    One that names no version of the language gets that of `using`, else of NKISIM_NKI, else 0.6.
    NKI_PRECISE_FP=0, the only variable of the official simulator that changes numbers, applies to all.

    Raises:
        BadLaunch: no policy has that name.
    """
    if policy is None:
        policy = _USED.get() or os.environ.get(VARIABLE, "default")
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise BadLaunch("policy", None, f"is {policy!r}", f"it can be {', '.join(POLICIES)}")
        policy = POLICIES[policy]
    if policy.nki is None:
        used = _USED.get()
        version = used.nki if used else os.environ.get(versions.VARIABLE, versions.VERSIONS[0])
        policy = replace(policy, nki=version)
    return replace(policy, precise_fp=False) if os.environ.get("NKI_PRECISE_FP", "1") == "0" else policy


@contextmanager
def using(policy: Policy | str) -> Iterator[None]:
    """Choose the policy of every launch inside that names none, such as nki.simulate's."""
    before = _USED.set(chosen(policy))
    try:
        yield
    finally:
        _USED.reset(before)
