"""nkisim: AWS's NKI kernel language simulated on a CPU, Trainium2 first."""

from nkisim import collectives, isa, language
from nkisim.errors import LawError, NkiValidationError, NotSimulated
from nkisim.event import Event, Extent, Peak, Recording
from nkisim.install import install
from nkisim.launch import Kernel, Result, jit, run, simulate
from nkisim.policy import POLICIES, STRICT, VENDOR, Policy, using

__version__ = "0.6.0"

__all__ = [
    "POLICIES", "STRICT", "VENDOR", "Event", "Extent", "Kernel", "LawError", "NkiValidationError", "NotSimulated",
    "Peak", "Policy", "Recording", "Result", "collectives", "install", "isa", "jit", "language", "run",
    "simulate", "using",
]  # fmt: skip
